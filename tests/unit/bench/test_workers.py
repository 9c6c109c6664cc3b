"""Which rounds count, how the load is found, what is compared with what; no processes."""

import pytest

from bench.workers import FOUND, POINTS, half_row, ratio_row
from bench.workers_busy import BUSY, ONE, ONE_CORE, TWO, NearOne, counting
from bench.workers_peers import Cost, pair_row
from bench.workers_rounds import Point, Seen


def seen(cpu_us: float, *, cores: float = 1, served: float = 1, lost: float = 1) -> Seen:
    return Seen(
        cpu_us=cpu_us, sent=1, errors=0, logged=1, counted=1, share=0.5,
        first_p50_us=1, first_p99_us=2, cores=cores, offered=1, served=served, caches_lost=lost,
    )  # fmt: skip


def turn(one: Seen, two: Seen) -> dict[str, Seen]:
    return {ONE: one, TWO: two}


def test_the_ratio_is_taken_within_rounds() -> None:
    rounds = [turn(seen(100), seen(105)), turn(seen(200), seen(300)), turn(seen(400), seen(420))]
    row = ratio_row(BUSY, rounds, TWO, 1.1)
    assert (row.measured, row.holds) == (1.05, True)
    assert ratio_row(BUSY, rounds[1:2], TWO, 1.1).holds is False
    assert ratio_row(BUSY, rounds, TWO, None).holds is None


@pytest.mark.parametrize("point", FOUND)
def test_rounds_count_where_one_is_busy_all_keep_up_and_nobody_takes_the_caches(
    point: Point,
) -> None:
    counts = turn(seen(100, cores=0.9), seen(150, cores=1.2))
    idle = turn(seen(100, cores=0.89), seen(100))
    late = turn(seen(100, served=0.97), seen(100))
    late_too = turn(seen(100), seen(100, served=0.97))
    disturbed = turn(seen(100), seen(100, lost=4.1))
    assert counting([idle, counts, late, late_too, disturbed]) == [counts]
    row = ratio_row(point, [idle, counts, late], TWO, 1.1)
    assert row.measured == 1.5
    assert "1 of 3 rounds count, the median of all 1.00" in row.note
    assert "one worker at 0.90 of a core, two workers at 1.20" in row.note
    assert ratio_row(point, [idle, late], TWO, 1.1).holds is False
    assert ratio_row(POINTS[0], [idle, idle], TWO, None).measured == 1.0


def test_the_next_load_takes_one_worker_near_its_core() -> None:
    near = NearOne(ONE_CORE)
    near.saw(seen(235, cores=0.47, served=2000))
    assert near.point == Point("whole", 4000, one_core=True)
    near.saw(seen(235, cores=0.94, served=3900))  # which was all it could
    assert near.point.rate == 3900
    near.saw(seen(100, cores=0.1, served=1000))
    assert near.point.rate == 2000  # not ten times as much at once


def test_two_workers_beside_one_under_half_of_their_load() -> None:
    rounds = {
        Point("whole", 1000.0): [turn(seen(280), seen(400)), turn(seen(300), seen(400))],
        Point("whole", 2000.0): [turn(seen(250), seen(308)), turn(seen(250), seen(300))],
    }
    row = half_row(rounds, 1000.0, 2000.0)
    assert row.measured == pytest.approx(1.05)  # 308 over 280, 300 over 300
    assert row.holds is None


def test_two_of_a_peer_beside_one() -> None:
    pairs = [[cost(100), cost(130)], [cost(200), cost(220, errors=1)], [cost(100), cost(120)]]
    row = pair_row("nginx", 2000.0, pairs)
    assert row.measured == pytest.approx(1.2)
    assert row.holds is None  # nobody asks it of a peer
    assert "130 and 100 us" in row.note
    assert "1 errors" in row.note


def cost(cpu_us: float, errors: int = 0) -> Cost:
    return Cost(cpu_us=cpu_us, cores=0.5, served=2000, errors=errors)
