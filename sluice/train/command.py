"""`sluice train`: train predictors of prefill times from a gateway's own request log."""

import json
from pathlib import Path
from typing import Annotated, Any, NamedTuple, NoReturn

import typer
from rich.console import Console
from rich.table import Table

from gateway.settings.source import install
from predictor.artifact import Artifact, ArtifactError, PoolSection, encode
from predictor.rows import LogRows, read_rows
from sluice.terminal import JsonOption, PlainConsole, refuse


class Judged(NamedTuple):
    """What training came to for one pool."""

    name: str
    """Model and pool."""
    section: PoolSection | None
    """None with too few rows."""
    prior_because: str
    """Why the pool keeps the untrained prior; "" if the section is written."""


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
    """Train a predictor of prefill times for each pool; judge it on the newest quarter of the log.

    A pool whose tree loses to the untrained prior there keeps the prior. Exit code 1 when all
    do, and 2 when the log is not sufficient; then nothing is written.
    """
    if not 0.5 <= alpha < 1:
        refuse(f"--alpha {alpha:g}", "give one from 0.5 to below 1")
    log_rows = _read(log, model, pool)
    judged = _train_all(log_rows, alpha, boosted)
    won = [j.section for j in judged if j.section is not None and not j.prior_because]
    if won:
        _write(won, out, plot)
    elif all(j.section is None for j in judged):
        _too_few(judged)
    if as_json:
        told = {"ok": bool(won), "file": str(out) if won else None, **summary(log_rows, judged)}
        typer.echo(json.dumps(told, indent=2))
    else:
        _print(log_rows, judged)
        if won:
            typer.echo(f"wrote {out}")
        else:
            typer.echo("wrote nothing: the untrained prior predicts better", err=True)
    if not won:
        raise typer.Exit(1)


def summary(log_rows: LogRows, judged: list[Judged]) -> dict[str, Any]:
    """The data read, and each pool's predictor."""
    return {
        "log": {
            "lines": log_rows.lines,
            "rows": log_rows.count,
            "unreadable": log_rows.unreadable,
            "other": log_rows.other,
            "lacking": log_rows.lacking,
        },
        "pools": {j.name: _pool_summary(j) for j in judged},
    }


def _pool_summary(judged: Judged) -> dict[str, Any]:
    told: dict[str, Any] = {"written": not judged.prior_because}
    if judged.prior_because:
        told["prior_because"] = judged.prior_because
    if judged.section is not None:
        told["prefill_tokens_per_s"] = round(judged.section.rates.prefill_tokens_per_s)
        told |= {name: v for name, v in judged.section.report.items() if name != "points"}
    return told


def _read(logs: list[Path], model: str | None, pool: str | None) -> LogRows:
    log_rows = LogRows()
    for path in logs:
        try:
            with path.open("rb") as lines:
                read_rows(lines, model=model, pool=pool, into=log_rows)
        except OSError as error:
            refuse(f"{path}: {error.strerror}", "give the gateway's request log")
    return log_rows


def _train_all(log_rows: LogRows, alpha: float, boosted: bool) -> list[Judged]:
    try:
        from predictor.judge import PRIOR, beats_prior
        from predictor.train import TooFewRows
        from predictor.train import train as fit
    except ImportError as error:
        refuse(f"{error.name} is missing", install("train"))
    judged = []
    for (model, pool), rows in sorted(log_rows.rows.items()):
        name = f"{model}/{pool}"
        try:
            with PlainConsole(stderr=True).status(f"training {name} on {len(rows):,} prefills"):
                section = fit(rows, alpha=alpha, boosted=boosted, model=model, pool=pool)
        except TooFewRows as error:
            judged.append(Judged(name, None, str(error)))
            continue
        losses, why = section.report["pinball_s"], ""
        if not beats_prior(section.report):
            why = (
                f"its pinball loss is {1e3 * losses['calibrated']:.2f} ms, "
                f"the untrained prior's {1e3 * losses[PRIOR]:.2f} ms"
            )
        judged.append(Judged(name, section, why))
    return judged


def _write(sections: list[PoolSection], out: Path, plot: Path | None) -> None:
    try:
        out.write_bytes(encode(Artifact(sections=tuple(sections))))
    except ArtifactError as error:
        refuse(str(error), "choose with --model and --pool")
    except OSError as error:
        refuse(f"{out}: {error.strerror}", "give another file with -o")
    if plot is not None:
        from sluice.train.plot import draw

        draw(sections, plot)


def _too_few(judged: list[Judged]) -> NoReturn:
    fix = (
        "serve more requests with the request log on (training uses streams); until then the "
        "gateway predicts from what it learns while it runs"
    )
    problems = [f"{j.name}: {j.prior_because}" for j in judged]
    refuse("; ".join(problems) or "no usable rows", fix)


def _print(log_rows: LogRows, judged: list[Judged]) -> None:
    console = PlainConsole()
    console.print(
        f"{log_rows.lines:,} lines: {log_rows.count:,} prefills, {log_rows.other:,} other, "
        f"{log_rows.lacking:,} without the fields, {log_rows.unreadable:,} unreadable"
    )
    for pool in judged:
        console.print(f"\n[bold]{pool.name}[/]")
        if pool.section is not None:
            _print_section(console, pool.section)
        if pool.prior_because:
            console.print(f"{pool.name} keeps the untrained prior: {pool.prior_because}")


def _print_section(console: Console, section: PoolSection) -> None:
    report = section.report
    console.print(
        f"trained on {report['rows']:,}, judged on the newest {report['held_out']:,}; "
        f"{section.rates.prefill_tokens_per_s:,.0f} prefill tokens/s"
    )
    losses = _table(f"pinball loss at {section.alpha:g}", "ms")
    for name, value in report["pinball_s"].items():
        losses.add_row(name, f"{1e3 * value:.2f}")
    console.print(losses)
    coverage = _table("coverage", "rows", "raw", "calibrated")
    whole = report["coverage"]
    for row in (*report["buckets"], {"bucket": "all", "rows": report["held_out"], **whole}):
        shares = (f"{row[kind]:.3f}" for kind in ("raw", "calibrated"))
        coverage.add_row(row["bucket"], f"{row['rows']:,}", *shares)
    console.print(coverage)


def _table(first: str, *columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(first)
    for column in columns:
        table.add_column(column, justify="right")
    return table
