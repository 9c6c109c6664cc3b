"""Figures of a simulated gateway by entitlement: SLO attainment, refusals, TTFT."""

from collections import Counter
from typing import Final

import msgspec
import numpy as np

from gateway.records.entitlement import BACKFILL, OWN_LIMITS, Entitlement
from simulator.fleet.outcome import Tail, tail
from simulator.fleet.statistics import Interval
from simulator.fleet.traffic import Floats
from simulator.pipeline.intake import OPEN
from simulator.pipeline.records import Gateway, PipelineOutcome

ATTAINMENT_GOAL: Final = 0.99
"""Share of the served requests that must have their first token within the SLO."""


class TenantSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One entitlement after the warm-up."""

    name: str
    service_class: str
    requests: int
    """Requests that it sent."""
    served: int
    refused: dict[str, int]
    """Requests that were not served to their end, by reason."""
    slo_s: float
    """Its own target, or the run's."""
    attainment: float
    """Share of served requests with their first token within the SLO; NaN without any."""
    ttft: Tail
    tpot: Tail

    @property
    def refused_by_load(self) -> int:
        """Requests refused for want of capacity, not for the entitlement's own limits."""
        return sum(n for reason, n in self.refused.items() if reason not in OWN_LIMITS)

    @property
    def faults(self) -> tuple[str, ...]:
        """Promises that were broken; backfill classes are promised no capacity."""
        found = []
        if self.served and self.attainment < ATTAINMENT_GOAL and not _in_doubt(self):
            found.append(
                f"{100 * self.attainment:.1f} % of its requests within {1000 * self.slo_s:g} ms, "
                f"below {100 * ATTAINMENT_GOAL:g} %"
            )
        if self.refused_by_load and self.service_class not in BACKFILL:
            found.append(f"{self.refused_by_load} requests refused for want of capacity")
        return tuple(found)


def tenants(gateway: Gateway, found: PipelineOutcome, slo_s: float) -> tuple[TenantSummary, ...]:
    """Every entitlement's figures; one that states no SLO is judged by `slo_s`."""
    owners = gateway.entitlements or (OPEN,)
    low_s, _ = found.fleet.window_s()
    late = found.fleet.arrival_s >= low_s
    reasons = np.array(found.reasons)
    return tuple(
        _summary(owner, found, reasons, late & (found.entitlement == i), slo_s)
        for i, owner in enumerate(owners)
    )


def _summary(
    owner: Entitlement,
    found: PipelineOutcome,
    reasons: np.ndarray,
    mine: np.ndarray,
    slo_s: float,
) -> TenantSummary:
    served = mine & (reasons == "")
    ttft_s: Floats = found.fleet.ttft_s[served]
    goal_s = owner.slo_ms / 1000 if owner.slo_ms else slo_s
    counts = Counter(str(reason) for reason in reasons[mine] if reason)
    return TenantSummary(
        name=owner.name,
        service_class=owner.service_class,
        requests=int(mine.sum()),
        served=int(served.sum()),
        refused=dict(sorted(counts.items())),
        slo_s=goal_s,
        attainment=float((ttft_s <= goal_s).mean()) if len(ttft_s) else float("nan"),
        ttft=tail(ttft_s),
        tpot=tail(found.fleet.tpot_s[served]),
    )


def _in_doubt(summary: TenantSummary) -> bool:
    """Whether the SLO lies within the bounds of the P99: the share may then be met."""
    bounds: Interval | None = summary.ttft.p99
    return bounds is not None and bounds.low <= summary.slo_s
