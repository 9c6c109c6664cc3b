"""The parts of a model's section: boundary, compression, scheduling, admission, time-outs."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from gateway.settings.types import (
    Count,
    Factor,
    Flag,
    Milliseconds,
    Natural,
    Seconds,
    Section,
    Share,
)


def _as_list(value: object) -> object:
    return value if isinstance(value, list | tuple) or value is None else [value]


class BoundaryConfig(Section):
    """The token boundary between pools; `sluice plan -o` writes it."""

    b_short: (
        Annotated[
            tuple[Count, ...], BeforeValidator(_as_list, json_schema_input_type=Count | list[Count])
        ]
        | None
    ) = None
    """Largest expected total (tokens) for the smaller pool; an ascending list for more than two
    pools. Default: each smaller pool's window."""
    gamma: Factor = 1.5
    """Compression window: requests up to gamma x boundary may be compressed (1: none)."""
    auto: Flag = False
    """Let preemptions, rescues and overruns move the boundaries."""
    mode: Literal["enforce", "observe"] | None = None
    """observe: moves are computed, logged and counted, not applied; default: the model's mode."""
    b_short_min: (
        Annotated[
            tuple[Count, ...], BeforeValidator(_as_list, json_schema_input_type=Count | list[Count])
        ]
        | None
    ) = None
    """Lower limit of each moving boundary (tokens), in the form of `b_short`. Default: half of
    each boundary. The upper limit is the pool's window."""
    planned: (
        Annotated[tuple[tuple[Count, Share], ...], Field(min_length=1, max_length=256)] | None
    ) = None
    """Length distribution the fleet was planned for: [tokens, share of requests up to that],
    ascending. `sluice_length_drift` shows how far live lengths differ."""


class CompressionConfig(Section):
    """Prompt compression at the boundary."""

    enabled: Flag = False
    """Compress prompts in the compression window (see `boundary.gamma`)."""
    when: Literal["asked", "any", "header"] = "asked"
    """asked: only a question over retrieved passages. any: other tasks as well, which may lose
    what they need. header: any task of requests with `x-sluice-compress: on`."""
    only_when_busy: Flag = True
    """Compress only while the larger pool has no free slot."""
    mark: Flag = True
    """Put `[...]` where text was cut."""
    max_cut: Share = 0.5
    """The largest share of a prompt that may be cut."""
    tokenizer: Path | None = None
    """The model's tokenizer.json, to count compressed prompts exactly (extra `exact`)."""


PolicyName = Literal["quartz", "sticky", "least-loaded", "round-robin", "bfio"]


class SchedulingConfig(Section):
    """The choice of a worker within a pool."""

    policy: PolicyName | None = None
    """quartz: by predicted prefill, prefix locality and fairness, with a queue in the gateway.
    bfio: for data-parallel ranks behind one barrier. The others bind at once. Default, by pool:
    bfio if all its engines have ranks (least-loaded if some have, or with several replicas), else
    quartz."""
    predictor: Path | None = None
    """Prefill time predictor written by `sluice train`; absent: learned from live traffic."""
    shadow: Flag = True
    """Predict prefills beside a policy other than quartz, log what quartz would have done, and
    learn. Costs some 22 us of CPU a request, a quarter of a least-loaded one's, and the memory of
    `prefix_entries`."""
    queue_limit: Count = 1000
    """Requests that may wait for a pool's workers; further ones are refused with 429."""
    queue_timeout_s: Seconds = 60.0
    """Longest wait of one request in that queue."""
    prefix_entries: Count = 350_000  # beyond 361,000 the hash table doubles
    """Prefixes remembered for each pool, about 120 bytes each."""


class PoolSchedulingConfig(Section):
    """The choice of a worker within this pool, where it differs from the model's."""

    policy: PolicyName | None = None
    """This pool's own policy; default: the model's."""


class AdmissionConfig(Section):
    """Admission when a model's pools are full."""

    mode: Literal["enforce", "observe"] | None = None
    """observe: admission's refusals are computed and counted, not applied; default: the model's
    mode."""
    profile: Literal["default", "paper"] = "default"
    """Coefficients of weight, debt and charge; paper uses the published ones."""
    headroom: Natural = 1
    """Slots of a pool that spot, preemptible and above-baseline traffic leave free."""
    mean_slo_ms: Milliseconds | None = None
    """The average SLO that weights compare with; default: the mean over entitlements."""
    held_share: Share = 0.5
    """Share of a pool's slots that other proxies' leases may hold beyond reserved baselines."""
    reclaim: Literal["preemptible", "cancel"] = "preemptible"
    """Running requests that give way to waiting protected ones: those of preemptible; with cancel
    also those of spot."""
    reclaim_ms: Count = 500
    """How long a protected request waits before other requests give way."""


class TimeoutsConfig(Section):
    """Time limits for each phase of an exchange with an engine, in seconds."""

    connect_s: Seconds = 2.0
    """To open a connection."""
    first_byte_s: Seconds = 600.0
    """From the request to the response head; includes queueing and prefill."""
    idle_s: Seconds = 120.0
    """Between two chunks of a response. An engine whose own token counters move may be silent up to
    `first_byte_s`."""


class TimeoutOverrides(Section):
    """A model's own time-outs; absent ones come from the top level."""

    connect_s: Seconds | None = None
    """To open a connection."""
    first_byte_s: Seconds | None = None
    """From the request to the response head."""
    idle_s: Seconds | None = None
    """Between two chunks of a response."""
