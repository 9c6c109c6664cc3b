"""The newest decisions in brief: each is read once, of this replica and of others."""

import msgspec

from gateway.dashboard.recent import FIRST, KEPT, MAX_NEW, Brief, RecentDecisions
from gateway.records.decision import CompressionSection, DecisionRecord, UsageSection
from gateway.replicas.calls import ReplicaCalls
from gateway.usage.request_log import DecisionRing


def line(number: int, **fields: object) -> bytes:
    given = {"outcome": "ok", "status": 200, "endpoint": "chat", **fields}
    record = {"schema": 2, "time_unix_s": float(number), "request_id": f"r-{number}", **given}
    return msgspec.json.encode(msgspec.convert(record, DecisionRecord))


def ring_of(count: int) -> DecisionRing:
    ring = DecisionRing(10_000)
    for number in range(count):
        ring.append(f"r-{number}", line(number))
    return ring


class OnePeer(ReplicaCalls):
    """Another replica that answers with these lists of records, in turn."""

    def __init__(self, *answers: bytes) -> None:
        super().__init__()
        self.answers = list(answers)

    async def ask(self, topic: str, payload: bytes = b"") -> list[bytes]:
        assert topic == "decisions"
        return [self.answers.pop(0)] if self.answers else []


def ids(recent: RecentDecisions) -> list[str]:
    return [brief.request_id for brief in recent.briefs]


async def test_each_decision_is_read_once_and_the_newest_come_first() -> None:
    ring = ring_of(3)
    recent = RecentDecisions(ring.latest, ReplicaCalls())
    for _ in range(2):
        await recent.look()
        assert ids(recent) == ["r-2", "r-1", "r-0"]
    ring.append("r-3", line(3))
    await recent.look()
    assert ids(recent) == ["r-3", "r-2", "r-1", "r-0"]


async def test_one_look_reads_so_many_and_no_more() -> None:
    ring = ring_of(3 * FIRST)
    recent = RecentDecisions(ring.latest, ReplicaCalls())
    await recent.look()
    assert len(recent.briefs) == FIRST
    for number in range(3 * FIRST, 3 * FIRST + 2 * MAX_NEW):
        ring.append(f"r-{number}", line(number))
    await recent.look()
    assert len(recent.briefs) == FIRST + MAX_NEW


async def test_it_never_holds_more_than_its_bound() -> None:
    ring = ring_of(1)
    recent = RecentDecisions(ring.latest, ReplicaCalls())
    for number in range(1, 2 * KEPT + 3 * MAX_NEW):
        ring.append(f"r-{number}", line(number))
        if number % MAX_NEW == 0:
            await recent.look()
    assert len(recent.briefs) == KEPT
    assert len(recent._ids) <= 2 * KEPT + MAX_NEW


async def test_decisions_of_other_replicas_are_there_once_and_in_order() -> None:
    theirs = b"[" + b",".join([line(9), line(1)]) + b"]"
    later = b"[" + b",".join([line(11), line(9), line(1)]) + b"]"
    recent = RecentDecisions(ring_of(3).latest, OnePeer(theirs, later, b"other version"))
    for _ in range(3):
        await recent.look()
    assert ids(recent) == ["r-11", "r-9", "r-2", "r-1", "r-0"]


def test_a_search_finds_names_and_codes() -> None:
    record = msgspec.json.decode(
        line(7, entitlement="Acme-Prod", outcome="refused", status=429, reason="priority"),
        type=Brief,
    )
    for text in ("r-7", "acme", "refused", "429", "prior"):
        assert record.matches(text), text
    for text in ("beta", "spilled", "compressed"):
        assert not record.matches(text), text


def test_a_compressed_prompt_counts_with_its_original_length() -> None:
    record = msgspec.json.decode(
        line(
            1,
            usage=UsageSection(prompt_tokens=600, completion_tokens=100),
            compression=CompressionSection(compressed="1000->600", kept_share=0.6),
        ),
        type=Brief,
    )
    assert record.total_tokens == 1100
    assert record.matches("compressed")
    refused = msgspec.json.decode(line(2, outcome="refused"), type=Brief)
    assert refused.total_tokens is None
