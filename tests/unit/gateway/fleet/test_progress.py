"""When an engine counts as frozen, and what does not make it so."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.fleet.fleet import Pending, Progress, allowed_s

STALL_S = 30.0


def attempt(sent_s: float = 0.0, allowed_s: float = 1.0) -> Pending:
    """Its owner is the count of its tokens."""
    tokens = [0]
    return Pending(tokens, sent_s, allowed_s, lambda: tokens[0])


def one() -> Progress:
    return Progress()


def looks(progress: Progress, from_s: float, to_s: float, every_s: float = 2.0) -> list[bool]:
    """Whether it was frozen at each look."""
    found, now_s = [], from_s
    while now_s <= to_s:
        progress.look(now_s)
        found.append(progress.frozen(STALL_S))
        now_s += every_s
    return found


def test_an_engine_that_gives_nobody_a_token_is_frozen_after_the_time_it_may_take() -> None:
    progress = one()
    progress.begin(attempt(sent_s=0.0, allowed_s=5.0))
    found = looks(progress, 0.0, 60.0)
    # Five seconds that the request may take, thirty of silence and those five again.
    assert found.index(True) * 2.0 == 42.0
    assert progress.waiting()


def test_a_long_prefill_is_waited_for() -> None:
    progress = one()
    progress.begin(attempt(allowed_s=allowed_s(100_000, 0, 0.0)))
    assert not any(looks(progress, 0.0, 200.0))


@pytest.mark.parametrize("whole", [False, True])
def test_a_deep_queue_that_moves_is_not_frozen(whole: bool) -> None:
    """Others' tokens show that the engine computes, and so do their answers."""
    progress = one()
    waiting, running = attempt(), attempt()
    progress.begin(waiting)
    progress.begin(running)
    for second in range(0, 600, 2):
        if second % 20 == 0 and whole:
            progress.end(running, answered=True)
            progress.begin(running := attempt(sent_s=float(second)))
        elif second % 20 == 0:
            running.owner[0] += 1
        progress.look(float(second))
        assert not progress.frozen(STALL_S)


def test_silence_adds_up_over_clients_that_give_up() -> None:
    progress, now_s, frozen = one(), 0.0, []
    for _ in range(12):
        asked = attempt(sent_s=now_s)
        progress.begin(asked)
        for _ in range(4):
            now_s += 2.0
            progress.look(now_s)
        frozen.append(progress.frozen(STALL_S))
        progress.end(asked, answered=False)
        progress.look(now_s)
        assert not progress.frozen(STALL_S), "nobody waits: it may be tried"
    assert frozen.index(True) == 4, "7 s of 8 count from each"
    assert all(frozen[4:]), "until it shows some progress"
    last = attempt(sent_s=now_s)
    progress.begin(last)
    last.owner[0] = 1
    assert progress.look(now_s + 2.0)
    assert progress.silent_s == 0.0


@given(st.lists(st.floats(0.0, 1.0), max_size=200))
def test_a_client_that_leaves_early_leaves_no_mark(waits_s: list[float]) -> None:
    progress, now_s = one(), 0.0
    for wait_s in waits_s:
        asked = attempt(sent_s=now_s, allowed_s=1.0)
        progress.begin(asked)
        now_s += wait_s
        progress.look(now_s)
        progress.end(asked, answered=False)
        assert progress.silent_s < 1e-6


def test_what_this_process_stood_still_counts_for_nobody() -> None:
    progress = one()
    progress.begin(attempt())
    progress.look(0.0)
    progress.look(100.0, late_s=99.0)
    assert progress.silent_s <= 1.0
