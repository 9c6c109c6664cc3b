"""Attainment of targets: added up over all replicas, of the asked entitlements alone."""

from collections.abc import Callable

from gateway.control.attainment import Attainment
from gateway.control.peers import NoPeers
from gateway.metrics import Metrics


class Others(NoPeers):
    """Other replicas: two of this one's kind, and one that answers in another format."""

    def __init__(self) -> None:
        self.topics: dict[str, Callable[[bytes], bytes | None]] = {}
        self.asked = 0

    def on(self, topic: str, respond: Callable[[bytes], bytes | None]) -> None:
        self.topics[topic] = respond

    async def ask(self, topic: str, payload: bytes = b"") -> list[bytes]:
        self.asked += 1
        answer = self.topics[topic](payload) or b""
        return [answer, b"what?", answer]


def counted(**results: int) -> Metrics:
    metrics = Metrics()
    for result, times in results.items():
        metrics.slo_requests.add("e", result, by=times)
    metrics.slo_requests.add("rival", "false", by=7)
    return metrics


async def test_a_replica_alone_tells_its_own() -> None:
    board = Attainment(counted(true=3, false=1, refused=5))
    assert await board.of({"e": 500, "quiet": 30_000}) == {
        "e": {"target_ms": 500, "met": 3, "missed": 1, "refused": 5, "attainment": 0.75},
        "quiet": {
            "target_ms": 30_000,
            "met": 0,
            "missed": 0,
            "refused": 0,
            "attainment": None,
        },
    }


async def test_replicas_are_added_up() -> None:
    others = Others()
    Attainment(counted(true=4, refused=1), others).answer()
    board = Attainment(counted(true=1, false=1), others)
    assert (await board.of({"e": 500}))["e"] == {
        "target_ms": 500,
        "met": 9,
        "missed": 1,
        "refused": 2,
        "attainment": 0.9,
    }


async def test_where_nobody_states_a_target_nobody_is_asked() -> None:
    others = Others()
    assert await Attainment(counted(true=1), others).of({}) == {}
    assert others.asked == 0
