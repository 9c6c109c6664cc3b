"""One page of several processes."""

from collections.abc import Sequence

from gateway.telemetry import Metrics
from gateway.web.metrics import MetricsPage
from gateway.web.metrics_shared import SharedMetricsPage, merged_counts
from tests.builders import served_model


class Process:
    """A process that counts, and its pages."""

    def __init__(self, leases: int = 0) -> None:
        self.metrics = Metrics()
        self.served = served_model()
        self.own = MetricsPage(self.metrics, [self.served], lambda: leases, lambda: 0.0)
        self.others: Sequence[bytes] = ()
        self.page = SharedMetricsPage(self.own, self.metrics, self._others)

    async def _others(self) -> Sequence[bytes]:
        return self.others


def values(page: bytes) -> dict[str, float]:
    lines = [line for line in page.decode().splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


async def test_alone_the_page_is_its_own() -> None:
    process = Process(leases=3)
    process.metrics.requests.add("m", "short", "ok")
    process.metrics.ttft.observe(0.3, "m", "short")
    process.served.estimator.ignored["implausible"] = 2
    assert await process.page.rendered() == process.own.render()


async def test_whichever_is_asked_shows_the_sum_of_all() -> None:
    one, two, dead = Process(leases=1), Process(leases=4), Process()
    for process, count in ((one, 1), (two, 20), (dead, 300)):
        process.metrics.requests.add("m", "short", "ok", by=count)
        process.metrics.ttft.observe(0.3, "m", "short")
    two.metrics.requests.add("m", "long", "ok")
    left = merged_counts([dead.page.counts()])
    one.others, two.others = [two.page.figures(), left], [one.page.figures(), left]
    shown = values(await one.page.rendered())
    assert shown == values(await two.page.rendered())
    assert shown['sluice_requests_total{model="m",outcome="ok",pool="short"}'] == 321
    assert shown['sluice_requests_total{model="m",outcome="ok",pool="long"}'] == 1
    assert shown['sluice_ttft_seconds_count{model="m",pool="short"}'] == 3
    assert shown['sluice_ttft_seconds_bucket{le="0.5",model="m",pool="short"}'] == 3
    assert shown['sluice_ttft_seconds_bucket{le="0.25",model="m",pool="short"}'] == 0
    assert shown['sluice_leases{state="active"}'] == 5
    assert shown["sluice_gateway_processes"] == 2
