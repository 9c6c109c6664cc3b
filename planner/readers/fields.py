"""The fields of a trace's records: of formats that are recognised, or by a field map.

Known formats are recognised by the fields of their first record: the gateway's request log
(`gateway.records.decision.DecisionRecord`), LiteLLM spend logs, Azure's LLM inference traces,
Mooncake traces. Others need a field map: `prompt=FIELD,answer=FIELD`, optionally with asked,
cached, time and category.
"""

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from planner.errors import PlanError


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

    @property
    def required(self) -> tuple[str, ...]:
        """Fields of every record; a refused request of the gateway's log has no lengths."""
        return self.marks if self.outcome else (self.prompt, self.answer, *self.marks)


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


def readable(record: Mapping[str, Any]) -> Mapping[str, Any]:
    """The record with the gateway log's sections added as dotted names (`usage.prompt_tokens`).

    Other records are returned unchanged.
    """
    if not {"schema", "outcome", "time_unix_s"} <= record.keys():
        return record
    flat = dict(record)
    for name, section in record.items():
        if isinstance(section, dict):
            flat |= {f"{name}.{field}": value for field, value in section.items()}
    return flat


def recognised(record: Mapping[str, Any], name: str) -> FieldMap:
    """The known format of a record; raises PlanError if there is none."""
    for known in KNOWN:
        if all(field in record for field in known.required):
            return known
    listed = ", ".join(map(str, list(record)[:8]))
    raise PlanError(f"{name} has fields of no known trace ({listed})", _MAP_FIX)
