from typing import Literal

import pytest
from msgspec import Raw

from gateway.fleet import engine_telemetry
from gateway.fleet.engine_telemetry import EngineSample, TelemetryView
from gateway.fleet.fleet import PoolState, unreachable
from gateway.routing.routing import CompressionRules, has_room, promised, requested


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("echo", b"true", "echo"),
        ("echo", b"false", ""),
        ("return_token_ids", b"true", "echo"),
        ("suffix", b'"end"', "suffix"),
        ("suffix", b'""', ""),
        ("prompt_logprobs", b"0", "prompt_logprobs"),
        ("prompt_logprobs", b"null", ""),
        ("continue_final_message", b"true", "prefill"),
        ("cache_control", b'{"type":"ephemeral"}', "cache_control"),
        ("logprobs", b"true", ""),
    ],
)
def test_members_that_promise_the_prompt_as_it_is(name: str, value: bytes, reason: str) -> None:
    assert promised({"model": Raw(b'"m"'), name: Raw(value)}) == reason


@pytest.mark.parametrize(
    ("when", "header", "may"),
    [
        ("asked", None, True),
        ("asked", True, True),
        ("asked", False, False),
        ("any", None, True),
        ("any", False, False),
        ("header", None, False),
        ("header", True, True),
        ("header", False, False),
    ],
)
def test_the_header_forbids_everywhere_and_is_needed_only_where_the_model_says_so(
    when: Literal["asked", "any", "header"], header: bool | None, may: bool
) -> None:
    assert requested(CompressionRules(when=when), header=header) is may


def pool(inflight: int) -> PoolState:
    state = PoolState("long", ("a", "b"), 4)
    state.inflight = inflight
    return state


def test_a_pool_has_room_while_a_slot_is_free() -> None:
    assert has_room(pool(7), None, 0.0)
    assert not has_room(pool(8), None, 0.0)


def test_slots_of_engines_that_are_gone_are_no_room() -> None:
    state = pool(4)
    unreachable(state, 1)
    assert not has_room(state, None, 0.0)


def test_what_other_gateways_run_counts_while_the_reading_is_fresh() -> None:
    view = TelemetryView(2)
    for worker in range(2):
        sample = EngineSample(running=3.0, waiting=1.0)
        engine_telemetry.record(view, worker, sample, 100.0)
    assert not has_room(pool(0), view, 101.0)
    assert has_room(pool(0), view, 100.0 + engine_telemetry.STALE_S + 1)
