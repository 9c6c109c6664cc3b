"""Logs of schema 1 are read as schema 2; nothing of them is lost."""

from typing import Any

import msgspec

from gateway.records.decision import DecisionRecord
from gateway.records.decision_schema1 import PATHS, as_schema_2

TOP = {"schema": 1, "time_unix_s": 1.0, "request_id": "r", "endpoint": "chat", "outcome": "ok"}


def test_every_field_of_schema_1_has_its_place() -> None:
    for section, name in PATHS.values():
        known = msgspec.structs.fields(DecisionRecord)
        (found,) = (field for field in known if field.name == section)
        assert name in found.type.__struct_fields__, (section, name)
    assert len(set(PATHS.values())) == len(PATHS)


def test_a_line_of_schema_1_becomes_a_record() -> None:
    line: dict[str, Any] = TOP | {
        "status": 200,
        "pool": "short",
        "planned_pool": "short",
        "plan_reason": "fits",
        "estimated_input_tokens": 10,
        "prompt_tokens": 9,
        "usage_source": "engine",
        "ttft_s": 0.5,
        "lease_id": "l",
        "attempts": [{"pool": "short", "worker": "w", "result": "ok"}],
    }
    record = msgspec.convert(as_schema_2(line), DecisionRecord)
    assert (record.schema, record.pool, record.attempts[0].worker) == (2, "short", "w")
    assert (record.plan.pool, record.plan.reason) == ("short", "fits")
    assert (record.estimate.input_tokens, record.usage.prompt_tokens) == (10, 9)
    assert (record.usage.source, record.timing.ttft_s) == ("engine", 0.5)
    assert record.admission.lease_id == "l"


def test_lines_of_schema_2_and_pool_events_are_left_as_they_are() -> None:
    new = TOP | {"schema": 2, "usage": {"prompt_tokens": 1}}
    event = {"schema": 1, "event": "tick", "model": "m", "unix_s": 1.0}
    assert as_schema_2(new) is new
    assert as_schema_2(event) is event
