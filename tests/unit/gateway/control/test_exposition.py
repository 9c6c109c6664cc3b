"""The metrics page is prometheus-client's, and requests proceed while it is written."""

import asyncio
from math import inf

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from gateway.control.exposition import counter_family, gauge, histogram_family, text_of, write
from gateway.metrics import Counter
from gateway.metrics import Histogram as OwnHistogram

HARD = 'a "quoted" \\ name\nof two lines'


def test_labels_and_values_survive_the_text() -> None:
    counted = Counter("c", HARD, ("x",), unit=10)
    counted.add("1", by=35)
    rows = [((HARD, "1"), 5e9), (("m", "2"), -inf)]
    page = text_of([gauge("g", "text", ("model", "a"), rows), counter_family(counted)]).decode()
    shown, counter = text_string_to_metric_families(page)
    assert [((s.labels["model"], s.labels["a"]), s.value) for s in shown.samples] == rows
    assert (counter.type, counter.documentation) == ("counter", HARD)
    assert [(s.name, s.labels, s.value) for s in counter.samples] == [("c_total", {"x": "1"}, 3.5)]


def test_a_histogram_is_the_library_s_own() -> None:
    registry = CollectorRegistry()
    bounds = (0.1, 1.0, 5.0)
    theirs = Histogram("h", "text", ["pool", "a"], buckets=bounds, registry=registry)
    own = OwnHistogram("h", "text", ("pool", "a"), bounds)
    for value in (0.05, 0.1, 0.7, 9.0):
        theirs.labels("p", "1").observe(value)
        own.observe(value, "p", "1")
    expected = [
        line for line in generate_latest(registry).decode().splitlines() if "_created" not in line
    ]
    assert text_of([histogram_family(own)]).decode().splitlines() == expected


async def test_requests_proceed_while_a_large_page_is_written() -> None:
    large = gauge("g", "text", ("worker",), [((f"worker-{n}",), n) for n in range(20_000)])
    writing = asyncio.create_task(write([large]))
    turns = 0
    while not writing.done():
        turns += 1
        await asyncio.sleep(0)
    assert turns > 3
    assert await writing == text_of([large])
