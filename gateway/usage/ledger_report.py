"""Reads usage reports from a ledger, beside the process that writes it. Blocks; raises OSError."""

import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Final

from gateway.records.usage import UsageQuery, UsageReport, UsageSums
from gateway.usage.ledger import BUSY_S, check
from gateway.usage.report import OF_THE_FLEET, idle_name

_SUMS: Final = ", ".join(f"SUM({name})" for name in UsageSums._fields)
_DAYS: Final = "day BETWEEN ? AND ?"
_BY_HOUR: Final = "(day, model) IN (SELECT day, model FROM fleet)"


def report(path: Path, query: UsageQuery, most: int = -1) -> UsageReport:
    """The report of one ledger; the first `most` rows, -1 for all."""
    try:
        # Not opened for writing, so that reports never make a file.
        with closing(
            sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", BUSY_S, uri=True)
        ) as file:
            file.execute("BEGIN")  # all of it as it is at one moment
            check(file, path)
            (currency,) = file.execute("SELECT value FROM facts WHERE name = 'currency'").fetchone()
            return UsageReport(
                query=query,
                rows=_rows(file, query, most),
                idle_nano=_idle(file, query) if query.tenant is None else {},
                currency=currency,
            )
    except sqlite3.Error as error:
        raise OSError(0, str(error), str(path)) from error


def _rows(
    file: sqlite3.Connection, query: UsageQuery, most: int
) -> dict[tuple[str, ...], UsageSums]:
    by, where, values = ", ".join(query.by), _DAYS, [query.first_day, query.last_day]
    if query.tenant is not None:
        where, values = f"{where} AND tenant = ?", [*values, query.tenant]
    group = f"GROUP BY {by} ORDER BY {by} LIMIT {most}"
    found = file.execute(
        f"SELECT {by}, {_SUMS} FROM usage WHERE {where} {group}",  # noqa: S608 - names, a number
        values,
    )
    return {row[: len(query.by)]: UsageSums(*row[len(query.by) :]) for row in found}


def _idle(file: sqlite3.Connection, query: UsageQuery) -> dict[tuple[str, ...], int]:
    """What the fleet cost beyond the shares of requests."""
    by = [name for name in query.by if name in OF_THE_FLEET]
    days = [query.first_day, query.last_day]
    bills = _costs(file, "fleet", by, _DAYS, days)
    shared = _costs(file, "usage", by, f"{_DAYS} AND {_BY_HOUR}", days)
    return {idle_name(query.by, name): nano - shared.get(name, 0) for name, nano in bills.items()}


def _costs(
    file: sqlite3.Connection, table: str, by: Sequence[str], where: str, values: Sequence[str]
) -> dict[tuple[str, ...], int]:
    columns = "".join(f"{name}, " for name in by)
    group = f" GROUP BY {', '.join(by)}" if by else ""
    found = file.execute(
        f"SELECT {columns}SUM(cost_nano) FROM {table} WHERE {where}{group}",  # noqa: S608 - names
        values,
    )
    return {row[:-1]: row[-1] for row in found if row[-1] is not None}
