"""Prometheus's text format: as its own library writes it, and in slices."""

import asyncio
from collections.abc import Iterator
from math import inf, nan
from random import Random

import pytest
from prometheus_client import CollectorRegistry, Gauge, Histogram, generate_latest
from prometheus_client import Counter as LibraryCounter

from gateway.metrics import Counter, Metrics
from gateway.metrics import Histogram as OwnHistogram
from gateway.web.metrics import exposition
from gateway.web.metrics.exposition import (
    SLICE_BYTES,
    Family,
    counter_family,
    gauge,
    histogram_family,
    number,
    pieces,
    text_of,
    written,
)
from gateway.web.metrics.page import MetricsPage
from tests.builders import routing, served_model

HARD = 'a "quoted" \\ name\nof two lines'
VALUES = [
    0,
    1,
    -1,
    0.1,
    123456,
    1234567,
    12345678.5,
    1e15,
    1e16,
    1e22,
    -1e9,
    1e-9,
    3.3e-7,
    inf,
    -inf,
]


def library(registry: CollectorRegistry) -> str:
    text = generate_latest(registry).decode()
    return "".join(line + "\n" for line in text.splitlines() if "_created" not in line)


@pytest.mark.parametrize("value", [*VALUES, *(Random(1).uniform(0, 10**n) for n in range(20))])
def test_a_value_is_written_as_the_library_does(value: float) -> None:
    registry = CollectorRegistry()
    Gauge("g", "text", registry=registry).set(value)
    assert f"g {number(value)}\n" in library(registry)
    assert number(nan) == "NaN"


def test_a_gauge_s_labels_are_sorted_and_escaped() -> None:
    registry = CollectorRegistry()
    shown = Gauge("g", "text", ["model", "a"], registry=registry)
    shown.labels(HARD, "1").set(5)
    shown.labels("m", "2").set(7.5)
    own = gauge("g", "text", ("model", "a"), [((HARD, "1"), 5), (("m", "2"), 7.5)])
    assert text_of([own]).decode() == library(registry)


def test_a_counter_is_written_as_the_library_does() -> None:
    registry = CollectorRegistry()
    LibraryCounter("c", HARD, ["x"], registry=registry).labels("1").inc(3)
    counted = Counter("c", HARD, ("x",))
    counted.add("1", by=3)
    assert text_of([counter_family(counted)]).decode() == library(registry)


def test_a_histogram_is_written_as_the_library_does() -> None:
    registry = CollectorRegistry()
    bounds = (0.1, 1.0, 5.0)
    theirs = Histogram("h", "text", ["pool", "a"], buckets=bounds, registry=registry)
    own = OwnHistogram("h", "text", ("pool", "a"), bounds)
    for value in (0.05, 0.1, 0.7, 9.0):
        theirs.labels("p", "1").observe(value)
        own.observe(value, "p", "1")
    assert text_of([histogram_family(own)]).decode() == library(registry)


async def test_between_two_slices_others_have_their_turn() -> None:
    rows = [((f"worker-{number}",), number) for number in range(20_000)]
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    beside = asyncio.create_task(others())
    page = await written([gauge("g", "text", ("worker",), rows)])
    beside.cancel()
    assert turns >= len(page) // (SLICE_BYTES + 100)
    assert page == text_of([gauge("g", "text", ("worker",), rows)])


async def test_a_large_fleet_s_page_is_written_row_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of it is built at once: between two pauses there are few rows."""
    served = served_model(table=routing(("only", 8192, None)), workers=(2000,))
    most = since = 0
    sleep = asyncio.sleep

    async def pause(delay_s: float) -> None:
        nonlocal most, since
        most, since = max(most, since), 0
        await sleep(delay_s)

    def counted(family: Family) -> Iterator[str]:
        nonlocal since
        for piece in pieces(family):
            since += 1
            yield piece

    monkeypatch.setattr(exposition, "pieces", counted)
    monkeypatch.setattr(asyncio, "sleep", pause)
    page = MetricsPage(Metrics(), [served], lambda: 0, lambda: 0.0)
    text = await page.rendered()
    assert text == page.render()
    assert text.count(b"\nsluice_worker_up{") == 2000
    assert most < SLICE_BYTES / 40
