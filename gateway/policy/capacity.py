"""What the ready workers can promise: who is bound, the average SLO, and how many are needed.

One capacity model for both questions of the token-pools paper: what may enter, and how many
replicas should run.
"""

from collections.abc import Iterable, Iterator
from math import ceil

from gateway.domain import Record
from gateway.policy.entitlements import Entitlement
from gateway.policy.ledger import TokenPool

SURVEY_SLICE = 1_000
"""Entitlements looked at between two pauses."""
TARGET_USE = 0.85
"""Share of the slots that the desired replicas leave in use."""


class Standing(Record, frozen=True, kw_only=True):
    """What a capacity means for a model's entitlements."""

    bound_until: int
    """`created` of the newest reserving entitlement that fits with all older ones."""
    mean_slo_ms: float
    """Over bound entitlements that state one; 0 when none does."""
    reserved: tuple[int, ...]
    """Sequences that bound entitlements reserve, by pool."""


def survey(
    entitlements: Iterable[Entitlement],
    slots: tuple[int, ...],
    kv_bytes: int,
    tokens_per_s: float,
    now_s: float,
) -> Iterator[Standing | None]:
    """Who fits, oldest first; yields None between slices and the Standing at the end.

    `entitlements` in order of creation; `kv_bytes` and `tokens_per_s` 0 for not enforced. The
    first reserving entitlement that does not fit, and all newer ones, are not bound.
    """
    reserved = [0] * len(slots)
    kv, rate = 0, 0.0
    bound_until, cut = 1 << 53, False
    slo_ms, slo_count = 0, 0
    for number, e in enumerate(entitlements):
        if number % SURVEY_SLICE == SURVEY_SLICE - 1:
            yield None
        if e.suspended or 0 < e.expires_unix_s <= now_s:
            continue
        if e.reserves:
            if not cut:
                fits = all(r + e.baseline_of(p) <= slots[p] for p, r in enumerate(reserved))
                fits = fits and (not kv_bytes or kv + e.kv_bytes <= kv_bytes)
                fits = fits and (not tokens_per_s or rate + e.tokens_per_s <= tokens_per_s)
                if not fits:
                    cut, bound_until = True, e.created - 1
            if cut:
                continue
            for pool in range(len(reserved)):
                reserved[pool] += e.baseline_of(pool)
            kv += e.kv_bytes
            rate += e.tokens_per_s
        if e.slo_ms:
            slo_ms += e.slo_ms
            slo_count += 1
    yield Standing(
        bound_until=bound_until,
        mean_slo_ms=slo_ms / slo_count if slo_count else 0.0,
        reserved=tuple(reserved),
    )


def desired_replicas(
    book: TokenPool,
    pool: int,
    reserved: int,
    slots_per_worker: int,
    elapsed_s: float,
    bounds: tuple[int, int],
) -> int:
    """Workers that reserved, admitted and denied demand of the last tick asks for.

    Denied demand by Little's law: denials per second times the mean service time.
    """
    state = book.pools[pool]
    denied = len(state.denials_last) / max(1e-3, elapsed_s) * state.service_s
    demand = max(reserved, state.inflight) + denied
    wanted = ceil(demand / TARGET_USE / max(1, slots_per_worker))
    return min(max(wanted, bounds[0]), bounds[1])
