"""Which rounds of bench overhead count, its ratios, and the search for the highest step."""

from pathlib import Path

import msgspec
import pytest

from bench.common.tools import MARK, Figures, bodies
from bench.overhead.field import EMBEDDED, ROUTER
from bench.overhead.rate import LADDER, MAX_ADDED_US, highest, rows_of, step_holds
from bench.overhead.rounds import ROUNDS, Case, Round, counting, enough, ratios_of
from bench.overhead.rounds import rows_of as case_rows

WHOLE = Case("whole", Path("whole.json"), "whole", 64)
STEP: Figures = {
    "streams": 100,
    "chunks_per_s": 4000,
    "offered_per_s": 4000,
    "errors": 0,
    "added_p99_us": 900.0,
    "cores": 0.2,
    "machine_cores": 0.5,
}


def round_of(us: float, utilisation: float = 0.95, errors: float = 0.0) -> Round:
    """The gateway at `us`, the router at 100 us and far from saturated."""
    common = {"rps": 1.0, "gap_p50_us": 1.0, "gap_p99_us": 1.0}
    ours = {"us": us, "utilisation": utilisation, "errors": errors, **common}
    return {EMBEDDED: ours, ROUTER: {"us": 100.0, "utilisation": 0.4, "errors": 0.0, **common}}


def test_rounds_in_which_the_gateway_was_idle_do_not_count_for_it() -> None:
    rounds = [round_of(150.0), round_of(90.0, utilisation=0.89)]
    assert counting(WHOLE, rounds, EMBEDDED) == rounds[:1]
    assert counting(WHOLE, rounds, ROUTER) == rounds
    for free in ({"rate": 500.0}, {"saturates": False}):
        assert counting(msgspec.structs.replace(WHOLE, **free), rounds, EMBEDDED) == rounds


def test_rounds_go_on_until_enough_count() -> None:
    rounds = [round_of(150.0)] * ROUNDS
    assert enough(WHOLE, rounds)
    assert not enough(WHOLE, [*rounds[:-1], round_of(150.0, utilisation=0.5)])


def test_a_ratio_is_the_median_of_the_ratios_of_the_rounds_that_count() -> None:
    rounds = [round_of(us) for us in (110.0, 190.0, 150.0)] + [round_of(1.0, utilisation=0.1)]
    assert ratios_of(WHOLE, rounds, EMBEDDED) == [1.1, 1.9, 1.5]
    row = case_rows({"whole": (WHOLE, rounds)})[0]
    assert (row.measured, row.ratio) == (150.0, 1.5)


def test_the_gateways_errors_are_not_allowed_and_a_peers_are() -> None:
    rounds = [round_of(150.0, errors=1.0)]
    assert case_rows({"whole": (WHOLE, rounds)})[-1].holds is False
    rounds[0][ROUTER]["errors"], rounds[0][EMBEDDED]["errors"] = 1.0, 0.0
    assert case_rows({"whole": (WHOLE, rounds)})[-1].holds


def test_one_that_was_never_saturated_has_no_figure() -> None:
    row = case_rows({"whole": (WHOLE, [round_of(150.0, utilisation=0.1)])})[0]
    assert row.measured is None
    assert "never saturated" in row.note


@pytest.mark.parametrize("most", [0, LADDER[0], 777, LADDER[-1]])
def test_the_highest_step_that_holds_is_found(most: int) -> None:
    asked: list[int] = []

    def holds(streams: int) -> bool:
        asked.append(streams)
        return streams <= most

    expected = max((step for step in LADDER if step <= most), default=None)
    assert highest(LADDER, holds) == expected
    assert len(asked) <= 4


def test_a_step_holds_without_errors_loss_and_delay() -> None:
    assert step_holds(STEP)
    assert not step_holds({**STEP, "errors": 1})
    assert not step_holds({**STEP, "chunks_per_s": 3700})
    assert not step_holds({**STEP, "added_p99_us": MAX_ADDED_US + 1})


def test_chunks_per_core_and_cores_for_the_fleet() -> None:
    rows = rows_of("x", STEP, STEP)
    assert [row.measured for row in rows] == [20_000, pytest.approx(7.68), 20_000]
    assert [row.measured for row in rows_of("x", None, STEP)] == [None, 20_000]


def test_bodies_share_half_their_text(tmp_path: Path) -> None:
    files = bodies(tmp_path, "m", text_bytes=200_000 - 150, max_tokens=7)
    for file in files.values():
        text = file.read_text()
        assert len(text) == pytest.approx(200_000, rel=0.01)
        assert text.index(MARK) == pytest.approx(100_000, rel=0.01)
        assert '"max_tokens": 7' in text
