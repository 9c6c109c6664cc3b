"""Tables that leave out columns rather than break words where the terminal is narrow."""

from collections.abc import Iterable, Mapping, Sequence

from rich.cells import cell_len
from rich.markup import escape
from rich.table import Table

from sluice.terminal import table

GAP: int = 2
"""Blanks between two columns."""


def fitted(
    rows: Iterable[Mapping[str, str]],
    columns: Sequence[str],
    width: int,
    *,
    drop: Sequence[str],
    right: frozenset[str] = frozenset(),
    styles: Mapping[str, str] | None = None,
) -> tuple[Table, tuple[str, ...]]:
    """A table of plain texts, and the columns of `drop` that had to go, in that order.

    `styles`: text of a cell -> its style.
    """
    shown = list(rows)
    wide = {name: max(map(cell_len, (name, *(row[name] for row in shown)))) for name in columns}
    left_out: list[str] = []
    for name in drop:
        if sum(wide.values()) + GAP * (len(wide) - 1) <= width:
            break
        left_out.append(name)
        del wide[name]
    found = table(*wide, right=right)
    for column in found.columns:
        column.no_wrap = True
        column.overflow = "ellipsis"
    for row in shown:
        found.add_row(*(_cell(row[name], styles or {}) for name in wide))
    return found, tuple(left_out)


def _cell(text: str, styles: Mapping[str, str]) -> str:
    style = styles.get(text)
    return f"[{style}]{escape(text)}[/]" if style else escape(text)
