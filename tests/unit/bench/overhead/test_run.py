"""Which rounds of bench overhead count, its ratios, and the search for the highest step."""

from pathlib import Path

import pytest

from bench.common.report import at_most
from bench.common.tools import MARK, Figures, bodies
from bench.overhead.contenders import EMBEDDED, ROUNDS, ROUTER
from bench.overhead.rate import LADDER, MAX_ADDED_US, highest, rate_rows, step_holds
from bench.overhead.rounds import CONNECTIONS, Round, counting, enough
from bench.overhead.rows import ratio
from bench.overhead.streams import streams_rows
from bench.overhead.variants import MANY, VARIANTS, Variant, variant_rows
from bench.overhead.variants import counting as variant_counting

STEP: Figures = {
    "streams": 100,
    "chunks_per_s": 4000,
    "offered_per_s": 4000,
    "errors": 0,
    "added_p99_us": 900.0,
    "cores": 0.2,
    "machine_cores": 0.5,
}


def round_of(cpu_us: float, utilisation: float = 0.95) -> Round:
    """The gateway at `cpu_us`, the router at 100 us and far from saturated."""
    found: Round = {}
    for name, cost, busy in ((EMBEDDED, cpu_us, utilisation), (ROUTER, 100.0, 0.4)):
        found[name] = {}
        for kind in ("whole", "stream"):
            found[name] |= {f"{kind}_cpu_us": cost, f"{kind}_utilisation": busy}
    return found


def test_rounds_in_which_the_gateway_was_idle_do_not_count_for_it() -> None:
    rounds = [round_of(150.0), round_of(90.0, utilisation=0.89)]
    assert counting(rounds, EMBEDDED, "whole_cpu_us") == rounds[:1]
    assert counting(rounds, EMBEDDED, "added_whole_p50_us") == rounds
    assert counting(rounds, ROUTER, "whole_cpu_us") == rounds


def test_rounds_go_on_until_enough_count() -> None:
    rounds = [round_of(150.0)] * ROUNDS
    assert enough(rounds)
    assert not enough([*rounds[:-1], round_of(150.0, utilisation=0.5)])


def test_a_ratio_is_the_median_of_the_ratios_of_the_rounds_that_count() -> None:
    rounds = [round_of(us) for us in (110.0, 190.0, 170.0, 150.0, 120.0)] * ROUNDS
    row = ratio(
        [*rounds, round_of(1.0, utilisation=0.1)],
        (EMBEDDED, ROUTER),
        "whole_cpu_us",
        EMBEDDED,
        1.5,
        at_most,
    )
    assert row.measured == pytest.approx(1.5)
    assert row.holds


def test_too_few_rounds_do_not_hold() -> None:
    few = [round_of(110.0)] * (ROUNDS - 1)
    pair = (EMBEDDED, ROUTER)
    assert ratio(few, pair, "whole_cpu_us", EMBEDDED, 1.5, at_most).holds is False
    none = ratio([round_of(110.0, 0.1)], pair, "whole_cpu_us", EMBEDDED, 1.5, at_most)
    assert (none.measured, none.holds, none.target) == (None, False, "<= 1.5")


def test_variants_do_not_repeat_the_main_rounds() -> None:
    assert len(set(VARIANTS)) == len(VARIANTS) == 13
    assert Variant(0, 2, CONNECTIONS["whole"]) not in VARIANTS
    assert Variant(64, 2, CONNECTIONS["stream"]) not in VARIANTS
    assert {v.in_flight for v in VARIANTS if v.connections == MANY} == set(CONNECTIONS.values())


def test_one_connection_counts_unsaturated_and_more_do_not() -> None:
    rounds: list[Round] = [{EMBEDDED: {"utilisation": 0.4}}]
    assert variant_counting(Variant(0, 2, 1), rounds, EMBEDDED) == rounds
    assert variant_counting(Variant(0, 2, MANY), rounds, EMBEDDED) == []


def test_the_gateways_errors_in_variants_are_not_allowed() -> None:
    figures = {"cpu_us": 1.0, "utilisation": 1.0, "rps": 1.0, "errors": 1.0}
    rows = variant_rows({VARIANTS[0]: [{EMBEDDED: figures, "nginx": figures}]})
    assert (rows[-1].measured, rows[-1].holds) == (1.0, False)


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
    rows = rate_rows("x", STEP, STEP)
    assert [row.measured for row in rows] == [20_000, pytest.approx(7.68), 20_000]
    assert [row.measured for row in rate_rows("x", None, STEP)] == [None, 20_000]


def test_bodies_share_half_their_text(tmp_path: Path) -> None:
    files = bodies(tmp_path, "m", text_bytes=200_000 - 150, max_tokens=7)
    for file in files.values():
        text = file.read_text()
        assert len(text) == pytest.approx(200_000, rel=0.01)
        assert text.index(MARK) == pytest.approx(100_000, rel=0.01)
        assert '"max_tokens": 7' in text


def test_streams_are_compared_within_their_rounds() -> None:
    rounds = [
        {"errors": 0.0, "sluice 32": 12.0, "sglang-router 32": 10.0, "sluice 120": 30.0}
        | {"sglang-router 120": 10.0},
        {"errors": 0.0, "sluice 32": 22.0, "sglang-router 32": 20.0, "sluice 120": 15.0}
        | {"sglang-router 120": 10.0},
    ]
    rows = {r.metric: r for r in streams_rows(rounds, ["sluice", "sglang-router"])}
    near = rows["sluice: CPU-us of a chunk, 32 streams, over sglang-router"]
    far = rows["sluice: CPU-us of a chunk, 120 streams, over sglang-router"]
    assert near.measured == pytest.approx(1.15)
    assert (near.holds, far.holds) == (True, False)
    assert rows["sluice: CPU-us of a chunk, 120 streams"].measured == 22.5
