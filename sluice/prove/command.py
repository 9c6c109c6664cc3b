"""`sluice prove`: will a configuration hold for each tenant, at yesterday's demand? Did it?"""

import json
from functools import partial
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from sluice.config_file import load_or_exit
from sluice.operate.admin_client import AdminClient
from sluice.terminal import JsonOption, console, echo_json, need_libraries, progress_bar, refuse

EXIT_CODES = {"holds": 0, "breaks": 1, "agreed": 0, "wrong": 1, "cannot tell": 3}


def prove(
    config: Annotated[
        Path | None, typer.Option("-c", "--config", help="The configuration to prove.")
    ] = None,
    log: Annotated[
        Path | None, typer.Option(help="A request log of the gateway, or a trace.")
    ] = None,
    against: Annotated[
        Path | None, typer.Option(help="The configuration in force: show what changes for whom.")
    ] = None,
    rate: Annotated[str | None, typer.Option(help="1.2x, or requests/s. [default: 1x]")] = None,
    profile: Annotated[
        Path | None,
        typer.Option(help="The engines' profile (`sluice calibrate`), or a folder of POOL.json."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Write the proof there, for `sluice reload --proof`.")
    ] = None,
    review: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|ID", help="Compare a proof that was attached with what came of it."
        ),
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(help="With --review, in place of --log: a gateway; its key as for `reload`."),
    ] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Prove a change. Exit 0: it holds, 1: it breaks, 3: cannot tell, 2: bad input.

    With --review exit 0: every verdict was right, 1: one was wrong, 3: cannot tell.
    """
    need_libraries()
    if review is not None:
        _review(review, log, url, as_json=as_json)
    if config is None or log is None or url is not None:
        refuse("nothing to prove", "give -c FILE --log FILE, or --review PROOF --log FILE")
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
    if out is not None:
        out.write_text(json.dumps(plain(proof)), "utf-8")
    if as_json:
        typer.echo(json.dumps(plain(proof), indent=2))
    elif markdown:
        typer.echo(markdown_of(proof))
    else:
        show(proof, console())
    raise typer.Exit(EXIT_CODES[proof.verdict])


def _review(wanted: str, log: Path | None, url: str | None, *, as_json: bool) -> NoReturn:
    """Show a proof beside reality; ends the command."""
    from planner.errors import PlanError
    from sluice.prove.report import show_review
    from sluice.prove.review import review_gateway, review_log
    from sluice.simulated.fleet import plain

    if (log is None) == (url is None):
        refuse("nothing to compare with", "give --log FILE, or --url of a gateway")
    try:
        if log is not None:
            found = review_log(wanted, log)
        else:
            found = review_gateway(wanted, AdminClient(str(url), None))
    except PlanError as error:
        refuse(error.problem, error.fix)
    if as_json:
        echo_json(plain(found))
    else:
        show_review(found, console())
    raise typer.Exit(EXIT_CODES[found.result])
