"""How long a bench is, and how far it has come.

`SLUICE_BENCH_SHARE` (`--share`) makes every bench shorter: requests, seeds, rounds and seconds are
that share of the full ones, as far as a bench can be without them.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Final, TypeVar

from rich.console import Console
from rich.progress import Progress, track

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
