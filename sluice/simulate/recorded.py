"""A recorded trace: times and both lengths of every request, for `--arrivals recorded`."""

import csv
import io
from collections.abc import Iterable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from planner.errors import PlanError
from planner.readers.traces import KNOWN, FieldMap, parse_field_map, readable
from simulator.fleet.arrivals import recorded
from simulator.fleet.traffic import Floats, Ints, Traffic


class RecordedTraffic(msgspec.Struct, frozen=True, kw_only=True):
    """Requests by time; columns of equal length."""

    at_s: Floats
    """Seconds from the first request."""
    prompts: Ints
    answers: Ints
    categories: tuple[str, ...]
    """Category of each request; empty if not known."""


_FIX = "name its fields: --fields prompt=FIELD,answer=FIELD,time=FIELD"


def read_traffic(
    path: Path, *, fields: str | None, rate_per_s: float | None, requests: int | None
) -> Traffic:
    """The trace from its first request on, in order of time, optionally scaled to another rate.

    `requests` limits the number read. Raises PlanError as `read_recorded`.
    """
    found = read_recorded(path, fields=fields, requests=requests)
    try:
        at_s = recorded(found.at_s, rate_per_s=rate_per_s)
    except ValueError as error:
        raise PlanError(f"{path.name}: {error}", "give --rate above 0, or none") from None
    return Traffic(arrival_s=at_s, prompt_tokens=found.prompts, output_tokens=found.answers)


def read_recorded(
    path: Path, *, fields: str | None = None, requests: int | None = None
) -> RecordedTraffic:
    """A trace's requests in order of time, from its first one on.

    Requests that were not served, or whose lengths are not known, are left out. Raises PlanError if
    no request has a time.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"{path}: {error}", "give a trace: CSV or JSON lines") from None
    found: FieldMap | None = parse_field_map(fields) if fields else None
    rows: list[tuple[float, int, int, str]] = []
    for record in _records(text, path.name):
        found = found or _recognised(record, path.name)
        row = _row(record, found)
        if row is not None:
            rows.append(row)
    if not rows:
        raise PlanError(f"{path.name} has no requests with lengths and times", _FIX)
    rows = sorted(rows)[:requests]
    times, prompts, answers, categories = zip(*rows, strict=True)
    at_s = np.array(times)
    return RecordedTraffic(
        at_s=at_s - at_s[0],
        prompts=np.maximum(1, np.array(prompts)).astype(np.int64),
        answers=np.maximum(1, np.array(answers)).astype(np.int64),
        categories=categories if any(categories) else (),
    )


def _records(text: str, name: str) -> Iterable[Mapping[str, Any]]:
    if not text.lstrip().startswith("{"):
        return csv.DictReader(io.StringIO(text))
    try:
        lines = [msgspec.json.decode(line, type=dict) for line in text.splitlines() if line.strip()]
    except msgspec.MsgspecError as error:
        raise PlanError(f"{name}: {error}", "give one JSON object a line") from None
    # The gateway's log also has lines about token pools; they are not requests.
    return [readable(line) for line in lines if not {"schema", "event", "unix_s"} <= line.keys()]


def _recognised(record: Mapping[str, Any], name: str) -> FieldMap:
    for known in KNOWN:
        # A gateway's log may begin with a refused request, which has no lengths.
        needed = known.marks if known.outcome else (known.prompt, known.answer, *known.marks)
        if known.time in record and all(field in record for field in needed):
            return known
    raise PlanError(f"{name} has fields of no known trace with times", _FIX)


def _row(record: Mapping[str, Any], fields: FieldMap) -> tuple[float, int, int, str] | None:
    if fields.outcome is not None and record.get(fields.outcome) != "ok":
        return None
    time_s = _seconds(record.get(fields.time or ""), fields.time_unit_s)
    try:
        prompt, answer = (round(float(record[name])) for name in (fields.prompt, fields.answer))
    except (KeyError, TypeError, ValueError):
        return None
    if time_s is None or min(prompt, answer) < 0:
        return None
    return time_s, prompt, answer, str(record.get(fields.category or "") or "")


def _seconds(value: object, unit_s: float) -> float | None:
    """Seconds of a number of units, or of a date and time; None for anything else."""
    try:
        return float(str(value)) * unit_s
    except ValueError:
        pass
    try:
        # Azure writes seven digits of a second; Python parses at most six.
        whole, _, fraction = str(value).partition(".")
        return datetime.fromisoformat(f"{whole}.{fraction[:6]}" if fraction else whole).timestamp()
    except ValueError:
        return None
