"""The dashboard's rows of a fleet whose workers come and go."""

from gateway.control.fleet_view import describe_fleet
from gateway.dashboard.fleet_rows import pool_rows, worker_rows
from gateway.fleet import members, model_workers
from gateway.fleet.engine_telemetry import EngineSample, TelemetryView, record
from gateway.fleet.model_runtime import ModelRuntime
from predictor.online import PrefillPredictor
from tests.builders import address, changed, routing, served_model


def fleet_of(workers: int) -> ModelRuntime:
    plain = served_model(table=routing(("only", 8192, None)), workers=(workers,))
    return changed(
        plain,
        predictors=(PrefillPredictor(workers=workers),),
        telemetry=(TelemetryView(workers),),
    )


def usage_of(served: ModelRuntime, described: dict[str, object]) -> dict[str, float | None]:
    """KV usage by worker, as shown."""
    return {row["worker"]: row["kv"] for row in worker_rows(served, described, 1.0)}


def test_present_workers_are_shown_with_their_own_figures() -> None:
    served = fleet_of(2)
    pool, view = served.fleet.pools[0], served.fleet.telemetry[0]
    model_workers.join(served, 0, (address("new"),), 0.0, up=True)
    for place, usage in enumerate((0.1, 0.2, 0.3)):
        record(view, place, EngineSample(kv_usage=usage), 0.5)
    members.leave(pool, 0)
    described = describe_fleet(served, (), 1.0)
    (leaving, *_) = worker_rows(served, described, 1.0)
    assert (leaving["worker"], leaving["state"]) == (pool.workers[0], "draining")
    model_workers.vacate(served, 0, [0], 1.0)
    shown = describe_fleet(served, (), 1.0)
    assert usage_of(served, shown) == {pool.workers[1]: 0.2, "new": 0.3}
    (row,) = pool_rows(served, shown)
    assert (row["workers"], row["ready"]) == (2, 2)


def test_a_worker_that_left_since_it_was_described_has_no_figures_of_another() -> None:
    served = fleet_of(2)
    pool, view = served.fleet.pools[0], served.fleet.telemetry[0]
    for place, usage in enumerate((0.1, 0.2)):
        record(view, place, EngineSample(kv_usage=usage), 0.5)
    described = describe_fleet(served, (), 1.0)
    members.leave(pool, 0)
    model_workers.vacate(served, 0, [0], 1.0)
    assert usage_of(served, described) == {pool.workers[0]: None, pool.workers[1]: 0.2}
