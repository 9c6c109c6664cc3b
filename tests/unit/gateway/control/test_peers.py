"""What the control plane asks other replicas, over peers that answer at once."""

from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import pytest

from gateway.control.external_admission import (
    Settle,
    Settled,
    UsageReport,
    settle_anywhere,
    settled_here,
)
from gateway.control.peers import (
    add_load,
    answer_peers,
    attainment,
    counts,
    newest,
    proof_in_force,
)
from gateway.errors import BadRequest, NotFound
from gateway.metrics import Metrics
from gateway.records.proof import Claim, Interval, Proof
from gateway.replicas.calls import ReplicaCalls
from gateway.usage.claims import Claims
from gateway.usage.request_log import DecisionRing
from tests.builders import decision, served_model
from tests.control import Replies, control_of

REPORT = UsageReport(lease_id="a", prompt_tokens=7)
DONE = Settled(
    lease_id="a",
    status="ok",
    charge_tokens=7,
    prompt_tokens=7,
    completion_tokens=0,
    cached_tokens=0,
)


def unasked(*_: object) -> Any:
    raise AssertionError


def others(
    count: int = 1,
    *,
    odd: bool = True,
    settle: Settle = unasked,
    own_decision: Callable[[str, str], bytes | None] = unasked,
    **fields: Any,
) -> Replies:
    """Other replicas, all as one answers them, and where `odd` first one of another version."""

    def answers(topic: str, payload: bytes) -> list[bytes]:
        own = [peers.answer(topic, payload) for _ in range(count)]
        foreign = [b'[{"x":"of another version"}]', b"\xc1"] if odd else []
        return [*foreign, *(answer for answer in own if answer is not None)]

    peers = Replies(answers)
    control = control_of(peers=peers, **fields)
    peers.on("usage", partial(settled_here, settle))
    answer_peers(control, reload=unasked, own_decision=own_decision)
    return peers


class Made(msgspec.Struct):
    """A decision."""

    request_id: str
    time_unix_s: float


def ring_of(*records: Made) -> DecisionRing:
    ring = DecisionRing(100)
    for record in records:
        ring.append(record.request_id, msgspec.json.encode(record))
    return ring


def known(report: UsageReport, tenant: str, trusted: bool) -> Settled:
    assert (report, tenant, trusted) == (REPORT, "t", True)
    return DONE


def unknown(*_: object) -> Settled:
    raise NotFound("unknown", reason="lease_not_found")


def implausible(*_: object) -> Settled:
    raise BadRequest("more than the window", reason="implausible", code="c", param="p")


async def test_the_newest_of_all_are_shown_in_order_and_no_more() -> None:
    found = others(2, ring=ring_of(Made("o", 2.0), Made("o", 4.0)))
    merged = await newest(found, "decisions", [Made("own", 3.0), Made("own", 1.0)], 4)
    assert [(r["request_id"], r["time_unix_s"]) for r in merged] == [
        ("o", 4.0),
        ("o", 4.0),
        ("own", 3.0),
        ("o", 2.0),
    ]


def claims(metrics: Metrics) -> Claims:
    return Claims("ab" * 32, metrics, None)


async def test_a_proof_is_learned_from_another_replica_and_their_counts_are_added_up() -> None:
    finding = Claim(
        kind="entitlement",
        name="web",
        verdict="holds",
        reason="",
        kept=Interval(value=1.0, low=0.99, high=1.0),
    )
    proof = Proof(id="0123456789ab", config_sha256="ab" * 32, verdict="holds", findings=(finding,))
    there, here = Metrics(), Metrics()
    attached, own = claims(there), claims(here)
    attached.use("ab" * 32, proof, 100.0)
    peers = others(2, claims=attached, metrics=there)
    control = control_of(peers=peers, claims=own, metrics=here)
    assert await proof_in_force(control) is not None
    for side in (attached, own):
        side.append(decision(entitlement="web", time_unix_s=101.0))
        side.append(decision(entitlement="web", time_unix_s=99.0))  # before it was attached
    shown = await proof_in_force(control)
    assert shown is not None
    assert (shown["id"], shown["since_unix_s"]) == (proof.id, 100.0)
    assert shown["counts"] == {"web": {"kept": 3, "lost": 0, "limited": 0}}
    own.use("cd" * 32, None, 102.0)
    assert await proof_in_force(control) is None, "the others' is of another file"


async def test_load_is_added_up_by_worker_whatever_their_order() -> None:
    served = served_model()
    (
        served.fleet.pools[0].inflight,
        served.fleet.pools[0].active[1],
        served.fleet.pools[0].tokens[1],
    ) = 3, 2, 900
    served.fleet.pools[0].beyond_window_tokens = 9_003
    found = others(2, models=[served])
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
    await add_load(found, shown)
    pool = shown[0]["pools"][0]
    assert (pool["inflight"], pool["beyond_window_tokens"]) == (7, 9_003)
    assert [worker["active_sequences"] for worker in pool["workers"]] == [5, 0, 0]
    assert [worker["reserved_tokens"] for worker in pool["workers"]] == [1900, 0, 0]


async def test_counts_are_added_up_for_all_names_by_one_question() -> None:
    here, there = Metrics(), Metrics()
    for metrics, name, reason, times in (
        *((here, "e", "tokens", 1), (here, "e", "kv", 1), (here, "f", "kv", 1)),
        *((there, "e", "tokens", 2), (there, "rival", "kv", 7)),
    ):
        metrics.admission.add(name, "denied", reason, by=times)
    found = others(2, metrics=there)
    assert await counts(found, here, "refused", ["e", "f"]) == {
        "e": {"tokens": 5, "kv": 1},
        "f": {"kv": 1},
    }
    assert await counts(found, here, "refused", []) == {}
    assert found.asked == [("refused", b'["e","f"]')]


async def test_attainment_is_of_all_replicas_and_of_who_states_a_target() -> None:
    here, there = Metrics(), Metrics()
    for metrics, name, result, times in (
        *((here, "e", "true", 1), (here, "e", "false", 1), (here, "rival", "false", 7)),
        *((there, "e", "true", 4), (there, "e", "refused", 1)),
    ):
        metrics.slo_requests.add(name, result, by=times)
    found = others(2, metrics=there)
    assert await attainment(found, here, {"e": 500, "quiet": 30_000}) == {
        "e": {"target_ms": 500, "met": 9, "missed": 1, "refused": 2, "attainment": 0.9},
        "quiet": {"target_ms": 30_000, "met": 0, "missed": 0, "refused": 0, "attainment": None},
    }
    assert await attainment(found, here, {}) == {}
    assert len(found.asked) == 1, "where nobody states a target nobody is asked"


async def test_usage_is_settled_by_whoever_holds_the_lease() -> None:
    elsewhere = others(settle=known)
    assert await settle_anywhere(elsewhere, unknown, REPORT, "t", trusted=True) == DONE
    assert await settle_anywhere(ReplicaCalls(), known, REPORT, "t", trusted=True) == DONE


async def test_usage_of_a_lease_that_nobody_holds_is_not_found() -> None:
    for peers in (others(settle=unknown), ReplicaCalls()):
        with pytest.raises(NotFound):
            await settle_anywhere(peers, unknown, REPORT, "t", trusted=True)


async def test_a_report_that_the_holder_refuses_is_refused_alike() -> None:
    with pytest.raises(BadRequest) as refused:
        await settle_anywhere(others(settle=implausible), unknown, REPORT, "t", trusted=True)
    error = refused.value
    assert (error.message, error.reason) == ("more than the window", "implausible")
    assert (error.code, error.param) == ("c", "p")
