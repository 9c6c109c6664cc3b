"""The saturated group in virtual time: small runs of the real thing, and what a report says."""

import pytest

from bench.bfio.live import virtual_rows
from bench.bfio.run import CLIENTS, RANKS, SCHEDULERS, SLOTS, Measured, measure


@pytest.fixture(scope="module")
def found() -> dict[str, Measured]:
    return {name: measure(make, 0, steps=700, warm_up=200) for name, make in SCHEDULERS.items()}


def test_balanced_ranks_serve_more(found: dict[str, Measured]) -> None:
    ours = found["bfio"]
    for name in ("least-KV, late", "least-loaded, at once", "round-robin"):
        assert ours.tokens_per_s > 1.02 * found[name].tokens_per_s, name
        assert ours.imbalance_tokens < 0.7 * found[name].imbalance_tokens, name


def test_nobody_is_lost_and_the_line_is_as_long_as_the_clients_without_a_slot(
    found: dict[str, Measured],
) -> None:
    for one in found.values():
        assert one.lost == 0
    # One more than its slots goes to each rank; an answer's client asks again at once.
    assert found["bfio"].most_waiting == CLIENTS - RANKS * (SLOTS + 1)
    assert found["round-robin"].most_waiting == 0


def test_targets_are_kept_when_they_are_told_and_ranks_stay_balanced(
    found: dict[str, Measured],
) -> None:
    told = measure(SCHEDULERS["bfio"], 0, steps=700, warm_up=200, tell_targets=True)
    assert told.kept > 0.9 > 0.5 > found["bfio"].kept
    assert told.imbalance_tokens < 1.3 * found["bfio"].imbalance_tokens


def measured(tokens_per_s: float, *, wait: float = 0.0, lost: int = 0) -> Measured:
    return Measured(
        tokens_per_s=tokens_per_s,
        step_s=0.008,
        imbalance_tokens=2e4,
        longest_wait_steps=wait,
        kept=0.0,
        others_wait_s=1.0,
        most_waiting=9,
        lost=lost,
    )


def test_gains_are_of_the_same_seed_and_held_against_their_targets() -> None:
    runs = {
        "bfio": [measured(110, wait=300), measured(220)],
        "least-KV, late": [measured(100, wait=100), measured(200)],
        "least-loaded, at once": [measured(105), measured(210)],
        "round-robin": [measured(100), measured(200, lost=1)],
    }
    rows = {row.metric: row for row in virtual_rows(runs)}
    assert rows["virtual: gain over round-robin, %"].measured == pytest.approx(10)
    assert rows["virtual: gain over round-robin, %"].holds
    assert rows["virtual: gain over least-loaded, at once, %"].holds is False
    assert rows["virtual: bfio, longest wait, steps"].holds
    assert rows["virtual: requests lost"].holds is False
