"""Read traces as workloads, by the field names of their format.

Known formats are recognised by the fields of their first record: the gateway's request log
(`gateway.records.decision.DecisionRecord`), LiteLLM spend logs, Azure's LLM inference traces,
Mooncake traces. Others need a field map: `prompt=FIELD,answer=FIELD`, optionally with asked,
cached, time and category.
"""

import csv
import io
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np

from gateway.records.decision_schema1 import as_schema_2
from planner.errors import PlanError
from planner.workload.distribution import cdf_from_json
from planner.workload.workload import Floats, Workload, from_cdf, from_lengths


class FieldMap(msgspec.Struct, frozen=True, kw_only=True):
    """Names of the fields that are read."""

    name: str
    prompt: str
    answer: str
    asked: str | None = None
    cached: str | None = None
    time: str | None = None
    time_unit_s: float = 1.0
    """Seconds per unit, for numeric times."""
    category: str | None = None
    outcome: str | None = None
    """A field that is `ok` for requests that were served."""
    marks: tuple[str, ...] = ()
    """Further fields that identify this format, besides prompt and answer."""


KNOWN: Final = (
    FieldMap(
        name="gateway log",
        prompt="usage.prompt_tokens",
        answer="usage.completion_tokens",
        asked="estimate.cap_tokens",
        cached="usage.cached_tokens",
        time="time_unix_s",
        category="estimate.category",
        outcome="outcome",
        marks=("schema", "outcome", "time_unix_s"),
    ),
    FieldMap(
        name="LiteLLM spend log",
        prompt="prompt_tokens",
        answer="completion_tokens",
        time="startTime",
        marks=("spend",),
    ),
    FieldMap(
        name="Azure trace",
        prompt="ContextTokens",
        answer="GeneratedTokens",
        time="TIMESTAMP",
    ),
    FieldMap(
        name="Mooncake trace",
        prompt="input_length",
        answer="output_length",
        time="timestamp",
        time_unit_s=0.001,
    ),
)

_MAP_FIX: Final = "name its fields: --fields prompt=FIELD,answer=FIELD[,asked=FIELD][,time=FIELD]"
_MAP_KEYS: Final = frozenset({"prompt", "answer", "asked", "cached", "time", "category"})


def parse_field_map(text: str) -> FieldMap:
    """Parse `prompt=in,answer=out,asked=max_tokens,cached=hit,time=at`, or raise PlanError."""
    given = dict(part.split("=", 1) for part in text.split(",") if "=" in part)
    if not {"prompt", "answer"} <= given.keys() <= _MAP_KEYS or len(given) != text.count(",") + 1:
        raise PlanError(f"--fields {text}", "write prompt=FIELD,answer=FIELD and no other names")
    return FieldMap(
        name="trace",
        prompt=given["prompt"],
        answer=given["answer"],
        asked=given.get("asked"),
        cached=given.get("cached"),
        time=given.get("time"),
        category=given.get("category"),
    )


def read_workload(text: str, *, name: str, fields: FieldMap | None = None) -> Workload:
    """Read a distribution (JSON) or a trace (CSV, JSON lines, a JSON list of objects)."""
    stripped = text.lstrip("\ufeff \t\r\n")
    if not stripped:
        raise PlanError(f"{name} is empty", "give a distribution or a trace with requests in it")
    records: Iterator[Mapping[str, Any]]
    if stripped[0] in "[{":
        document = _whole_json(stripped)
        if document is not None and not _is_records(document):
            return from_cdf(cdf_from_json(document), name=name)
        found = _json_lines(stripped, name) if document is None else iter(document)
        records = map(readable, found)
    else:
        records = _csv_records(stripped)
    return _from_records(records, name, fields)


def _whole_json(text: str) -> Any:
    try:
        document = msgspec.json.decode(text)
    except msgspec.DecodeError:
        return None
    # A line of JSON lines is also a valid JSON object.
    return [document] if isinstance(document, dict) and "cdf" not in document else document


def _is_records(document: Any) -> bool:
    return isinstance(document, list) and all(isinstance(item, dict) for item in document)


def _json_lines(text: str, name: str) -> Iterator[Mapping[str, Any]]:
    decoder = msgspec.json.Decoder(dict[str, Any])
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                record = decoder.decode(line)
            except msgspec.DecodeError:
                raise PlanError(
                    f"{name}, line {number} is not a JSON object", "remove or mend the line"
                ) from None
            # The gateway's log also has lines about token pools; they are not requests.
            if not {"schema", "event", "unix_s"} <= record.keys():
                yield record


def readable(record: Mapping[str, Any]) -> Mapping[str, Any]:
    """The record with the gateway log's sections added as dotted names (`usage.prompt_tokens`).

    Schemas 1 and 2 of the log then have the same names. Other records are returned unchanged.
    """
    if not {"schema", "outcome", "time_unix_s"} <= record.keys():
        return record
    found = dict(record)
    for name, section in as_schema_2(record).items():
        if isinstance(section, dict):
            found |= {f"{name}.{field}": value for field, value in section.items()}
    return found


def _csv_records(text: str) -> Iterator[Mapping[str, Any]]:
    return iter(csv.DictReader(io.StringIO(text)))


class _Request(NamedTuple):
    """One record; NaN for unknown values."""

    prompt: float
    answer: float
    asked: float
    cached: float
    time_s: float


def _from_records(
    records: Iterable[Mapping[str, Any]], name: str, fields: FieldMap | None
) -> Workload:
    found = fields
    requests: list[_Request] = []
    categories: list[str] = []
    skipped = 0
    for number, record in enumerate(records, 1):
        if found is None:
            found = _recognised(record, name)
        request = _request(record, found, name, number)
        if request is None:
            skipped += 1
        else:
            requests.append(request)
            if found.category is not None:
                categories.append(str(record.get(found.category)))
    if found is None or not requests:
        raise PlanError(
            f"{name} has no requests with both lengths", "give a trace with requests in it"
        )
    columns = np.array(requests, dtype=np.float64).T
    prompts, answers, asked, cached, times = columns
    return from_lengths(
        prompts,
        answers,
        name=name,
        source=found.name,
        asked=asked if np.isfinite(asked).any() else None,
        cached_share=_cached_share(prompts, cached) if found.cached is not None else None,
        rate_per_s=_rate(times),
        categories=tuple(categories) or None,
        notes=(f"{skipped} records without lengths were left out",) if skipped else (),
    )


def _request(
    record: Mapping[str, Any], fields: FieldMap, name: str, number: int
) -> _Request | None:
    """Read one request; None if it was not served."""
    if fields.outcome is not None and record.get(fields.outcome) != "ok":
        return None
    prompt = _number(record, fields.prompt, name, number)
    answer = _number(record, fields.answer, name, number)
    if prompt is None or answer is None:
        return None
    return _Request(
        prompt,
        answer,
        _optional(record, fields.asked),
        _optional(record, fields.cached),
        _time_s(record, fields),
    )


def _cached_share(prompts: Floats, cached: Floats) -> float:
    total = float(prompts.sum())
    return float(np.nansum(cached)) / total if total > 0 else 0.0


def _recognised(record: Mapping[str, Any], name: str) -> FieldMap:
    names = record.keys()
    for known in KNOWN:
        # The gateway omits absent values: a refused request has no lengths.
        required = known.marks if known.outcome else (known.prompt, known.answer, *known.marks)
        if all(field in names for field in required):
            return known
    listed = ", ".join(map(str, list(names)[:8]))
    raise PlanError(f"{name} has fields of no known trace ({listed})", _MAP_FIX)


def _number(record: Mapping[str, Any], field: str, name: str, number: int) -> float | None:
    value = record.get(field)
    if value is None or value == "":
        return None
    try:
        found = float(value)
    except (TypeError, ValueError):
        found = -1.0
    if not 0 <= found < 1e9:
        raise PlanError(
            f"{name}, record {number}: {field} is {value!r}", "lengths are numbers of tokens >= 0"
        )
    return found


def _optional(record: Mapping[str, Any], field: str | None) -> float:
    value = record.get(field) if field is not None else None
    try:
        return float(value) if value not in {None, ""} else float("nan")
    except (TypeError, ValueError):
        return float("nan")


def _time_s(record: Mapping[str, Any], fields: FieldMap) -> float:
    value = record.get(fields.time) if fields.time is not None else None
    if isinstance(value, int | float):
        return value * fields.time_unit_s
    if not isinstance(value, str) or not value:
        return float("nan")
    try:
        return float(value) * fields.time_unit_s
    except ValueError:
        pass
    try:
        # Azure writes seven digits of a second; Python parses at most six.
        whole, _, fraction = value.partition(".")
        return datetime.fromisoformat(f"{whole}.{fraction[:6]}" if fraction else whole).timestamp()
    except ValueError:
        return float("nan")


def _rate(times: Floats) -> float | None:
    known = times[np.isfinite(times)]
    span = float(np.ptp(known)) if known.size else 0.0
    return (known.size - 1) / span if span > 0 else None
