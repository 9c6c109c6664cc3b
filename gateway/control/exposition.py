"""Families of metrics as prometheus-client writes them.

Rows are read on the event loop, a family at a time, so that no other thread sees the gateway's
state. The text is made in a thread, for a page of thousands of series takes tens of milliseconds.
A page is therefore not a snapshot: families are read one after the other. A row, with all lines of
a histogram, is of one moment.
"""

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Literal

from prometheus_client import generate_latest
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.metrics import Counter, Histogram
from gateway.records.record import Record

Labels = tuple[str, ...]
Rows = Iterable[tuple[Labels, float]]


class Family(Record, frozen=True, kw_only=True):
    """One gauge or counter."""

    name: str
    """Without `_total`."""
    help: str
    labels: Labels = ()
    rows: Sequence[tuple[Labels, float]] = ()
    """(label values, value) per series."""
    type: Literal["gauge", "counter"] = "gauge"


class Buckets(Record, frozen=True, kw_only=True):
    """A histogram as `gateway.metrics` keeps it."""

    name: str
    help: str
    labels: Labels
    bounds: tuple[float, ...]
    rows: Sequence[tuple[Labels, tuple[float, ...]]]
    """(label values, count of each bucket and the sum) per series."""
    type: Literal["histogram"] = "histogram"


def counter_family(family: Counter) -> Family:
    """A counter's current values."""
    return Family(
        name=family.name,
        help=family.help,
        labels=family.labels,
        rows=[(labels, value / family.unit) for labels, value in family.values.items()],
        type="counter",
    )


def histogram_family(family: Histogram) -> Buckets:
    """A histogram's current values."""
    return Buckets(
        name=family.name,
        help=family.help,
        labels=family.labels,
        bounds=family.bounds,
        rows=[(labels, tuple(row)) for labels, row in family.series.items()],
    )


def gauge(name: str, text: str, labels: Labels, rows: Rows) -> Family:
    """A gauge."""
    return Family(name=name, help=text, labels=labels, rows=tuple(rows))


def text_of(families: Iterable[Family | Buckets]) -> bytes:
    """The page in Prometheus's text format."""
    return generate_latest(_Page(families))


async def write(families: Iterable[Family | Buckets]) -> bytes:
    """The same, read with pauses for requests and written in a thread."""
    read = []
    for family in families:
        read.append(family)
        await asyncio.sleep(0)
    return await asyncio.to_thread(text_of, read)


class _Page(Collector):
    """What `generate_latest` asks for families."""

    def __init__(self, families: Iterable[Family | Buckets]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        """Each family when its turn comes."""
        return map(_metric, self._families)


def _metric(family: Family | Buckets) -> Metric:
    if isinstance(family, Buckets):
        histogram = HistogramMetricFamily(family.name, family.help, labels=family.labels)
        bounds = [*map(repr, family.bounds), "+Inf"]
        for values, row in family.rows:
            buckets = list(zip(bounds, accumulate(row[:-1]), strict=True))
            histogram.add_metric(values, buckets, row[-1])
        return histogram
    metric = Metric(family.name, family.help, family.type)
    shown = family.name + ("_total" if family.type == "counter" else "")
    for values, value in family.rows:
        metric.add_sample(shown, dict(zip(family.labels, values, strict=True)), value)
    return metric
