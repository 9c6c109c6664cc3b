"""Usage reports: what may be asked, sums over requests, and reports of several sources as one.

And the fleet's bill: the hours of every worker that is there. Workers that are down, draining or
leaving cost as much as others. Where several replicas serve the same fleet, each counts its part,
so that the parts of all add up to the bill.
"""

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, date, datetime
from typing import Any, Final, NamedTuple

from gateway.fleet.fleet import PoolState
from gateway.records.usage import UsageLine, UsageQuery, UsageReport, UsageSums, in_units

COLUMNS: Final = ("day", "tenant", "entitlement", "key", "model")
OF_THE_FLEET: Final = ("day", "model")
"""Columns that tell apart what is idle."""
IDLE: Final = "(idle)"
_FIRST: Final = "0001-01-01"
_LAST: Final = "9999-12-31"

NOTHING: Final = UsageSums()
DAY_S: Final = 86_400


def query_of(
    by: str, first_day: str | None, last_day: str | None, tenant: str | None = None
) -> UsageQuery:
    """The query that texts of a client ask for. Raises ValueError, which says what is wrong."""
    names = tuple(dict.fromkeys(name.strip() for name in by.split(",") if name.strip()))
    unknown = [name for name in names if name not in COLUMNS]
    if unknown or not names:
        raise ValueError(
            f"'{by[:64]}' cannot tell rows apart: give some of {', '.join(COLUMNS)}, "
            "separated by commas"
        )
    first, last = _day(first_day, _FIRST), _day(last_day, _LAST)
    if first > last:
        raise ValueError(f"the first day, {first}, is after the last, {last}")
    return UsageQuery(by=names, first_day=first, last_day=last, tenant=tenant)


def _day(given: str | None, default: str) -> str:
    if not given:
        return default
    try:
        return date.fromisoformat(given).isoformat()
    except ValueError:
        raise ValueError(
            f"'{given[:32]}' is not a day: write it as 2026-12-31 (days are those of UTC)"
        ) from None


def day_of(unix_s: float) -> str:
    """The day of a time, by UTC."""
    return datetime.fromtimestamp(unix_s, UTC).date().isoformat()


def plus(first: UsageSums, second: UsageSums) -> UsageSums:
    """Both together."""
    return UsageSums(*(a + b for a, b in zip(first, second, strict=True)))


def summed(lines: Iterable[UsageLine], by: Sequence[str]) -> dict[tuple[str, ...], UsageSums]:
    """Lines as one sum for each value of `by`."""
    rows: dict[tuple[str, ...], list[int]] = {}
    day, day_name = -1, ""
    for line in lines:
        if day != line.time_unix_s // DAY_S:  # mostly the one of the line before
            day, day_name = int(line.time_unix_s // DAY_S), day_of(line.time_unix_s)
        name = tuple([day_name if column == "day" else getattr(line, column) for column in by])
        sums = rows.setdefault(name, [0] * len(UsageSums._fields))
        sums[0] += 1
        sums[1] += line.input_tokens
        sums[2] += line.cached_input_tokens
        sums[3] += line.output_tokens
        sums[4] += line.charge_tokens
        sums[5] += line.cost_nano or 0
    return {name: UsageSums(*sums) for name, sums in rows.items()}


def asked_for(line: UsageLine, query: UsageQuery) -> bool:
    """Whether a line belongs into the report."""
    if query.tenant is not None and line.tenant != query.tenant:
        return False
    return query.first_day <= day_of(line.time_unix_s) <= query.last_day


def idle_name(by: Sequence[str], fleet_name: Sequence[str]) -> tuple[str, ...]:
    """The name of a row of idle cost; `fleet_name` has the values of `by` in `OF_THE_FLEET`."""
    values = iter(fleet_name)
    return tuple([next(values) if name in OF_THE_FLEET else IDLE for name in by])


def merged(query: UsageQuery, reports: Sequence[UsageReport]) -> UsageReport:
    """Reports of several sources, such as the hosts of a fleet, as one."""
    rows: dict[tuple[str, ...], UsageSums] = {}
    idle: dict[tuple[str, ...], int] = {}
    currencies: dict[str, None] = {}
    for report in reports:
        for name, sums in report.rows.items():
            rows[name] = plus(rows.get(name, NOTHING), sums)
        for name, nano in report.idle_nano.items():
            idle[name] = idle.get(name, 0) + nano
        currencies.update(dict.fromkeys(filter(None, report.currency.split(", "))))
    return UsageReport(query=query, rows=rows, idle_nano=idle, currency=", ".join(currencies))


def total(report: UsageReport) -> UsageSums:
    """All rows together, what was idle included."""
    sums = UsageSums(cost_nano=sum(report.idle_nano.values()))
    for row in report.rows.values():
        sums = plus(sums, row)
    return sums


def lines_of(report: UsageReport) -> list[dict[str, Any]]:
    """Its rows as JSON objects, in order; after them what was idle."""
    by = report.query.by
    rows: list[tuple[tuple[str, ...], UsageSums]] = sorted(report.rows.items())
    idle = [(name, UsageSums(cost_nano=nano)) for name, nano in sorted(report.idle_nano.items())]
    return [{**dict(zip(by, name, strict=True)), **figures(sums)} for name, sums in [*rows, *idle]]


def figures(sums: UsageSums) -> Mapping[str, object]:
    """A sum as JSON shows it; `cost` is exact, as text."""
    return {**sums._asdict(), "cost": in_units(sums.cost_nano)}


# -- what the fleet costs, whether it serves or not


class PoolBill(NamedTuple):
    """Of one pool, for some stretch of time."""

    model: str
    pool: str
    worker_s: float
    """Time of all its workers."""
    cost_nano: int


class FleetBill:
    """Of the pools that have a price by the hour."""

    def __init__(self, pools: Iterable[tuple[str, PoolState]]) -> None:
        """`pools`: (model, pool)."""
        self._at_s: float | None = None
        self._rest_nano: dict[int, float] = {}
        """By id of the pool: below one nano-unit, for the next bill."""
        self.follow(pools)

    def follow(self, pools: Iterable[tuple[str, PoolState]]) -> None:
        """Count these pools from now on; what is left of the others is dropped."""
        rests, self._pools = self._rest_nano, list(pools)
        self._rest_nano = {id(pool): rests.get(id(pool), 0.0) for _, pool in self._pools}

    def due(self, now_s: float, replicas: int) -> list[PoolBill]:
        """The bill of each pool since the last call; the first call begins to count."""
        at_s, self._at_s = self._at_s, now_s
        if at_s is None or now_s <= at_s:
            return []
        bills = []
        for model, pool in self._pools:
            clock = pool.slot_clock
            if clock is None:  # it has no price
                continue
            worker_s = (now_s - at_s) * sum(pool.present) / max(replicas, 1)
            exact_nano = worker_s * clock.nano_per_s + self._rest_nano[id(pool)]
            cost_nano = int(exact_nano)
            self._rest_nano[id(pool)] = exact_nano - cost_nano
            bills.append(PoolBill(model, pool.name, worker_s, cost_nano))
        return bills
