"""The `sluice` command: registers the verbs, one file each.

Exit codes: 0 ok, 1 failed, 2 bad input or configuration. Typer's pretty tracebacks stay off:
they would print local variables, and those hold keys.
"""

import importlib
import importlib.metadata
import sys
from typing import Annotated, Final

import typer

from sluice.operate.former_words import in_present_words
from sluice.plain_output import plain_output

app = typer.Typer(
    name="sluice",
    help="An OpenAI-compatible gateway for fleets of LLM engines.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(value: bool) -> None:
    if value:
        from sluice.build import compiled

        built = " (compiled)" if compiled() else ""
        typer.echo(f"sluice {importlib.metadata.version('sluice-gateway')}{built}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """An OpenAI-compatible gateway for fleets of LLM engines."""


COMMANDS: Final = {
    "demo": "sluice.demo.command",
    "serve": "sluice.serve",
    "controller": "sluice.controller",
    "check": "sluice.check",
    "compress": "sluice.compress.command",
    "schema": "sluice.schema",
    "mock": "sluice.mock",
    "hash-key": "sluice.hash_key",
    "plan": "sluice.plan.command",
    "whatif": "sluice.plan.whatif",
    "prove": "sluice.prove.command",
    "simulate": "sluice.simulate.command",
    "replay": "sluice.replay.command",
    "calibrate": "sluice.calibrate.command",
    "train": "sluice.train.command",
    "top": "sluice.top.command",
    "traffic": "sluice.demo.command",
    "why": "sluice.operate.why",
    "usage": "sluice.usage",
    "me": "sluice.operate.me",
    "workers": "sluice.operate.workers",
    "drain": "sluice.operate.workers",
    "undrain": "sluice.operate.workers",
    "reload": "sluice.operate.workers",
}
"""Verbs by name, each a function of its module."""
GROUPS: Final = {
    "entitlement": "sluice.operate.entitlement",
    "tenant": "sluice.operate.tenant",
    "key": "sluice.operate.key",
    "budget": "sluice.operate.budget",
    "batch": "sluice.operate.batch",
    "import": "sluice.imports.command",
}
"""Verbs with verbs of their own."""


def register(verb: str = "") -> None:
    """Add a verb, or all if none has that name: a command does not load the others' modules."""
    one = verb in COMMANDS or verb in GROUPS
    for name, module in COMMANDS.items():
        if not one or name == verb:
            found = getattr(importlib.import_module(module), name.replace("-", "_"))
            app.command(name=name)(found)
    for name, module in GROUPS.items():
        if not one or name == verb:
            attribute = "import_" if name == "import" else name
            app.add_typer(getattr(importlib.import_module(module), attribute))


def main() -> None:
    """Entry point of the console script and of `python -m sluice`."""
    plain_output()
    arguments = in_present_words(sys.argv[1:])
    register(arguments[0] if arguments else "")
    app(arguments)
