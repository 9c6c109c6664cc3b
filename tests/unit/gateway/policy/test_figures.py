"""Adding up what processes counted: sums are sums, gauges go by what they mean."""

from hypothesis import given
from hypothesis import strategies as st

from gateway.counts import MAX_SERIES
from gateway.policy.figures import MERGED, Figures, added, combined, counted
from gateway.telemetry import Metrics
from gateway.web.metrics import MetricsPage

NAMES = st.sampled_from(["a", "b", "c"])
EVENTS = st.lists(st.tuples(NAMES, NAMES, st.integers(0, 9)), max_size=30)


def taught(events: list[tuple[str, str, int]]) -> Metrics:
    metrics = Metrics()
    for model, pool, value in events:
        metrics.spillovers.add(model, pool, by=value)
        metrics.ttft.observe(value / 2, model, pool)
    return metrics


def as_maps(figures: Figures) -> object:
    return (
        {name: dict(series) for name, series in figures.counters.items()},
        {name: dict(series) for name, series in figures.histograms.items()},
    )


@given(parts=st.lists(EVENTS, min_size=1, max_size=4))
def test_several_processes_count_what_one_would(parts: list[list[tuple[str, str, int]]]) -> None:
    together = counted(taught([event for part in parts for event in part]))
    assert as_maps(added(counted(taught(part)) for part in parts)) == as_maps(together)


@given(parts=st.lists(EVENTS, min_size=1, max_size=4))
def test_sums_of_sums_are_sums(parts: list[list[tuple[str, str, int]]]) -> None:
    each = [counted(taught(part)) for part in parts]
    assert as_maps(added([added(each[:2]), *each[2:]])) == as_maps(added(each))


def test_series_stay_bounded() -> None:
    figures = [
        Figures(counters={"c": [((f"{part}-{n}",), 1.0) for n in range(MAX_SERIES)]})
        for part in range(2)
    ]
    total = dict(added(figures).counters["c"])
    assert len(total) == MAX_SERIES + 1
    assert sum(total.values()) == 2 * MAX_SERIES
    assert total["other",] == MAX_SERIES


def merged(name: str) -> float:
    others = [Figures(gauges={name: [(("x",), value)]}) for value in (2.0, 9.0)]
    return combined(name, {("x",): 1.0}, others)["x",]


def test_gauges_are_merged_by_what_they_mean() -> None:
    assert merged("sluice_leases") == 12
    assert merged("sluice_bytes_per_token") == 4
    assert merged("sluice_worker_up") == 9
    assert merged("sluice_store_up") == 1
    assert merged("sluice_pool_leased") == 1, "all show the same store"


def test_a_series_that_only_another_has_is_shown() -> None:
    others = [Figures(gauges={"sluice_leases": [(("active",), 3.0)]})]
    assert combined("sluice_leases", {}, others) == {("active",): 3.0}


def test_it_is_said_of_every_gauge_how_it_is_merged() -> None:
    page = MetricsPage(Metrics(), [], lambda: 0, lambda: 0.0)
    shown = {metric.name for metric in page.gauges()}
    assert shown == set(MERGED)
