"""Changes of settings, each in lines that fit a terminal."""

import textwrap
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import typer

WIDTH: Final = 100
_LINES: Final = 4
"""Of one value, at most."""


def echo_changes(changes: Iterable[Mapping[str, Any]], none: str) -> None:
    """Print each change; `none` where there is none."""
    lines = [line for change in changes for line in change_lines(change)]
    for line in lines or [none]:
        typer.echo(line)


def change_lines(change: Mapping[str, Any]) -> Iterator[str]:
    """`path: before -> after` on one line, else a block."""
    late = " (after a restart)" if change.get("restart") else ""
    before, after = change["before"] or "none", change["after"] or "none"
    short = f"{change['path']}: {before} -> {after}{late}"
    if len(short) <= WIDTH and "\n" not in short:
        yield short
        return
    yield f"{change['path']}:{late}"
    yield from _block("  - ", before)
    yield from _block("  + ", after)


def _block(sign: str, value: str) -> list[str]:
    return textwrap.wrap(
        value,
        WIDTH,
        initial_indent=sign,
        subsequent_indent="    ",
        max_lines=_LINES,
        placeholder=" … (all of it: --json)",
    )
