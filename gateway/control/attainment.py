"""How often entitlements kept their target time to first token, over all replicas."""

from collections.abc import Collection, Mapping

from gateway.control.peers import Counts, NoPeers, Peers, all_counts, answer_counts
from gateway.metrics import Metrics
from gateway.records.entitlement import RESULTS


class Attainment:
    """Answers for this replica, and adds up those of all."""

    def __init__(self, metrics: Metrics, peers: Peers | None = None) -> None:
        self._metrics = metrics
        self._peers = peers or NoPeers()

    def own(self, names: Collection[str]) -> Counts:
        """What this replica counted since it started."""
        values = self._metrics.slo_requests.values
        return {
            name: {result: int(values.get((name, result), 0)) for result in RESULTS}
            for name in names
        }

    def answer(self) -> None:
        """Tell other replicas what this one counted."""
        answer_counts(self._peers, "slo", self.own)

    async def of(self, targets: Mapping[str, float]) -> dict[str, dict[str, object]]:
        """By entitlement, what all replicas counted; `targets` in ms, by name."""
        total = await all_counts(self._peers, "slo", self.own(targets))
        return {name: _shown(target_ms, total[name]) for name, target_ms in targets.items()}


def _shown(target_ms: float, counts: Mapping[str, int]) -> dict[str, object]:
    judged = counts["true"] + counts["false"]
    return {
        "target_ms": target_ms,
        "met": counts["true"],
        "missed": counts["false"],
        "refused": counts["refused"],
        "attainment": counts["true"] / judged if judged else None,
    }
