"""What a simulated gateway serves and for whom: its model, its engines, its tenants."""

from collections.abc import Sequence
from typing import Final

import msgspec
import numpy as np

from gateway.admission.terms import Terms
from gateway.fleet.model_runtime import ModelRuntime
from gateway.records.entitlement import Entitlement
from gateway.records.request import Category
from simulator.engine.profiles import EngineProfile
from simulator.fleet.outcome import FleetOutcome
from simulator.fleet.traffic import Floats, Ints, Random, Traffic
from simulator.pipeline.prompts import SharedPrompts

BYTES_PER_TOKEN: Final = 4.2
SPREAD: Final = 0.12
"""Standard deviation of the logarithm of a prompt's bytes per token, within one kind of text."""

KV_TOKENS_PER_S: Final = 150_000.0
"""20 GB/s at 131,072 bytes a token."""

REFUSED_LENGTH: Final = "context_length_exceeded"
QUEUE_FULL: Final = "queue_full"
QUEUE_TIMEOUT: Final = "queue_timeout"
EVICTED: Final = "evicted"
NO_WORKER: Final = "no_worker_ready"
BROKEN: Final = "broken"


class Gateway(msgspec.Struct, frozen=True, kw_only=True):
    """One model as the gateway would serve it, with engine models behind it.

    The state inside is used up by a run: build a new one for each.
    """

    served: ModelRuntime
    profiles: tuple[EngineProfile, ...]
    """Engine of each pool, those that compute other pools' prompts included."""
    kv_tokens_per_s: float = KV_TOKENS_PER_S
    """How fast a prompt's KV goes to the engine that decodes, where that is another; > 0."""
    entitlements: tuple[Entitlement, ...] = ()
    """In order of creation; empty for an open gateway."""
    terms: Terms | None = None
    """Capacity and rules of admission; None for a model that is not managed."""
    compressible: float = 1.0
    """p_c: share of the prompts in the compression window that the compressor can cut."""


class TenantTraffic(msgspec.Struct, frozen=True, kw_only=True):
    """Requests in order of arrival, with what a gateway reads of each; columns of one length."""

    traffic: Traffic
    entitlement: Ints
    """Index of its entitlement; 0 for all on an open gateway."""
    text_bytes: Ints
    asked_tokens: Ints
    """The client's limit for the answer; 0 for none."""
    categories: Sequence[Category]
    compressible: Floats | None = None
    """p_c of prompts of its length; None: the gateway's."""
    prompts: SharedPrompts | None = None
    """What they share; None: not known, and prefix caches are not simulated."""

    def __len__(self) -> int:
        return len(self.traffic)


class PipelineOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """What became of the requests."""

    fleet: FleetOutcome
    entitlement: Ints
    reasons: Sequence[str]
    """Why a request was not served to its end; "" for those that were."""
    uncut: Sequence[int]
    """Requests in the compression window that could not be cut."""
    covered: float | None
    """Share of prefills within their predicted quantile; None without predictions."""
    sent_s: Floats
    """When it was sent to the engine that answered, or was to."""
    prefilled_s: Floats
    """When another engine had computed its prompt; NaN if none did."""
    first_refusals: Sequence[str]
    """Why its first attempt was refused; "" for those that were not."""
    lost_in: Ints
    """The pool, or side of one, in which it was not served to its end; -1 for none."""


def with_tenants(
    traffic: Traffic,
    shares: Sequence[float],
    random: Random,
    *,
    entitlement: Ints | None = None,
    text_bytes: Floats | None = None,
    asked: Floats | None = None,
    categories: Sequence[Category] | None = None,
) -> TenantTraffic:
    """Give each request a tenant, by share, and what its body would show.

    Known columns are kept (NaN, and -1 of `entitlement`, for single unknown values). Text has
    BYTES_PER_TOKEN bytes a token with a log-normal SPREAD: the estimator has to learn the mean, and
    errs by the spread.
    """
    count = len(traffic)
    mass = np.cumsum(shares) / np.sum(shares)
    drawn = np.searchsorted(mass, random.random(count), side="right")
    owner = np.minimum(drawn, len(shares) - 1).astype(np.int64)
    if entitlement is not None:
        owner = np.where(entitlement >= 0, entitlement, owner)
    sizes = traffic.prompt_tokens * BYTES_PER_TOKEN * random.lognormal(0.0, SPREAD, count)
    if text_bytes is not None:
        sizes = np.where(np.isfinite(text_bytes), text_bytes, sizes)
    limits = np.zeros(count) if asked is None else np.nan_to_num(asked)
    return TenantTraffic(
        traffic=traffic,
        entitlement=owner,
        text_bytes=np.maximum(1, np.rint(sizes)).astype(np.int64),
        asked_tokens=np.rint(limits).astype(np.int64),
        categories=categories or ["prose"] * count,
    )
