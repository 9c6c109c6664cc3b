"""Rows of a benchmark (published, measured, target), as a table or as JSON."""

import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any, Final, TypeVar

import msgspec
from rich.console import Console
from rich.progress import Progress, track
from rich.table import Table


class Row(msgspec.Struct, frozen=True):
    """One figure. `target` is the condition in words; `holds` None where there is none."""

    metric: str
    measured: float | str | None
    note: str = ""
    published: float | str | None = None
    ratio: float | None = None
    target: str | None = None
    holds: bool | None = None


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What one benchmark found."""

    name: str
    rows: list[Row]
    detail: dict[str, Any] = {}

    @property
    def holds(self) -> bool:
        """Whether every row with a target holds."""
        return all(row.holds is not False for row in self.rows)


def judged(
    metric: str,
    measured: float | str | None,
    target: str,
    holds: bool,
    note: str = "",
    published: float | str | None = None,
) -> Row:
    """A row with a target in words."""
    ratio = None
    if isinstance(measured, int | float) and isinstance(published, int | float) and published:
        ratio = measured / published
    return Row(metric, measured, note, published, ratio, target, holds)


def at_most(metric: str, measured: float, limit: float, note: str = "") -> Row:
    """A row whose target is an upper bound."""
    return judged(metric, measured, f"<= {limit:g}", measured <= limit, note)


def at_least(metric: str, measured: float, limit: float, note: str = "") -> Row:
    """A row whose target is a lower bound."""
    return judged(metric, measured, f">= {limit:g}", measured >= limit, note)


def above(metric: str, measured: float, limit: float, note: str = "") -> Row:
    """A row whose target is more than a bound."""
    return judged(metric, measured, f"> {limit:g}", measured > limit, note)


def equals(metric: str, measured: float, wanted: float, note: str = "") -> Row:
    """A row whose target is one value."""
    return judged(metric, measured, f"= {wanted:g}", measured == wanted, note)


def same(metric: str, measured: float | str, published: float | str, note: str = "") -> Row:
    """A row that holds when what is measured is what was printed."""
    return judged(metric, measured, f"= {published}", measured == published, note, published)


def between(
    metric: str,
    measured: float,
    low: float,
    high: float,
    note: str = "",
    published: float | str | None = None,
) -> Row:
    """A row whose target is a range."""
    holds = low <= measured <= high
    return judged(metric, measured, f"{low:g} to {high:g}", holds, note, published)


def rounds(metric: str, measured: float, published: float, digits: int = 0, note: str = "") -> Row:
    """A row that holds when what is measured rounds to what was published."""
    holds = abs(measured - published) <= 0.5 * 10**-digits * (1 + 1e-9)
    return judged(metric, measured, f"rounds to {published:.{digits}f}", holds, note, published)


def beside(metric: str, measured: float, published: float | None, note: str = "") -> Row:
    """A figure beside the published one, without a target."""
    return Row(metric, measured, note, published, measured / published if published else None)


def without_target(row: Row) -> Row:
    """The same figure, for information."""
    return msgspec.structs.replace(row, target=None, holds=None)


def spread(values: Sequence[float]) -> str:
    """The range of some seeds, for a note."""
    return f"{min(values):.3g} to {max(values):.3g} over {len(values)} seeds"


def quantile(values: Sequence[float], q: float) -> float:
    """By nearest rank; NaN of nothing."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(q * len(ordered)) - 1)] if ordered else math.nan


def over_seeds(
    metric: str,
    values: Sequence[float],
    published: float | None = None,
    within: tuple[float, float] | None = None,
    note: str = "",
) -> Row:
    """The middle of the seeds beside the published figure; `within` is its target."""
    values = [value for value in values if not math.isnan(value)]
    middle = float(median(values))
    told = f"{spread(values)}; {note}" if note else spread(values)
    if within is None:
        return beside(metric, middle, published, told)
    return between(metric, middle, *within, told, published)


def show(report: Report, console: Console) -> None:
    """Print a report as a table."""
    table = Table(title=report.name)
    for column in ("metric", "published", "measured", "ratio", "target", "holds", "note"):
        table.add_column(column)
    for row in report.rows:
        verdict = {True: "[green]yes", False: "[red]no", None: ""}[row.holds]
        figures = (_cell(row.published), _cell(row.measured), _cell(row.ratio))
        table.add_row(row.metric, *figures, row.target or "", verdict, row.note)
    console.print(table)


def _cell(value: float | str | None) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


# -- how long a bench is, and how far it has come


SHARE: Final = float(os.environ.get("SLUICE_BENCH_SHARE", "1"))
_T = TypeVar("_T")

Advance = Callable[[], None]
"""Tells the progress bar that a step is done."""
Bar = Callable[[str, int], Advance]
"""A bar of so many steps."""


def scaled(full: int, least: int = 1) -> int:
    """So many of `full` as are asked for."""
    return min(full, max(least, round(SHARE * full)))


def scaled_s(full_s: float, least_s: float = 1.0) -> float:
    """So many seconds as are asked for."""
    return min(full_s, max(least_s, SHARE * full_s))


def tracked(items: Iterable[_T], label: str, total: int | None = None) -> Iterable[_T]:
    """The items, with a bar on stderr while they are taken."""
    console = Console(stderr=True)
    return track(items, label, total=total, console=console, transient=True)


def no_bar(_: str, __: int) -> Advance:
    """Shows nothing."""
    return lambda: None


@contextmanager
def bars() -> Iterator[Bar]:
    """Several bars, one below the other."""
    with Progress(console=Console(stderr=True), transient=True) as progress:

        def bar(label: str, total: int) -> Advance:
            task = progress.add_task(label, total=total)
            return lambda: progress.advance(task)

        yield bar
