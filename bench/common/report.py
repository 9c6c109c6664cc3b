"""Rows of a benchmark (published, measured, target), as a table or as JSON."""

from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One figure. `target` is the condition in words; `holds` None where there is none."""

    metric: str
    measured: float | str | None
    published: float | str | None = None
    ratio: float | None = None
    target: str | None = None
    holds: bool | None = None
    note: str = ""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What one benchmark found."""

    name: str
    rows: list[Row]
    detail: dict[str, Any] = {}

    @property
    def holds(self) -> bool:
        """Whether every row with a target holds."""
        return all(row.holds is not False for row in self.rows)


def at_most(metric: str, measured: float, limit: float, note: str = "") -> Row:
    """A row whose target is an upper bound."""
    return Row(
        metric=metric, measured=measured, target=f"<= {limit:g}", holds=measured <= limit, note=note
    )


def at_least(metric: str, measured: float, limit: float, note: str = "") -> Row:
    """A row whose target is a lower bound."""
    return Row(
        metric=metric, measured=measured, target=f">= {limit:g}", holds=measured >= limit, note=note
    )


def equals(metric: str, measured: float, wanted: float, note: str = "") -> Row:
    """A row whose target is one value."""
    return Row(
        metric=metric,
        measured=measured,
        target=f"= {wanted:g}",
        holds=measured == wanted,
        note=note,
    )


def show(report: Report, console: Console) -> None:
    """Print a report as a table."""
    table = Table(title=report.name)
    for column in ("metric", "published", "measured", "ratio", "target", "holds", "note"):
        table.add_column(column)
    for row in report.rows:
        verdict = {True: "[green]yes", False: "[red]no", None: ""}[row.holds]
        table.add_row(
            row.metric,
            _cell(row.published),
            _cell(row.measured),
            _cell(row.ratio),
            row.target or "",
            verdict,
            row.note,
        )
    console.print(table)


def _cell(value: float | str | None) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
