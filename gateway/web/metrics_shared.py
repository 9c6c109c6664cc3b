"""The /metrics page of several worker processes: whichever is asked shows the sum of all."""

from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, Final, cast

import msgspec
from prometheus_client import generate_latest
from prometheus_client.metrics_core import Metric

from gateway.policy.figures import Figures, Labels, added, combined, counted
from gateway.telemetry import Counter, Histogram, Metrics
from gateway.web.metrics import MetricsPage, counter_family, histogram_family

_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(Figures).decode


class SharedMetricsPage:
    """A process's own page, and those of the others with it."""

    def __init__(
        self, page: MetricsPage, metrics: Metrics, others: Callable[[], Awaitable[Sequence[bytes]]]
    ) -> None:
        """`others` gives what `figures` said in each of the other processes."""
        self._page = page
        self._metrics = metrics
        self._others = others

    async def render(self) -> bytes:
        """The page of all processes, in Prometheus's text format."""
        others = [_decode(payload) for payload in await self._others()]
        families = list(self._families(others))
        return generate_latest(cast("Any", _Collected(families)))

    def counts(self) -> bytes:
        """The process's counters and histograms: what is left of it when it dies."""
        return _encode(counted(self._metrics))

    def figures(self) -> bytes:
        """The same with its gauges."""
        gauges = {metric.name: list(_series(metric).items()) for metric in self._page.gauges()}
        return _encode(msgspec.structs.replace(counted(self._metrics), gauges=gauges))

    def _families(self, others: Sequence[Figures]) -> Iterator[Metric]:
        total = added([counted(self._metrics), *others])
        for family in self._metrics.families():
            if isinstance(family, Counter):
                counts = Counter(family.name, family.help, family.labels)
                counts.values = dict(total.counters[family.name])
                yield counter_family(counts)
            else:
                rows = Histogram(family.name, family.help, family.labels, family.bounds)
                rows.series = dict(total.histograms[family.name])
                yield histogram_family(rows)
        for metric in self._page.gauges():
            names = getattr(metric, "_labelnames", ())
            suffix = "_total" if metric.type == "counter" else ""
            series = combined(metric.name, _series(metric), others)
            metric.samples = []
            for labels, value in series.items():
                shown = dict(zip(names, labels, strict=True))
                metric.add_sample(metric.name + suffix, shown, value)
            yield metric


class _Collected:
    """Families as a registry gives them."""

    def __init__(self, families: Sequence[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        return iter(self._families)


def merged_counts(payloads: Sequence[bytes]) -> bytes:
    """The counts of several processes as those of one."""
    return _encode(added(_decode(payload) for payload in payloads))


def _series(metric: Metric) -> dict[Labels, float]:
    return {tuple(sample.labels.values()): sample.value for sample in metric.samples}
