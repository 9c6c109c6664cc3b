"""What settled requests say of the boundaries."""

from typing import Any

from gateway.fleet.engine_telemetry import EngineSample, TelemetryView, record
from gateway.fleet.fleet import PoolState
from gateway.records.attempt import Attempt
from gateway.records.decision import DecisionRecord
from gateway.routing.boundary_watch import BoundaryWatch
from gateway.routing.retry import Fault
from tests.builders import decision, short_and_long


def settled(*results: tuple[str, str], **fields: Any) -> DecisionRecord:
    """A request whose attempts were in these pools with these results."""
    attempts = tuple(Attempt(pool=pool, worker="w", result=result) for pool, result in results)
    given = {"pool": results[-1][0], "source": "engine", "sequences": 1, **fields}
    return decision(attempts=attempts, **given)


def told(*records: DecisionRecord, **routing: Any) -> BoundaryWatch:
    watch = BoundaryWatch(2, ((1000, 0.5), (8000, 1.0)))
    for each in records:
        watch.settled(each, short_and_long(**routing))
    return watch


def test_a_rescue_counts_where_it_was_refused() -> None:
    rescued = settled(("short", "overflow"), ("long", "ok"), prompt_tokens=8192)
    watch = told(rescued, settled(("short", "ok")))
    assert (watch.requests, watch.rescues) == ([2, 1], [1, 0])


def test_what_goes_wrong_is_told_by_tenant_once() -> None:
    at_window = {"prompt_tokens": 5000, "completion_tokens": 3192}
    watch = told(settled(("short", "overflow"), ("long", "ok"), tenant="a", prompt_tokens=8192))
    assert not watch.several[0]
    watch.settled(settled(("short", "ok"), tenant="b", **at_window), short_and_long())
    assert watch.several == [True, False]
    pool, view = PoolState("short", ["w"], 8), TelemetryView(1)
    assert watch.sample(0, pool, view).wrong == {"a": 1, "b": 1}
    assert watch.sample(0, pool, view).wrong == {}


def test_a_rescue_of_what_would_have_fitted_moves_no_boundary() -> None:
    results = (("short", "overflow"), ("long", "ok"))
    assert told(settled(*results, prompt_tokens=8191)).rescues == [0, 0]
    assert told(settled(*results, prompt_tokens=8000, cap_tokens=193)).rescues == [1, 0]
    unknown = settled(*results, prompt_tokens=9000, source="counted")
    assert told(unknown).rescues == [0, 0]


def test_an_answer_that_ended_at_its_window_is_an_overrun() -> None:
    at_window = {"prompt_tokens": 5000, "completion_tokens": 3192}
    watch = told(settled(("short", "ok"), **at_window))
    assert watch.overruns == [1, 0]
    within = told(settled(("short", "ok"), prompt_tokens=5000, completion_tokens=3191))
    assert within.overruns == [0, 0]


def test_an_engine_that_ran_out_of_memory_speaks_against_its_boundary() -> None:
    said = b'{"message": "CUDA out of memory. Tried to allocate 2.00 GiB"}'
    fault = Fault(kind="server_error", message="status 500", status=500, body=said)
    watch = told(settled(("short", fault.result), ("long", "ok")))
    assert (watch.overruns, watch.requests) == ([1, 0], [1, 1])
    other = Fault(kind="server_error", message="status 500", status=500, body=b"oops")
    assert told(settled(("short", other.result))).overruns == [0, 0]


def test_an_answer_that_somebody_limited_is_none() -> None:
    at_window = {"prompt_tokens": 5000, "completion_tokens": 3192}
    assert told(settled(("short", "ok"), cap_tokens=3192, **at_window)).overruns == [0, 0]
    limited = told(settled(("short", "ok"), **at_window), default_max_tokens=4000)
    assert limited.overruns == [0, 0]


def test_lengths_are_those_of_whole_answers_as_they_came() -> None:
    ok = {"prompt_tokens": 400, "completion_tokens": 100}
    watch = told(
        settled(("short", "ok"), **ok),
        settled(("short", "ok"), kept_share=0.5, **ok),
        settled(("short", "disconnected"), outcome="disconnected", **ok),
        settled(("short", "ok"), **{**ok, "source": "counted"}),
        settled(("short", "ok"), **{**ok, "sequences": 4}),
        decision(outcome="refused"),
    )
    assert watch.drift is not None
    assert watch.drift.observations == 2
    assert watch.requests == [5, 0]


def test_what_engines_count_between_two_samples_is_summed_over_restarts() -> None:
    watch, pool, view = BoundaryWatch(2), PoolState("short", ["a", "b"], 8), TelemetryView(2)

    def told(worker: int, preempted: float, finished: float) -> None:
        sample = EngineSample(
            preemptions_total=preempted, finished_total=finished, running=4.0, kv_usage=0.5
        )
        record(view, worker, sample, 0.0)

    told(0, 100.0, 900.0)
    told(1, 5.0, 50.0)
    first = watch.sample(0, pool, view)
    assert (first.preemptions, first.finished, first.load) == (0.0, 0.0, 0.5)
    told(0, 110.0, 950.0)
    told(0, 3.0, 20.0)
    told(1, 7.0, 60.0)
    second = watch.sample(0, pool, view)
    assert (second.preemptions, second.finished) == (15.0, 80.0)
