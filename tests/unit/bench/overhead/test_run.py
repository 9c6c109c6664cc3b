"""Which rounds of bench overhead count, its ratios, and the search for the highest step."""

from pathlib import Path

import msgspec

from bench.overhead.field import EMBEDDED, ROUTER
from bench.overhead.run import Case, Round, counting, ratios_of
from bench.overhead.run import rows_of as case_rows

WHOLE = Case("whole", Path("whole.json"), "whole", 64)


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
