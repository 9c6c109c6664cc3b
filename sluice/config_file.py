"""Read sluice.yaml for a verb; print problems to stderr and exit with code 2."""

import json
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from gateway.settings import Config, ConfigError, load

ConfigOption = Annotated[
    Path, typer.Option("-c", "--config", help="The configuration file.", show_default=True)
]
DEFAULT = Path("sluice.yaml")


def load_or_exit(path: Path, *, as_json: bool = False) -> Config:
    """Load the configuration, or print every problem and exit with code 2."""
    try:
        return load(path)
    except ConfigError as error:
        if as_json:
            problems = [msgspec.to_builtins(problem) for problem in error.problems]
            typer.echo(json.dumps({"ok": False, "file": str(path), "problems": problems}, indent=2))
        else:
            count = len(error.problems)
            typer.echo(str(error), err=True)
            typer.echo(f"{count} {'problem' if count == 1 else 'problems'}", err=True)
        raise typer.Exit(2) from None
