"""The parts of a model's section: boundary, compression, scheduling, admission, time-outs."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from gateway.settings.types import (
    Amount,
    Count,
    Factor,
    Flag,
    Natural,
    Seconds,
    Section,
    Share,
)


def _as_list(value: object) -> object:
    return value if isinstance(value, list | tuple) or value is None else [value]


class BoundaryConfig(Section):
    """Where the planner drew the line between pools; `sluice plan -o` writes it."""

    b_short: (
        Annotated[
            tuple[Count, ...], BeforeValidator(_as_list, json_schema_input_type=Count | list[Count])
        ]
        | None
    ) = None
    """Expected totals (tokens) up to this go to the smaller pool; a list, ascending, for more
    than two pools. Default: each smaller pool's window."""
    gamma: Factor = 1.5
    """Width of the band above the boundary whose requests may be compressed (1 is none)."""
    auto: Flag = False
    """Let preemptions, rescues and overruns move the boundaries."""
    mode: Literal["enforce", "observe"] | None = None
    """observe: moves are computed, logged and counted, not made; default: the model's mode."""
    b_short_min: (
        Annotated[
            tuple[Count, ...], BeforeValidator(_as_list, json_schema_input_type=Count | list[Count])
        ]
        | None
    ) = None
    """What a boundary never moves below (tokens); as `b_short`. Default: half of each. None moves
    above its pool's window."""
    planned: (
        Annotated[tuple[tuple[Count, Share], ...], Field(min_length=1, max_length=256)] | None
    ) = None
    """The lengths this fleet was planned for: [tokens, share of requests up to that], ascending.
    `sluice_length_drift` says how far live ones are from it."""


class CompressionConfig(Section):
    """Prompt compression at the boundary."""

    enabled: Flag = False
    """Compress what lies within gamma of the boundary."""
    max_cut: Share = 0.5
    """The largest share of a prompt that may be cut."""
    tokenizer: Path | None = None
    """The model's tokenizer.json: compressed prompts are counted exactly (extra `exact`)."""


class SchedulingConfig(Section):
    """Which worker of a pool serves a request."""

    policy: Literal["quartz", "sticky", "least-loaded", "round-robin", "bfio"] | None = None
    """quartz: by predicted prefill, prefix locality and fairness, with a queue in the gateway;
    bfio: for data-parallel ranks of one engine; the others bind at once. Default: quartz, and
    least-loaded where an engine has ranks."""
    predictor: Path | None = None
    """Of prefill times, as `sluice train` wrote it; absent: learned from the traffic."""
    queue_limit: Count = 1000
    """Requests that may wait in the gateway for a pool's workers; more are refused with 429."""
    queue_timeout_s: Seconds = 60.0
    """How long one may wait there."""
    prefix_entries: Count = 350_000  # beyond 361,000 their table is twice as large
    """Prefixes remembered for each pool, some 120 bytes each."""


class AdmissionConfig(Section):
    """Who may enter when a model's pools are full."""

    mode: Literal["enforce", "observe"] | None = None
    """observe: refusals of admission are computed and counted, not applied; default: the
    model's mode."""
    profile: Literal["default", "paper"] = "default"
    """Coefficients of weight, debt and charge; paper: as published."""
    headroom: Natural = 1
    """Slots of a pool that spot, preemptible and above-baseline traffic leave free."""
    mean_slo_ms: Amount | None = None
    """The average SLO that weights compare with; default: the mean over entitlements."""
    held_share: Share = 0.5
    """Of a pool's slots: what leases of other proxies may hold beyond reserved baselines."""
    reclaim: Literal["preemptible", "cancel"] = "preemptible"
    """Whose running requests give way to protected ones that wait: preemptible's; cancel:
    spot's too."""
    reclaim_ms: Count = 500
    """How long a protected request waits before others give way."""


class TimeoutsConfig(Section):
    """Per-phase limits towards the engines, in seconds."""

    connect_s: Seconds = 2.0
    """To open a connection."""
    first_byte_s: Seconds = 600.0
    """From the request to the response's head: queueing and prefill count."""
    idle_s: Seconds = 120.0
    """Between two chunks of a response."""


class TimeoutOverrides(Section):
    """A model's own limits; what is absent comes from the top level."""

    connect_s: Seconds | None = None
    """To open a connection."""
    first_byte_s: Seconds | None = None
    """From the request to the response's head."""
    idle_s: Seconds | None = None
    """Between two chunks of a response."""
