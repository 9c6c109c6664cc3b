"""`sluice usage`: usage and cost by tenant, key, model or day, from ledgers or usage exports."""

import csv
import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
import typer

from gateway.records.usage import UsageLine, UsageQuery, UsageReport, UsageSums
from gateway.usage.ledger import report as ledger_report
from gateway.usage.report import (
    asked_for,
    figures,
    lines_of,
    merged,
    query_of,
    summed,
    total,
)
from sluice.config_file import DEFAULT, ConfigOption, load_or_exit
from sluice.fitted_table import fitted
from sluice.terminal import JsonOption, console, echo_json, stop

_MAGIC: Final = b"SQLite format 3\0"
_MAX_APART: Final = 1_000_000
"""Lines between two copies of one. A crash or a full disk makes a writer repeat at most a tenth."""
_decode: Final = msgspec.json.Decoder(UsageLine).decode
_FIGURES: Final = (*UsageSums._fields[:-1], "cost")
_HEADS: Final = {
    "input_tokens": "input",
    "cached_input_tokens": "cached",
    "output_tokens": "output",
    "charge_tokens": "charged",
}
"""Of the table's columns, where they are not the figures' names."""
_LEFT_OUT_FIRST: Final = ("charged", "cached")


def usage(
    files: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Ledgers or usage exports, whose sums are added; default: those of the "
            "configuration.",
            show_default=False,
        ),
    ] = None,
    config: ConfigOption = DEFAULT,
    by: Annotated[
        str, typer.Option(help="Any of day, tenant, entitlement, key, model, with commas between.")
    ] = "tenant,model",
    first: Annotated[
        str | None,
        typer.Option("--from", metavar="DAY", help="First day, by UTC.", show_default=False),
    ] = None,
    last: Annotated[
        str | None,
        typer.Option("--to", metavar="DAY", help="Last day, included.", show_default=False),
    ] = None,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV, without the total.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Usage and cost, and what of the fleet was idle."""
    try:
        query = query_of(by, first, last)
    except ValueError as error:
        stop(f"{error}.", 2)
    try:
        parts = [_read(path, query) for path in files or [_configured(config, as_json=as_json)]]
    except OSError as error:
        stop(f"{error.filename or ''}: {error.strerror or error}".removeprefix(": "), 1)
    found = merged(query, parts)
    if as_json:
        rows = {"rows": lines_of(found), "total": figures(total(found))}
        echo_json({"by": query.by, "currency": found.currency, **rows})
    elif as_csv:
        typer.echo(_csv(found), nl=False)
    else:
        _print_table(found)


def _configured(path: Path, *, as_json: bool) -> Path:
    loaded = load_or_exit(path, as_json=as_json)
    found = loaded.ledger.path or loaded.usage_export.path
    if found is None:
        stop(f"{path} has neither `ledger.path` nor `usage_export.path`: set one, or name files", 2)
    return found


def _read(path: Path, query: UsageQuery) -> UsageReport:
    """The report of a ledger, or of an export. Raises OSError."""
    with path.open("rb") as file:
        if file.read(len(_MAGIC)) == _MAGIC:
            return ledger_report(path, query)
        file.seek(0)
        currencies: dict[str, None] = {}
        rows = summed(_wanted(_once(file), query, currencies), query.by)
        return UsageReport(query=query, rows=rows, currency=", ".join(filter(None, currencies)))


def _wanted(
    lines: Iterator[UsageLine], query: UsageQuery, currencies: dict[str, None]
) -> Iterator[UsageLine]:
    for line in lines:
        if asked_for(line, query):
            currencies[line.currency] = None
            yield line


def _once(file: io.BufferedIOBase | io.BufferedReader) -> Iterator[UsageLine]:
    """Each request of an export once; torn lines and copies are left out."""
    known: dict[str, None] = {}
    for text in file:
        try:
            line = _decode(text)
        except msgspec.MsgspecError:
            continue
        if line.id in known:
            continue
        known[line.id] = None
        if len(known) > _MAX_APART:
            del known[next(iter(known))]
        yield line


def _csv(report: UsageReport) -> str:
    text = io.StringIO()
    columns = [*report.query.by, *UsageSums._fields, "cost", "currency"]
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows({**row, "currency": report.currency} for row in lines_of(report))
    return text.getvalue()


def _print_table(report: UsageReport) -> None:
    lines = lines_of(report)
    if not lines:
        typer.echo("no usage in these days")
        return
    end = dict.fromkeys(report.query.by, "") | {report.query.by[0]: "total"}
    rows = [_cells(line, report.query.by) for line in [*lines, {**end, **figures(total(report))}]]
    heads = [_HEADS.get(name, name) for name in _FIGURES]
    out = console()
    shown, left_out = fitted(
        rows, [*report.query.by, *heads], out.width, drop=_LEFT_OUT_FIRST, right=frozenset(heads)
    )
    out.print(shown)
    if report.currency:
        typer.echo(f"cost in {report.currency}")
    if left_out:
        typer.echo(f"left out in this width: {', '.join(left_out)}")


def _cells(line: dict[str, Any], by: Sequence[str]) -> dict[str, str]:
    numbers = {
        _HEADS.get(name, name): f"{line[name]:,}" if isinstance(line[name], int) else line[name]
        for name in _FIGURES
    }
    return {**{name: line[name] for name in by}, **numbers}
