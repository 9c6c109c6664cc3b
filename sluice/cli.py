"""The `sluice` command: registers the verbs, one file each.

Exit codes: 0 ok, 1 failed, 2 bad input or configuration. Typer's pretty tracebacks stay off:
they would print local variables, and those hold keys.
"""

import importlib.metadata
from typing import Annotated

import typer

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


def register() -> None:
    """Add every verb; each imports its dependencies only when it runs."""
    from sluice.budget.command import budget
    from sluice.calibrate.command import calibrate
    from sluice.check import check
    from sluice.compress.command import compress
    from sluice.demo.command import demo
    from sluice.hash_key import hash_key
    from sluice.imports.command import import_
    from sluice.mock import mock
    from sluice.plan.command import plan
    from sluice.plan.whatif import whatif
    from sluice.replay.command import replay
    from sluice.schema import schema
    from sluice.serve import serve
    from sluice.simulate.command import simulate
    from sluice.tenant.command import tenant
    from sluice.tenant.keys import key
    from sluice.tenant.tenants import tenants
    from sluice.top.command import top
    from sluice.traffic import traffic
    from sluice.train.command import train
    from sluice.usage import usage
    from sluice.why import why

    verbs = (demo, serve, check, compress, schema, mock, hash_key, plan, whatif, simulate)
    for verb in (*verbs, replay, calibrate, train, top, traffic, why, usage):
        app.command(name=verb.__name__.replace("_", "-"))(verb)
    for group in (tenant, tenants, key, budget):
        app.add_typer(group)
    app.add_typer(import_)


def main() -> None:
    """Entry point of the console script and of `python -m sluice`."""
    register()
    app()
