"""Prometheus's text format, written in slices so that requests proceed in between.

A page of thousands of series takes tens of milliseconds, so the writer yields to the event loop
after every `SLICE_BYTES`. A page is therefore not a snapshot: each row, with all lines of a
histogram, has the values of the moment it was written. Queries compare a series with itself, which
is not affected.
"""

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from math import isfinite, isnan
from typing import Final, Literal

from gateway.metrics import Counter, Histogram
from gateway.records.record import Record

SLICE_BYTES: Final = 24 * 1024
"""About 300 lines, written in under a millisecond."""

_LONGEST: Final = 6
"""Most digits before the decimal point without an exponent."""

Labels = tuple[str, ...]
Rows = Iterable[tuple[Labels, float]]
_ESCAPED: Final = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})
_ESCAPED_HELP: Final = str.maketrans({"\\": r"\\", "\n": r"\n"})


class Family(Record, frozen=True, kw_only=True):
    """One gauge or counter."""

    name: str
    """Without `_total`."""
    help: str
    labels: Labels = ()
    rows: Rows = ()
    """(label values, value) per series; iterated once."""
    type: Literal["gauge", "counter"] = "gauge"


class Buckets(Record, frozen=True, kw_only=True):
    """A histogram as `gateway.metrics` keeps it."""

    name: str
    help: str
    labels: Labels
    bounds: tuple[float, ...]
    rows: Iterable[tuple[Labels, Sequence[float]]]
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
    """A histogram whose rows are read when written."""
    return Buckets(
        name=family.name,
        help=family.help,
        labels=family.labels,
        bounds=family.bounds,
        rows=list(family.series.items()),
    )


def gauge(name: str, text: str, labels: Labels, rows: Rows) -> Family:
    """A gauge."""
    return Family(name=name, help=text, labels=labels, rows=rows)


def text_of(families: Iterable[Family | Buckets]) -> bytes:
    """All families as text, without pauses."""
    return "".join(piece for family in families for piece in pieces(family)).encode()


async def written(families: Iterable[Family | Buckets]) -> bytes:
    """All families as text, with pauses for requests."""
    found: list[str] = []
    left = SLICE_BYTES
    for family in families:
        for piece in pieces(family):
            found.append(piece)
            left -= len(piece)
            if left < 0:
                left = SLICE_BYTES
                await asyncio.sleep(0)
        await asyncio.sleep(0)
    return "".join(found).encode()


def pieces(family: Family | Buckets) -> Iterator[str]:
    """A family's head, then each of its rows."""
    shown = family.name + ("_total" if family.type == "counter" else "")
    yield (f"# HELP {shown} {family.help.translate(_ESCAPED_HELP)}\n# TYPE {shown} {family.type}\n")
    if isinstance(family, Buckets):
        yield from _rows_of_buckets(family)
        return
    labels = _Labels(family.labels)
    for values, value in family.rows:
        yield f"{shown}{labels.of(values)} {number(value)}\n"


def number(value: float) -> str:
    """A value in Prometheus's notation; large ones have an exponent."""
    value = float(value)
    if not isfinite(value):
        return "NaN" if isnan(value) else "+Inf" if value > 0 else "-Inf"
    text = repr(value)
    dot = text.find(".")
    if value > 0 and dot > _LONGEST:
        digits = f"{text[0]}.{text[1:dot]}{text[dot + 1 :]}".rstrip("0.")
        return f"{digits}e+{dot - 1:02d}"
    return text


def _rows_of_buckets(family: Buckets) -> Iterator[str]:
    plain = _Labels(family.labels)
    bounded = _Labels((*family.labels, "le"))
    bounds = [*map(repr, family.bounds), "+Inf"]
    for values, row in family.rows:
        lines = []
        total = 0.0
        for bound, count in zip(bounds, row, strict=False):
            total += count
            shown = bounded.of((*values, bound))
            lines.append(f"{family.name}_bucket{shown} {number(total)}\n")
        shown = plain.of(values)
        lines.append(f"{family.name}_count{shown} {number(total)}\n")
        lines.append(f"{family.name}_sum{shown} {number(row[-1])}\n")
        yield "".join(lines)


class _Labels:
    """Label values as text, names in alphabetical order."""

    __slots__ = ("_order", "_template")

    def __init__(self, names: Labels) -> None:
        self._order = sorted(range(len(names)), key=names.__getitem__)
        inside = ",".join(f'{names[i]}="%s"' for i in self._order)
        self._template = f"{{{inside}}}" if names else ""

    def of(self, values: Labels) -> str:
        """`{a="1",b="2"}`, or "" without labels."""
        return self._template % tuple([values[i].translate(_ESCAPED) for i in self._order])
