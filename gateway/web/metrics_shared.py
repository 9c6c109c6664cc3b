"""The /metrics page of several worker processes: whichever is asked shows the sum of all."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Final

import msgspec

from gateway.counts import Counter
from gateway.policy.figures import Figures, added, combined, counted
from gateway.telemetry import Metrics
from gateway.web.exposition import Buckets, Family, written
from gateway.web.metrics import MetricsPage

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

    async def rendered(self) -> bytes:
        """The page of all processes, in Prometheus's text format, with pauses for requests."""
        others = []
        for payload in await self._others():
            others.append(_decode(payload))
            await asyncio.sleep(0)
        return await written(self._families(others))

    def counts(self) -> bytes:
        """The process's counters and histograms: what is left of it when it dies."""
        return _encode(counted(self._metrics))

    def figures(self) -> bytes:
        """The same with its gauges."""
        gauges = {family.name: list(family.rows) for family in self._page.gauges()}
        return _encode(msgspec.structs.replace(counted(self._metrics), gauges=gauges))

    def _families(self, others: Sequence[Figures]) -> Iterator[Family | Buckets]:
        """Each added up when it is its turn."""
        for family in self._metrics.families():
            name = family.name
            if isinstance(family, Counter):
                own = Figures(counters={name: list(family.values.items())})
                theirs = [Figures(counters={name: o.counters.get(name, [])}) for o in others]
                yield Family(
                    name=name,
                    help=family.help,
                    labels=family.labels,
                    rows=added([own, *theirs]).counters[name],
                    type="counter",
                )
            else:
                own = Figures(histograms={name: list(family.series.items())})
                theirs = [Figures(histograms={name: o.histograms.get(name, [])}) for o in others]
                yield Buckets(
                    name=name,
                    help=family.help,
                    labels=family.labels,
                    bounds=family.bounds,
                    rows=added([own, *theirs]).histograms[name],
                )
        for gauge in self._page.gauges():
            series = combined(gauge.name, dict(gauge.rows), others)
            yield msgspec.structs.replace(gauge, rows=series.items())


def merged_counts(payloads: Sequence[bytes]) -> bytes:
    """The counts of several processes as those of one."""
    return _encode(added(_decode(payload) for payload in payloads))
