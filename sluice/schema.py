"""`sluice schema`: the JSON Schema of sluice.yaml, for editors."""

import json
from pathlib import Path
from typing import Annotated

import typer

from gateway import settings


def schema(
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Write to a file instead.")
    ] = None,
) -> None:
    """Print the JSON Schema (draft 2020-12) of the configuration file."""
    text = rendered()
    if output is None:
        typer.echo(text, nl=False)
        return
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        typer.echo(f"cannot write {output}: {error.strerror}", err=True)
        raise typer.Exit(1) from None


def rendered() -> str:
    """The schema as stored in docs/sluice.schema.json."""
    return json.dumps(settings.schema(), indent=2, ensure_ascii=False) + "\n"
