"""A rank's KV load from the answers' streams, and the step that it grows by in between."""

import pytest

from gateway.scheduling.rank_group import (
    FIRST_STEP_S,
    RankLoad,
    StepClock,
    streamed,
)
from gateway.scheduling.scheduler import Job


def job(prompt: int, *, emitted: int | None = 0, sequences: int = 1, sent_s: float = 0.0) -> Job:
    made = Job(
        owner=None, prompt_tokens=prompt, output_tokens=50, arrived_s=0.0, sequences=sequences
    )
    made.sent_s = sent_s
    if emitted is not None:
        made.emitted = lambda: emitted
    return made


def test_between_counts_every_sequence_grows_by_a_token_a_step() -> None:
    rank = RankLoad(StepClock())
    rank.tokens(1.0)  # counted
    rank.add(job(100), 1.0)
    rank.add(job(50, sequences=3), 1.0)
    assert rank.tokens(1.0 + 2 * FIRST_STEP_S) == pytest.approx(150 + 2 * 4)


def test_who_leaves_takes_prompt_and_answer_along() -> None:
    rank = RankLoad(StepClock())
    first, second = job(100, emitted=40), job(10, emitted=5)
    rank.add(first, 1.0)
    rank.add(second, 1.0)
    assert rank.tokens(2.0) == 155
    rank.remove(first, 2.0)
    assert rank.tokens(2.0) == 15
    rank.remove(second, 2.0)
    assert (rank.tokens(2.0), rank.sequences, len(rank.jobs)) == (0, 0, 0)


def test_telemetry_adds_what_others_sent_and_takes_nothing_away() -> None:
    rank = RankLoad(StepClock())
    rank.add(job(100), 1.0)
    for _ in range(200):
        rank.observe(1100.0, 1.0)
    assert rank.tokens(1.0) == pytest.approx(1100, abs=1)
    for _ in range(200):
        rank.observe(50.0, 1.0)  # shared prefixes are counted once there
    assert rank.tokens(1.0) == 100


def test_the_step_is_learned_from_answers_and_not_from_short_ones() -> None:
    clock = StepClock()
    clock.ended(2, 100.0)
    assert clock.step_s == FIRST_STEP_S
    clock.ended(100, 1.0)
    assert clock.step_s == pytest.approx(0.01)
    clock.ended(100, 3.0)
    assert 0.01 < clock.step_s < 0.03


def test_an_answer_that_is_not_streamed_grows_with_time_up_to_what_is_expected() -> None:
    silent = job(10, emitted=None, sent_s=5.0)
    assert streamed(silent, 5.0 + 20 * 0.01, 0.01) == pytest.approx(20, abs=1)
    assert streamed(silent, 100.0, 0.01) == 50
