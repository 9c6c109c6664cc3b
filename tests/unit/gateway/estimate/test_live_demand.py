"""What was asked of a model: hours, retries, an even sample."""

from typing import Any

from gateway.estimate.live_demand import HOUR_S, HOURS, SAMPLED, LiveDemand
from gateway.records.decision import DecisionRecord
from tests.builders import ITEM, decision

START_S = 1000 * HOUR_S


def asked(at_s: float, *, body: int | None = None, **fields: Any) -> DecisionRecord:
    given = {"time_unix_s": START_S + at_s, "prompt_tokens": 100, "completion_tokens": 10}
    return decision(**{**given, "body_digest": body, **fields})


def refused(at_s: float, body: int, **fields: Any) -> DecisionRecord:
    given = {"outcome": "refused", "status": 429, "retry_after_s": 5.0, "entitlement": "a"}
    return asked(at_s, body=body, **{**given, **fields})


def seen(*records: DecisionRecord) -> dict[str, Any]:
    demand = LiveDemand()
    for record in records:
        demand.add(record)
    return demand.shown()


def test_demand_is_counted_by_hour_with_what_was_not_served() -> None:
    shown = seen(
        asked(10.0),
        asked(20.0, outcome="disconnected"),
        asked(30.0, outcome="refused", status=400),
        refused(40.0, 2, batch=ITEM),
        refused(HOUR_S + 1.0, 1),
    )
    assert shown["hours"] == [[START_S, 2, 1], [START_S + HOUR_S, 1, 1]]
    assert (shown["first_unix_s"], shown["last_unix_s"]) == (START_S + 10.0, START_S + HOUR_S + 1.0)
    assert [record.status for record in shown["records"]] == [200, 200, 429]


def test_a_client_that_asks_again_is_one_demand() -> None:
    again = seen(refused(0.0, 7), refused(6.0, 7), asked(12.0, body=7, entitlement="a"))
    assert again["hours"] == [[START_S, 1, 0]]
    assert len(again["records"]) == 1
    late = seen(refused(0.0, 7), asked(16.0, body=7, entitlement="a"))
    assert late["hours"] == [[START_S, 2, 1]]
    other = seen(refused(0.0, 7), asked(6.0, body=7, entitlement="b"))
    assert other["hours"] == [[START_S, 2, 1]]


def test_the_sample_stays_even_and_small_and_holds_no_prompt() -> None:
    demand = LiveDemand()
    count = 5 * SAMPLED
    for number in range(count):
        demand.add(asked(number / 100, prompt="secret", completion_tokens=number))
    shown = demand.shown()
    assert shown["stride"] == 8
    taken = [record.usage.completion_tokens for record in shown["records"]]
    assert taken == list(range(0, count, 8))
    assert {record.prompt for record in shown["records"]} == {None}


def test_the_sample_of_a_week_does_not_thin_out_over_the_weeks() -> None:
    demand, week_s = LiveDemand(), HOURS * HOUR_S
    for number in range(20 * SAMPLED):
        demand.add(asked(number * week_s / SAMPLED))
    shown = demand.shown()
    assert shown["stride"] == 2
    assert len(shown["records"]) == SAMPLED / 2
    assert all(record.time_unix_s > shown["last_unix_s"] - week_s for record in shown["records"])


def test_a_week_is_kept() -> None:
    demand = LiveDemand()
    for hour in range(2 * HOURS):
        demand.add(asked(hour * HOUR_S))
    assert len(demand.hours) == HOURS
    for number in range(SAMPLED):
        demand.add(asked(2 * HOURS * HOUR_S + number / 100))
    kept = demand.shown()["records"]
    assert min(record.time_unix_s for record in kept) > START_S + (HOURS - 1) * HOUR_S
