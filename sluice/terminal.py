"""Output of the verbs: tables, messages, JSON."""

import json
import math
import sys
from collections.abc import Iterable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Annotated, Final, NoReturn

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table

from gateway.settings.source import install
from sluice.plain_output import PlainOutput, plain_lines

if TYPE_CHECKING:
    from rich.progress import Progress

_PIPE_WIDTH: Final = 10_000
"""Width when the output is no terminal: lines are never broken there."""
_for_machines: ContextVar[bool] = ContextVar("_for_machines", default=False)


def _note(as_json: bool) -> bool:
    _for_machines.set(as_json)
    return as_json


JsonOption = Annotated[
    bool, typer.Option("--json", help="Print JSON.", callback=_note, is_eager=True)
]
"""Print JSON; `stop` then prints JSON, too."""


class PlainConsole(Console):
    """A console whose own styles steer the terminal, and no text that it is given."""

    def __init__(self, *, stderr: bool = False, width: int | None = None) -> None:
        shown, raw = (sys.stderr, sys.__stderr__) if stderr else (sys.stdout, sys.__stdout__)
        file = raw if isinstance(shown, PlainOutput) else None
        super().__init__(highlight=False, stderr=stderr, width=width, file=file)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Segments whose text is plain."""
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else plain_lines(text), style, control)


def console(*, stderr: bool = False) -> PlainConsole:
    """A console as wide as the terminal; without a limit in a pipe or a file."""
    terminal = (sys.stderr if stderr else sys.stdout).isatty()
    return PlainConsole(stderr=stderr, width=None if terminal else _PIPE_WIDTH)


def progress_bar() -> "Progress":
    """A bar with the time left, on stderr, that vanishes at the end; none without a terminal."""
    from rich.progress import Progress

    shown = PlainConsole(stderr=True)
    return Progress(console=shown, transient=True, disable=not shown.is_terminal)


def table(*columns: str, right: frozenset[str] = frozenset()) -> Table:
    """An empty table without lines; `right` names the columns of numbers."""
    made = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        made.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return made


def finite(value: float) -> float | None:
    """A number as JSON can have it; None for one without end."""
    return value if math.isfinite(value) else None


def echo_json(content: object) -> None:
    """Print a value as JSON."""
    typer.echo(json.dumps(content, indent=2))


def stop(problem: str, code: int, **more: object) -> NoReturn:
    """End the command with an error, on stderr, or as JSON if --json was given."""
    if _for_machines.get():
        echo_json({"ok": False, "problem": problem, **more})
    else:
        typer.echo(problem, err=True)
    raise typer.Exit(code)


def refuse(problem: str, fix: str) -> NoReturn:
    """End the command because of bad input, with what to change; as JSON if --json was given."""
    if _for_machines.get():
        echo_json({"ok": False, "problem": problem, "fix": fix})
    else:
        typer.echo(f"{problem}\nfix: {fix}", err=True)
    raise typer.Exit(2)


def needs_extra(problem: str, extra: str) -> NoReturn:
    """End the command because a library is missing."""
    stop(f"{problem}\nfix: {install(extra)}", 2)


def need_libraries() -> None:
    """Exit with code 2 if the extra is not installed."""
    try:
        import scipy.special  # noqa: F401
    except ImportError:
        needs_extra("planning needs scipy", "plan")


def need_plots() -> None:
    """Exit with code 2 if nothing can be drawn."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        needs_extra("plots need matplotlib", "bench")
