"""Output of the verbs: tables, messages, JSON."""

import json
import sys
from contextvars import ContextVar
from typing import Annotated, Final, NoReturn

import typer
from rich.console import Console
from rich.table import Table

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


def console(*, stderr: bool = False) -> Console:
    """A console as wide as the terminal; without a limit in a pipe or a file."""
    terminal = (sys.stderr if stderr else sys.stdout).isatty()
    return Console(highlight=False, stderr=stderr, width=None if terminal else _PIPE_WIDTH)


def table(*columns: str, right: frozenset[str] = frozenset()) -> Table:
    """An empty table without lines; `right` names the columns of numbers."""
    made = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        made.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return made


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
