"""Demand of a log: refused requests count once, retries do not."""

from typing import Any

import msgspec
import pytest

from gateway.estimate.live_demand import RETRY_SLACK_S
from planner.readers.traces import read_workload
from planner.workload.workload import Workload
from tests.builders import ITEM, decision


def served(name: str, at_s: float, crc: int = 0, **more: Any) -> Any:
    given = {"prompt_tokens": 100, "completion_tokens": 20, "entitlement": "team", **more}
    return decision(name, time_unix_s=at_s, body_digest=crc, body_bytes=400, **given)


def refused(name: str, at_s: float, crc: int, status: int = 429, **more: Any) -> Any:
    given = {"input_tokens": 300, "output_tokens": 900, "retry_after_s": 2.0, **more}
    return decision(
        name,
        time_unix_s=at_s,
        outcome="refused",
        status=status,
        entitlement="team",
        body_digest=crc,
        body_bytes=400,
        **given,
    )


def read(*records: Any) -> Workload:
    text = b"\n".join(msgspec.json.encode(record) for record in records).decode()
    return read_workload(text, name="requests.jsonl")


def test_a_prompt_that_the_gateway_cut_counts_as_the_client_sent_it() -> None:
    # A fifth of the prompts had 5,000 tokens; engines saw .7 of them.
    found = read(
        *(served(f"s{i}", i) for i in range(8)),
        served("cut", 8.0, prompt_tokens=3500, cached_tokens=350, kept_share=0.7),
        decision(
            "left",
            time_unix_s=9.0,
            outcome="disconnected",
            status=499,
            input_tokens=3500,
            output_tokens=10,
            kept_share=0.7,
        ),
    )
    assert found.pairs is not None
    assert found.pairs.prompts.tolist() == [100] * 8 + [5000, 5000]
    assert found.share(4096) == pytest.approx(0.8)
    assert found.cached_share == pytest.approx(500 / 5800)


def test_p_c_is_the_share_of_all_prompts_in_the_window_whoever_refused_them() -> None:
    whole: dict[str, Any] = {"prompt_tokens": 5000, "when": "header"}
    found = read(
        served("short", 0.0),
        *(served(f"cut{i}", 1.0, prompt_tokens=3500, kept_share=0.7) for i in range(2)),
        served("tools", 2.0, not_compressed="tools", **whole),
        served("depth", 2.0, not_compressed="cut_too_deep", **whole),
        served("idle", 3.0, not_compressed="not_busy", **whole),
        served("long", 4.0, prompt_tokens=30_000),
    )
    assert found.compressible is not None
    assert found.compressible.share == pytest.approx(0.5)
    assert found.compressible.when == "header"
    assert "2 of 4 prompts" in found.compressible.said
    # It holds for lengths that were looked at: the short and the long one were not.
    assert found.compressible.by_request is not None
    assert found.compressible.by_request.tolist() == [0, 0.5, 0.5, 0.5, 0.5, 0.5, 0]
    assert read(served("short", 0.0)).compressible is None


def test_a_log_in_shortage_plans_what_was_asked_for_not_what_was_served() -> None:
    # Two requests a second are offered for 100 s; a fleet that is too small serves every other.
    records = [
        served(f"s{i}", i, crc=i) if i % 2 else refused(f"r{i}", float(i) / 1, crc=i)
        for i in range(200)
    ]
    found = read(*records)
    assert found.rate_per_s == pytest.approx(1.0)
    assert "100 of 200 requests were refused" in found.notes[0]
    only_served = read(*(r for r in records if r.outcome == "ok"))
    assert only_served.rate_per_s == pytest.approx(0.5, rel=0.02)


@pytest.mark.parametrize("status", [429, 503])
def test_a_retry_of_the_same_body_within_its_retry_after_is_one_demand(status: int) -> None:
    found = read(
        served("first", 0.0, crc=1),
        refused("a", 1.0, crc=7, status=status),
        refused("a again", 3.5, crc=7, status=status),
        served("a at last", 6.0, crc=7, prompt_tokens=222),
        served("last", 10.0, crc=2),
    )
    assert found.pairs is not None
    assert found.pairs.prompts.tolist() == [100, 222, 100]
    assert found.times_s is not None
    assert found.times_s.tolist() == [0.0, 1.0, 10.0]  # it was asked for at its first attempt


OTHER = msgspec.structs.replace(refused("b", 1.5, crc=7), entitlement="other")
LATE_S = 1.0 + 2.0 + RETRY_SLACK_S + 0.1


@pytest.mark.parametrize(
    ("first", "again"),
    [
        (refused("a", 1.0, crc=7), refused("later", LATE_S, crc=7)),
        (refused("a", 1.0, crc=7), OTHER),
        (served("a", 1.0, crc=7), served("b", 1.5, crc=7)),
    ],
    ids=["long after its retry-after", "another tenant's", "of a served one"],
)
def test_the_same_body_is_another_demand(first: Any, again: Any) -> None:
    found = read(first, again, served("x", 20.0, 1))
    assert found.times_s is not None
    assert len(found.times_s) == 3


def test_refused_requests_have_estimated_prompts_and_answers_as_served_ones_write() -> None:
    found = read(
        served("a", 0.0, crc=1, completion_tokens=40), refused("b", 1.0, crc=2, cap_tokens=30)
    )
    assert found.pairs is not None
    assert found.pairs.prompts.tolist() == [100, 300]
    assert found.pairs.answers.tolist() == [40, 30]


def test_a_request_refused_before_it_was_estimated_counts_in_the_rate_alone() -> None:
    early = decision("early", time_unix_s=5.0, outcome="refused", status=503)
    found = read(served("a", 0.0, crc=1), early, served("b", 10.0, crc=2))
    assert found.pairs is not None
    assert len(found.pairs.prompts) == 2
    assert found.rate_per_s == pytest.approx(2 / 10)


def test_requests_that_left_gave_way_or_met_a_broken_engine_are_demand() -> None:
    records = [
        decision(
            label,
            time_unix_s=float(i),
            outcome=label,
            status=499,
            input_tokens=50,
            output_tokens=10,
        )
        for i, label in enumerate(("disconnected", "evicted", "upstream_error"))
    ]
    found = read(*records, served("a", 9.0, crc=1))
    assert found.times_s is not None
    assert len(found.times_s) == 4


def test_an_item_of_a_batch_is_demand_where_it_is_served() -> None:
    tries = [refused(f"try {at}", float(at), crc=7, batch=ITEM) for at in (0, 60, 120)]
    found = read(*tries, served("at last", 180.0, crc=7, batch=ITEM), served("x", 190.0, crc=2))
    assert found.times_s is not None
    assert found.times_s.tolist() == [180.0, 190.0]


@pytest.mark.parametrize("status", [400, 401, 404, 413])
def test_bad_requests_are_no_demand(status: int) -> None:
    bad = decision("bad", time_unix_s=5.0, outcome="refused", status=status, input_tokens=9)
    found = read(served("a", 0.0, crc=1), bad, served("b", 10.0, crc=2))
    assert found.times_s is not None
    assert len(found.times_s) == 2
