"""The step after a fault, as long as no byte has reached the client."""

import pytest

from gateway.routing.retry import Fault, FaultKind, Step, next_step


def step(
    kind: FaultKind,
    *,
    sent: int = 1,
    max_attempts: int = 3,
    repeatable: bool = True,
    larger_pool: bool = True,
) -> Step:
    return next_step(
        Fault(kind=kind, message=""),
        sent=sent,
        max_attempts=max_attempts,
        repeatable=repeatable,
        larger_pool=larger_pool,
    )


BROKEN: list[FaultKind] = ["reset", "timeout", "protocol", "server_error", "busy"]


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_attempt_is_tried_elsewhere_until_the_attempts_are_used_up(
    kind: FaultKind,
) -> None:
    assert [step(kind, sent=n) for n in (1, 2, 3)] == ["retry", "retry", "give_up"]


def test_refused_connections_are_free() -> None:
    assert step("connect", sent=3) == "retry"


def test_who_waited_at_a_frozen_engine_is_sent_on_whatever_was_tried() -> None:
    assert step("frozen", sent=3) == "retry"


def test_without_an_open_file_no_other_worker_is_asked() -> None:
    assert step("local") == "give_up"


@pytest.mark.parametrize("kind", ["reset", "timeout", "protocol", "server_error"])
def test_what_may_have_run_is_not_sent_twice_when_that_is_unsafe(kind: FaultKind) -> None:
    assert step(kind, repeatable=False) == "give_up"


@pytest.mark.parametrize("kind", ["busy", "connect"])
def test_what_did_not_run_is_sent_again_even_then(kind: FaultKind) -> None:
    assert step(kind, repeatable=False) == "retry"


@pytest.mark.parametrize("kind", ["overflow", "empty"])
def test_an_overflow_goes_to_the_larger_window_whatever_was_spent(kind: FaultKind) -> None:
    assert step(kind, sent=3) == "rescue"


@pytest.mark.parametrize("kind", ["overflow", "empty"])
def test_an_overflow_of_the_largest_window_is_the_answer(kind: FaultKind) -> None:
    assert step(kind, larger_pool=False) == "give_up"


@pytest.mark.parametrize("kind", ["reset", "timeout", "protocol", "server_error"])
def test_broken_exchanges_hurt_a_workers_health(kind: FaultKind) -> None:
    assert Fault(kind=kind, message="").hurts_health


@pytest.mark.parametrize("kind", ["busy", "overflow", "empty", "connect", "local"])
def test_busy_and_overflow_do_not_hurt_it(kind: FaultKind) -> None:
    assert not Fault(kind=kind, message="").hurts_health
