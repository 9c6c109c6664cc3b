"""`sluice prove`: will a configuration hold for each tenant, at yesterday's demand?"""

import json
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from sluice.config_file import load_or_exit
from sluice.plan.command import need_libraries
from sluice.terminal import JsonOption, console, progress_bar, refuse

EXIT_CODES = {"holds": 0, "breaks": 1, "cannot tell": 3}


def prove(
    config: Annotated[Path, typer.Option("-c", "--config", help="The configuration to prove.")],
    log: Annotated[Path, typer.Option(help="A request log of the gateway, or a trace.")],
    against: Annotated[
        Path | None, typer.Option(help="The configuration in force: show what changes for whom.")
    ] = None,
    rate: Annotated[str | None, typer.Option(help="1.2x, or requests/s. [default: 1x]")] = None,
    profile: Annotated[
        Path | None,
        typer.Option(help="The engines' profile (`sluice calibrate`), or a folder of POOL.json."),
    ] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Prove a change. Exit 0: it holds, 1: it breaks, 3: cannot tell, 2: bad input."""
    need_libraries()
    from planner.errors import PlanError
    from sluice.prove.proof import prove_all
    from sluice.prove.report import markdown_of, show
    from sluice.simulated.fleet import plain

    files = [file for file in (config, against) if file is not None]
    for file in files:
        load_or_exit(file, as_json=as_json)
    try:
        with progress_bar() as bar:
            task = bar.add_task("reading the log", total=None)
            show_done = partial(bar.update, task, description="proving")
            proof = prove_all(files, log, rate=rate, profile=profile, progress=show_done)
    except PlanError as error:
        refuse(error.problem, error.fix)
    if as_json:
        typer.echo(json.dumps(plain(proof), indent=2))
    elif markdown:
        typer.echo(markdown_of(proof))
    else:
        show(proof, console())
    raise typer.Exit(EXIT_CODES[proof.verdict])
