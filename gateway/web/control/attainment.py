"""How often entitlements kept their target time to first token, over all replicas."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from gateway.metrics import Metrics
from gateway.policy.entitlements.slo import RESULTS
from gateway.web.control.peers import NoPeers, Peers, understood

Counts = dict[str, dict[str, int]]
"""Requests by entitlement and result (`RESULTS`)."""
_counts: Final = msgspec.json.Decoder(Counts).decode
_names: Final = msgspec.json.Decoder(list[str]).decode


class Attainment:
    """Answers for this replica, and adds up those of all."""

    def __init__(self, metrics: Metrics, peers: Peers | None = None) -> None:
        self._metrics = metrics
        self._peers = peers or NoPeers()

    def own(self, names: Sequence[str]) -> Counts:
        """What this replica counted since it started."""
        values = self._metrics.slo_requests.values
        return {
            name: {result: int(values.get((name, result), 0)) for result in RESULTS}
            for name in names
        }

    def answer(self) -> None:
        """Tell other replicas what this one counted."""
        self._peers.on("slo", lambda payload: msgspec.json.encode(self.own(_names(payload))))

    async def of(self, targets: Mapping[str, float]) -> dict[str, dict[str, object]]:
        """By entitlement, what all replicas counted; `targets` in ms, by name."""
        if not targets:
            return {}
        names = list(targets)
        total = {name: Counter(counts) for name, counts in self.own(names).items()}
        for reported in understood(
            _counts, await self._peers.ask("slo", msgspec.json.encode(names))
        ):
            for name in total.keys() & reported.keys():
                total[name].update(reported[name])
        return {name: _shown(targets[name], total[name]) for name in names}


def _shown(target_ms: float, counts: Mapping[str, int]) -> dict[str, object]:
    judged = counts["true"] + counts["false"]
    return {
        "target_ms": target_ms,
        "met": counts["true"],
        "missed": counts["false"],
        "refused": counts["refused"],
        "attainment": counts["true"] / judged if judged else None,
    }
