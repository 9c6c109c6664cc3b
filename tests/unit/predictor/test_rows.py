import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from predictor.rows import read_rows, row_of
from tests.unit.predictor.made import x_of

SCHEDULING: dict[str, Any] = {
    "expected_hit_tokens": 500,
    "backlog_tokens": 30,
    "worker_active": 10,
    "worker_kv_usage": 0.25,
    "prefill_s": 0.4,
}
RECORD: dict[str, Any] = {
    "schema": 2,
    "outcome": "ok",
    "model": "m",
    "pool": "short",
    "worker": "w0",
    "stream": True,
    "estimate": {"input_tokens": 2000, "output_tokens": 100},
    "usage": {"prompt_tokens": 1900},
    "scheduling": SCHEDULING,
}


def scheduled(**changes: Any) -> dict[str, Any]:
    """The record with other figures of the scheduler's; None takes one away."""
    found = {name: value for name, value in (SCHEDULING | changes).items() if value is not None}
    return RECORD | {"scheduling": found}


def lines(*records: object) -> list[bytes]:
    return [json.dumps(record).encode() for record in records]


def test_a_record_gives_what_the_router_saw() -> None:
    ((row,),) = read_rows(lines(RECORD)).rows.values()
    assert row.x == x_of(2000, 500, 30)
    assert (row.prefill_s, row.worker) == (0.4, "w0")


def test_a_compressed_prompt_is_as_long_as_the_engine_found_it() -> None:
    compressed = {"compressed": "2000->1900"}
    row = row_of(RECORD | {"compression": compressed})
    assert row is not None
    assert row.x[0] == 1900


@pytest.mark.parametrize("field", ["backlog_tokens", "worker_active", "prefill_s"])
def test_lines_that_lack_a_field_are_counted(field: str) -> None:
    without = [scheduled(**{field: value}) for value in (None, "x", -1)]
    found = read_rows(lines(RECORD, *without, RECORD | {"scheduling": "none"}))
    assert (found.lines, found.count, found.lacking) == (5, 1, 4)


def test_other_lines_are_counted_apart() -> None:
    found = read_rows(
        [
            *lines(
                RECORD,
                RECORD | {"outcome": "disconnected"},
                RECORD | {"outcome": "refused"},
                RECORD | {"pool": "long"},
                {"schema": 1, "event": "tick"},
                ["no record"],
            ),
            b"{not json",
            b"\n",
        ],
        model="m",
        pool="short",
    )
    assert (found.lines, found.count, found.other, found.unreadable) == (7, 2, 3, 2)
    assert list(found.rows) == [("m", "short")]


values: st.SearchStrategy[object] = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.just([])
)


@given(st.sampled_from(sorted(RECORD | SCHEDULING)), values)
def test_whatever_a_field_holds_a_row_is_finite_or_none(field: str, value: object) -> None:
    for record in (RECORD | {field: value}, scheduled(**{field: value})):
        row = row_of(record)
        if row is not None:
            assert 0 < row.prefill_s <= 3600
            assert all(-1 <= number < 1e12 for number in row.x)
