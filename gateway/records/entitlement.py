"""Entitlements: a tenant's terms, its service class, and the weight computed from them.

Token-pools paper, section 3.2 and eq. 1. The weight orders traffic when a pool is contended:

    w = w_class / (1 + a_slo slo/l_bar) / (1 + a_burst b) * max(.05, 1 + a_debt d)

clamped to its service class's range, so that no debt or burst lets one class pass another. The
debt factor has a floor because eq. 1 goes negative below d = -1/a_debt.

The one reading of `expires_at`, for the file and the admin API, is here too, and the decision
whether a request kept its entitlement's target time to first token.
"""

from datetime import UTC, datetime
from typing import Final, Literal

from gateway.records.decision import DecisionRecord
from gateway.records.record import Record
from gateway.records.request import OPEN, Principal

ServiceClass = Literal["dedicated", "guaranteed", "elastic", "spot", "preemptible"]
CLASSES: tuple[ServiceClass, ...] = ("dedicated", "guaranteed", "elastic", "spot", "preemptible")
"""Most protected first."""
RESERVING = frozenset({"dedicated", "guaranteed"})
"""Classes whose baseline is set aside for them."""
BORROWING = frozenset({"dedicated", "elastic", "spot"})
"""Classes that may use more than their token rate while others leave it unused."""
BACKFILL = frozenset({"spot", "preemptible"})
"""Classes that use only leftover capacity."""

_CLASS_WEIGHT = {
    "dedicated": 1000.0,
    "guaranteed": 1000.0,
    "elastic": 100.0,
    "spot": 1.0,
    "preemptible": 0.1,
}
_WEIGHT_RANGE = {
    "dedicated": (501.0, 1000.0),
    "guaranteed": (501.0, 1000.0),
    "elastic": (1.01, 500.0),
    "spot": (0.101, 1.0),
    "preemptible": (1e-6, 0.1),
}
OVERDUE_WEIGHT = _WEIGHT_RANGE["elastic"][1]
"""Weight of an overdue entitlement: the maximum of elastic."""
SPILLED_WEIGHT = 1.0
"""Largest weight of spilled work in its alternate pool: that of spot."""
BURST_WEIGHT = _WEIGHT_RANGE["elastic"][0]
"""Largest weight of work beyond its entitlement's token rate, where pools state none: it is above
backfill and below everything within a rate."""
_MIN_DEBT_FACTOR = 0.05


class AdmissionProfile(Record, frozen=True, kw_only=True):
    """Coefficients of eq. 1 and 2. `paper`: as published; `default`: see its fields' defaults."""

    name: str
    slo_share: float = 2.0
    """a_slo."""
    burst_share: float = 1.0
    """a_burst."""
    debt_share: float = 4.0
    """a_debt."""
    debt_keep: float = 0.7
    """gamma_d."""
    burst_keep: float = 0.7
    """gamma_b."""
    least_debt: float = -0.2
    """Most credit; eq. 2 has no bound."""
    tick_s: float = 5.0
    overdue_debt: float = 0.9
    """An elastic entitlement with more debt than this and nothing in flight goes first in its
    class: with oversold baselines, debt alone can starve the most patient entitlement."""
    cached_input_charge: float = 0.1
    """Cost of a prompt token that the engine had cached; other input and output tokens cost 1."""


PROFILES = {
    "default": AdmissionProfile(name="default"),
    "paper": AdmissionProfile(
        name="paper",
        least_debt=-1e9,
        overdue_debt=1.0,
        cached_input_charge=1.0,
    ),
}


class Entitlement(Record, frozen=True, kw_only=True):
    """One entitlement's terms. Zero means "not set" wherever a quantity may be absent."""

    name: str
    model: str
    tenant: str = ""
    service_class: ServiceClass = "elastic"
    slo_ms: int = 0
    """Target TTFT, in ms; 0 for the average."""
    slo_tpot_ms: float = 0.0
    """Target TPOT, in ms; 0 for none."""
    baseline: tuple[int, ...] = ()
    """Sequences in flight, by pool; missing pools have none."""
    limit: int = 0
    """r_e, sequences over all pools; 0 for the capacity. Guaranteed: the baseline, by pool too."""
    tokens_per_s: float = 0.0
    """lambda_e, input and output tokens."""
    tokens_per_s_limit: float = 0.0
    """Rate with borrowing; 0: what others leave. For borrowing classes only."""
    kv_bytes: int = 0
    """chi_e, the baseline of KV cache."""
    kv_bytes_limit: int = 0
    """KV cache with borrowing, at least `kv_bytes`; 0: the capacity. Guaranteed: the baseline."""
    expires_unix_s: float = 0.0
    suspended: bool = False
    observe: bool = False
    """Denials are computed and counted but not applied."""
    compress: bool = True
    """Whether its prompts may be compressed."""
    trusted_usage: bool = False
    """Whether usage that another proxy reports teaches its tenant's estimates."""
    created: int = 0
    """Order of creation in its model: the newest loses its reserve first when capacity falls."""

    @property
    def reserves(self) -> bool:
        """Whether its baseline is set aside for it."""
        return self.service_class in RESERVING

    def baseline_of(self, pool: int) -> int:
        """Baseline sequences in a pool."""
        return self.baseline[pool] if pool < len(self.baseline) else 0


def kv_limit(terms: Entitlement) -> int:
    """chi_e at most; a guaranteed entitlement never goes above its baseline. 0: the capacity."""
    baseline = terms.kv_bytes if terms.service_class == "guaranteed" else 0
    return terms.kv_bytes_limit or baseline


def weight(
    profile: AdmissionProfile,
    service_class: ServiceClass,
    slo_ms: float,
    mean_slo_ms: float,
    burst: float,
    debt: float,
) -> float:
    """w_e, in its service class's range. 0 for `slo_ms` or `mean_slo_ms` means an average SLO."""
    urgency = slo_ms / mean_slo_ms if slo_ms > 0 and mean_slo_ms > 0 else 1.0
    w = _CLASS_WEIGHT[service_class] / (1 + profile.slo_share * urgency)
    w = w / (1 + profile.burst_share * burst)
    w = w * max(_MIN_DEBT_FACTOR, 1 + profile.debt_share * debt)
    low, high = _WEIGHT_RANGE[service_class]
    return min(max(w, low), high)


def split_baseline(sequences: int, slots: tuple[int, ...]) -> tuple[int, ...]:
    """Split sequences over pools in proportion to slots, at least 1 each while there are enough.

    The largest-remainder method makes the parts add up to `sequences`.
    """
    if sequences <= 0 or not slots:
        return tuple(0 for _ in slots)
    total = sum(slots) or len(slots)
    shares = [sequences * (s or 1) / total for s in slots]
    parts = [max(1, int(share)) for share in shares]
    order = sorted(range(len(slots)), key=lambda i: (shares[i] - int(shares[i]), i), reverse=True)
    at = 0
    while sum(parts) < sequences:
        parts[order[at % len(order)]] += 1
        at += 1
    while sum(parts) > sequences and max(parts) > 1:
        parts[parts.index(max(parts))] -= 1
    while sum(parts) > sequences:  # fewer sequences than pools: the first pools get them
        parts[max(i for i, part in enumerate(parts) if part)] -= 1
    return tuple(parts)


MIN_SHARE: Final = 0.05
MAX_SHARE: Final = 20.0


class MeanRate:
    """Mean token rate over a model's entitlements that state one, updated incrementally.

    A client's share in fairness is its rate over this mean.
    """

    __slots__ = ("count", "total_tokens_per_s")

    def __init__(self) -> None:
        self.count = 0
        self.total_tokens_per_s = 0.0

    def add(self, tokens_per_s: float) -> None:
        """Add an entitlement's rate; 0 for none."""
        if tokens_per_s > 0:
            self.count += 1
            self.total_tokens_per_s += tokens_per_s

    def remove(self, tokens_per_s: float) -> None:
        """Remove a rate that was added."""
        if tokens_per_s > 0:
            self.count -= 1
            self.total_tokens_per_s = max(0.0, self.total_tokens_per_s - tokens_per_s)

    def share(self, tokens_per_s: float) -> float:
        """A rate over the mean, within [MIN_SHARE, MAX_SHARE]; 1 where none is stated."""
        if tokens_per_s <= 0 or not self.count or self.total_tokens_per_s <= 0:
            return 1.0
        share = tokens_per_s * self.count / self.total_tokens_per_s
        if MIN_SHARE <= share <= MAX_SHARE:
            return share
        return MIN_SHARE if share < MIN_SHARE else MAX_SHARE


def key_name(principal: Principal, digest: bytes | None) -> str | None:
    """A key's name for people: as the file names it, else its fingerprint; None if open."""
    if principal.key:
        return principal.key
    return None if digest is None or principal is OPEN else digest[:4].hex()


FIRST_YEAR: Final = 1971
LAST_YEAR: Final = 9998
"""Years in UTC. Beyond them a time zone leads out of the calendar; 0 in Unix seconds is none."""
INSTANT: Final = f"a date and time in the years {FIRST_YEAR} to {LAST_YEAR}"


def in_utc(at: datetime | str) -> datetime | None:
    """A time (ISO 8601) in UTC, which it is in without an offset; None for one out of range."""
    try:
        if isinstance(at, str):
            at = datetime.fromisoformat(at)
        at = at.replace(tzinfo=UTC) if at.tzinfo is None else at.astimezone(UTC)
    except (ValueError, OverflowError):
        return None
    return at if FIRST_YEAR <= at.year <= LAST_YEAR else None


SloResult = Literal["true", "false", "refused"]
RESULTS: Final[tuple[SloResult, ...]] = ("true", "false", "refused")
FAILED = frozenset({"evicted", "upstream_error", "internal_error"})
OWN_LIMITS: Final = frozenset({"concurrency", "tokens", "kv", "exceeds_entitlement"})
"""Refusals for the entitlement's own limits, which no fleet of any size avoids."""


def slo_result(record: DecisionRecord, target_ms: int, *, admitted: bool) -> SloResult | None:
    """Whether a request kept its target; None if it counts as nothing.

    `target_ms` 0: no target. `admitted`: admission gave it a lease. Rules:
    - Only streams count: an answer that is sent whole has no first token that its client could see.
    - A request counts as met or not once it was admitted. One that then failed, was evicted, or was
      refused for load (a full queue, no worker) did not keep the target, whatever came before.
    - An admission that refused honestly, with the wait, is counted apart: it is a promise of
      capacity that was not broken, and the client was told at once.
    - The client's own faults (4xx) count as nothing. A client that leaves before the first token
      counts as not met if it had waited beyond the target, else as nothing.
    """
    if not target_ms or not record.stream:
        return None
    outcome, timing = record.outcome, record.timing
    if outcome in FAILED:
        return "false"
    if outcome == "refused":
        if record.status != 429 and record.status < 500:
            return None
        return "false" if admitted else "refused"
    if outcome == "error":
        return None
    late_s = timing.ttft_s
    if late_s is None:
        waited_s = timing.duration_s or 0.0
        left = outcome == "disconnected" and waited_s * 1000 > target_ms
        return "false" if left else None
    return "true" if late_s * 1000 <= target_ms else "false"


def tpot_result(record: DecisionRecord, target_ms: float) -> SloResult | None:
    """Whether a stream kept its target time per output token; None if it counts as nothing.

    `target_ms` 0: no target. Counted are streams of two tokens and more, by their mean, whoever
    ended them, and missed are those that failed. Of refusals the first token's target tells.
    """
    if not target_ms or not record.stream:
        return None
    if record.outcome in FAILED:
        return "false"
    pace_s = record.timing.tpot_s
    return None if pace_s is None else "true" if pace_s * 1000 <= target_ms else "false"
