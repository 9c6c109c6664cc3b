"""`sluice train`: train a predictor of prefill times from a gateway's own request log."""

import json
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.table import Table

from predictor.artifact import Artifact, encode
from predictor.rows import Found, PrefillRow, read_rows
from sluice.terminal import JsonOption


def train(
    log: Annotated[list[Path], typer.Option("--log", help="Request log; may be repeated.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="The predictor.")] = Path(
        "predictor.json"
    ),
    model: Annotated[str | None, typer.Option(help="Only this model's requests.")] = None,
    pool: Annotated[str | None, typer.Option(help="Only this pool's requests.")] = None,
    alpha: Annotated[float, typer.Option(help="The predicted quantile.")] = 0.95,
    boosted: Annotated[
        bool, typer.Option("--boosted", help="Quantiles of 60 trees: closer, and slower.")
    ] = False,
    plot: Annotated[Path | None, typer.Option(help="PNG of its accuracy.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Train a predictor of prefill times and judge it on the newest quarter of the log.

    Exit code 2 when the log is not sufficient.
    """
    if not 0.5 <= alpha < 1:
        _refuse(f"--alpha {alpha:g}", "give one from 0.5 to below 1", as_json=as_json)
    found = _read(log, model, pool, as_json=as_json)
    if len(found.pools) > 1:
        names = ", ".join(f"{name} ({count})" for name, count in sorted(found.pools.items()))
        fix = "choose one with --model and --pool: engines differ, and so do their predictors"
        _refuse(f"the log is of several pools: {names}", fix, as_json=as_json)
    artifact = _train(found.rows, next(iter(found.pools), ""), alpha, boosted, as_json=as_json)
    try:
        out.write_bytes(encode(artifact))
    except OSError as error:
        _refuse(f"{out}: {error.strerror}", "give another file with -o", as_json=as_json)
    if plot is not None:
        from sluice.train.plot import draw

        draw(artifact, plot)
    if as_json:
        typer.echo(json.dumps({"ok": True, "file": str(out), **summary(found, artifact)}, indent=2))
    else:
        _print(found, artifact, out)


def summary(found: Found, artifact: Artifact) -> dict[str, Any]:
    """The data read, and the predictor's quality."""
    report = {name: value for name, value in artifact.report.items() if name != "points"}
    return {
        "log": {
            "lines": found.lines,
            "rows": len(found.rows),
            "unreadable": found.unreadable,
            "other": found.other,
            "lacking": found.lacking,
        },
        "trained_on": artifact.trained_on,
        "prefill_tokens_per_s": round(artifact.rates.prefill_tokens_per_s),
        **report,
    }


def _read(logs: list[Path], model: str | None, pool: str | None, *, as_json: bool) -> Found:
    found = Found()
    for path in logs:
        try:
            with path.open("rb") as lines:
                read_rows(lines, model=model, pool=pool, into=found)
        except OSError as error:
            _refuse(f"{path}: {error.strerror}", "give the gateway's request log", as_json=as_json)
    return found


def _train(
    rows: list[PrefillRow], name: str, alpha: float, boosted: bool, *, as_json: bool
) -> Artifact:
    try:
        from predictor.train import TooFewRows
        from predictor.train import train as fit
    except ImportError as error:
        _refuse(f"{error.name} is missing", "pip install 'sluice-gateway[train]'", as_json=as_json)
    try:
        with Console(stderr=True).status(f"training on {len(rows):,} prefills"):
            return fit(rows, alpha=alpha, boosted=boosted, trained_on=name)
    except TooFewRows as error:
        fix = (
            "serve more requests with `scheduling: {policy: quartz}` and the request log on; "
            "until then the gateway predicts from what it learns while it runs"
        )
        _refuse(str(error), fix, as_json=as_json)


def _refuse(problem: str, fix: str, *, as_json: bool) -> NoReturn:
    if as_json:
        typer.echo(json.dumps({"ok": False, "problem": problem, "fix": fix}, indent=2))
    else:
        typer.echo(f"{problem}\nfix: {fix}", err=True)
    raise typer.Exit(2) from None


def _print(found: Found, artifact: Artifact, out: Path) -> None:
    console = Console(highlight=False)
    report = artifact.report
    console.print(
        f"{found.lines:,} lines: {len(found.rows):,} prefills, {found.other:,} other, "
        f"{found.lacking:,} without the fields, {found.unreadable:,} unreadable"
    )
    console.print(
        f"trained on {report['rows']:,}, judged on the newest {report['held_out']:,}; "
        f"{artifact.rates.prefill_tokens_per_s:,.0f} prefill tokens/s"
    )
    losses = _table(f"pinball loss at {artifact.alpha:g}", "ms")
    for name, value in report["pinball_s"].items():
        losses.add_row(name, f"{1e3 * value:.2f}")
    console.print(losses)
    coverage = _table("coverage", "rows", "raw", "calibrated")
    whole = report["coverage"]
    for row in (*report["buckets"], {"bucket": "all", "rows": report["held_out"], **whole}):
        shares = (f"{row[kind]:.3f}" for kind in ("raw", "calibrated"))
        coverage.add_row(row["bucket"], f"{row['rows']:,}", *shares)
    console.print(coverage)
    typer.echo(f"wrote {out}")


def _table(first: str, *columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(first)
    for column in columns:
        table.add_column(column, justify="right")
    return table
