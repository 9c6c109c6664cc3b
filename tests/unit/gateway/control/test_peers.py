"""What the control plane asks other replicas, over peers that answer at once."""

from collections.abc import Callable, Collection
from typing import Any

import msgspec
import pytest

from gateway.control import peers as module
from gateway.control.external_admission import Reporter, Settled, UsageReport
from gateway.control.peers import (
    Counts,
    NoPeers,
    add_load,
    all_counts,
    answer_counts,
    answer_decisions,
    answer_load,
    answer_usage,
    find_decision,
    newest,
    settle_anywhere,
)
from gateway.errors import BadRequest, NotFound
from tests.builders import served_model

WHO = Reporter(tenant="t", trusted=True)
REPORT = UsageReport(lease_id="a", prompt_tokens=7)
DONE = Settled(
    lease_id="a",
    status="ok",
    charge_tokens=7,
    prompt_tokens=7,
    completion_tokens=0,
    cached_tokens=0,
)


class Others(NoPeers):
    """Other replicas, as one answers them."""

    def __init__(self, count: int = 1) -> None:
        self.count = count
        self.topics: dict[str, Callable[[bytes], bytes | None]] = {}

    async def ask(self, topic: str, payload: bytes = b"") -> list[bytes]:
        answers = [self.topics[topic](payload) for _ in range(self.count)]
        return [answer for answer in answers if answer is not None]

    async def search(self, topic: str, payload: bytes) -> list[bytes]:
        return await self.ask(topic, payload)

    def on(self, topic: str, respond: Callable[[bytes], bytes | None]) -> None:
        self.topics[topic] = respond


class Odd(Others):
    """Other replicas, and first of them one of another version."""

    async def ask(self, topic: str, payload: bytes = b"") -> list[bytes]:
        return [b'[{"x":"of another version"}]', b"\xc1", *await super().ask(topic, payload)]


class Made(msgspec.Struct):
    """A decision."""

    request_id: str
    time_unix_s: float


def known(report: UsageReport, reporter: Reporter) -> Settled:
    assert (reporter, report) == (WHO, REPORT)
    return DONE


def unknown(_report: UsageReport, _reporter: Reporter) -> Settled:
    raise NotFound("unknown", reason="lease_not_found")


def implausible(_report: UsageReport, _reporter: Reporter) -> Settled:
    raise BadRequest("more than the window", reason="implausible", code="c", param="p")


async def test_a_decision_is_found_wherever_it_was_made() -> None:
    others, made = Others(), {"r": b'{"request_id":"r","time_unix_s":5.0}'}
    answer_decisions(others, made.get, lambda _: [])
    assert await find_decision(others, "r") == b'{"request_id":"r","time_unix_s":5.0}'
    assert await find_decision(others, "other") is None
    assert await find_decision(NoPeers(), "r") is None


async def test_the_newest_of_all_are_shown_in_order_and_no_more() -> None:
    others = Odd(2)
    kept = [msgspec.Raw(msgspec.json.encode(Made("o", time_s))) for time_s in (4.0, 2.0)]
    answer_decisions(others, lambda _: None, lambda count: kept[:count])
    found = await newest(others, "decisions", [Made("own", 3.0), Made("own", 1.0)], 4)
    assert [(r["request_id"], r["time_unix_s"]) for r in found] == [
        ("o", 4.0),
        ("o", 4.0),
        ("own", 3.0),
        ("o", 2.0),
    ]


async def test_load_is_added_up_by_worker_whatever_their_order() -> None:
    served = served_model()
    (
        served.fleet.pools[0].inflight,
        served.fleet.pools[0].active[1],
        served.fleet.pools[0].tokens[1],
    ) = 3, 2, 900
    served.fleet.pools[0].beyond_window_tokens = 9_003
    others = Odd(2)
    answer_load(others, [served])
    shown: list[dict[str, Any]] = [
        {
            "model": "m",
            "pools": [
                {
                    "inflight": 1,
                    "beyond_window_tokens": 0,
                    "workers": [
                        {"id": "short-1", "active_sequences": 1, "reserved_tokens": 100},
                        {"id": "new", "active_sequences": 0, "reserved_tokens": 0},
                        {"id": "short-0", "active_sequences": 0, "reserved_tokens": 0},
                    ],
                }
            ],
        }
    ]
    await add_load(others, shown)
    pool = shown[0]["pools"][0]
    assert (pool["inflight"], pool["beyond_window_tokens"]) == (7, 9_003)
    assert [worker["active_sequences"] for worker in pool["workers"]] == [5, 0, 0]
    assert [worker["reserved_tokens"] for worker in pool["workers"]] == [1900, 0, 0]


async def test_counts_are_added_up_for_all_names_by_one_question() -> None:
    others = Odd(2)
    asked = []

    def counts(names: Collection[str]) -> Counts:
        asked.append(list(names))
        return {name: {"tokens": 2} if name == "e" else {} for name in names}

    answer_counts(others, "refused", counts)
    own = {"e": {"tokens": 1, "kv": 1}, "f": {"kv": 1}}
    found = await all_counts(others, "refused", own)
    assert found == {"e": {"tokens": 5, "kv": 1}, "f": {"kv": 1}}
    assert asked == [["e", "f"]] * 2
    assert await all_counts(others, "refused", {}) == {}
    assert len(asked) == 2


async def test_usage_is_settled_by_whoever_holds_the_lease() -> None:
    others = Odd()
    answer_usage(others, known)
    assert await settle_anywhere(others, unknown, REPORT, WHO) == DONE
    assert await settle_anywhere(NoPeers(), lambda *_: DONE, REPORT, WHO) == DONE


async def test_usage_of_a_lease_that_nobody_holds_is_not_found() -> None:
    others = Odd()
    answer_usage(others, unknown)
    for peers in (others, NoPeers()):
        with pytest.raises(NotFound):
            await settle_anywhere(peers, unknown, REPORT, WHO)


async def test_a_report_that_the_holder_refuses_is_refused_alike() -> None:
    others = Others()
    answer_usage(others, implausible)
    with pytest.raises(BadRequest) as refused:
        await settle_anywhere(others, unknown, REPORT, WHO)
    error = refused.value
    assert (error.message, error.reason, error.code, error.param) == (
        "more than the window",
        "implausible",
        "c",
        "p",
    )


def test_a_replica_that_is_alone_hears_nothing() -> None:
    alone: module.Peers = NoPeers()
    alone.on("decision", lambda _: b"")
