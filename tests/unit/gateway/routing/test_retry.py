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


@pytest.mark.parametrize("kind", ["reset", "timeout", "protocol", "server_error"])
def test_what_may_have_run_is_not_sent_twice_when_that_is_unsafe(kind: FaultKind) -> None:
    assert step(kind, repeatable=False) == "give_up"


@pytest.mark.parametrize("kind", ["busy", "connect"])
def test_what_did_not_run_is_sent_again_even_then(kind: FaultKind) -> None:
    assert step(kind, repeatable=False) == "retry"


@pytest.mark.parametrize("kind", ["overflow", "empty"])
def test_an_overflow_goes_to_the_larger_window_whatever_was_spent(kind: FaultKind) -> None:
    assert step(kind, sent=3) == "rescue"


@pytest.mark.parametrize("kind", ["reset", "timeout", "protocol", "server_error"])
def test_broken_exchanges_hurt_a_workers_health(kind: FaultKind) -> None:
    assert Fault(kind=kind, message="").hurts_health


@pytest.mark.parametrize("kind", ["busy", "overflow", "empty", "connect", "local"])
def test_busy_and_overflow_do_not_hurt_it(kind: FaultKind) -> None:
    assert not Fault(kind=kind, message="").hurts_health
