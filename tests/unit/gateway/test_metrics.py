"""Series of what was deleted are dropped, and never those of anything else."""

from gateway.metrics import MAX_SERIES, GoneSeries, Metrics


def counted(metrics: Metrics) -> set[str]:
    return {entitlement for _, entitlement, _ in metrics.tokens.values}


def test_series_of_a_deleted_name_go_with_the_sweep_after_the_next() -> None:
    metrics = Metrics()
    existing = {"stays"}
    gone = GoneSeries(metrics, "entitlement", existing.__contains__)
    for name in ("stays", "goes", "returns", ""):
        metrics.tokens.add("m", name, "input", by=5)
        metrics.tenant_ttft.observe(0.1, "m", name)
        metrics.requests.add("m", "pool", name)  # of another label
    gone.note("goes")
    gone.note("returns")
    gone.sweep()
    metrics.tokens.add("m", "goes", "output")  # a request that still ran
    assert counted(metrics) == {"stays", "goes", "returns", ""}
    existing.add("returns")
    gone.sweep()
    assert counted(metrics) == {"stays", "returns", ""}
    assert {name for _, name in metrics.tenant_ttft.series} == {"stays", "returns", ""}
    assert len(metrics.requests.values) == 4


def test_names_that_come_and_go_leave_room_for_new_ones() -> None:
    metrics = Metrics()
    gone = GoneSeries(metrics, "tenant", lambda _: False)
    for number in range(2 * MAX_SERIES):
        metrics.cost.add("m", f"t{number}")
        gone.note(f"t{number}")
        if number % 100 == 0:
            gone.sweep()
    assert ("other", "other") not in metrics.cost.values
