"""The ground that bench quartz-loads maps, and how its cells are judged."""

import pytest

from bench.quartz_loads import DEFAULT, OTHERS, Cell, Seen, misses, run_task
from bench.quartz_loads_scenes import HEAVY, SCENES, knee

CELL = Cell(scene="Mixed", workers=4, load=0.5)


def seen(p50_s: float = 0.2, p99_s: float = 1.0, violations: float = 0.0) -> Seen:
    return Seen(
        p50_s=p50_s,
        p90_s=p50_s,
        p99_s=p99_s,
        violations=violations,
        others_violations=violations,
        hits=50.0,
        tokens_per_s=1.0,
    )


@pytest.mark.parametrize("scene", SCENES)
def test_a_scene_repeats_by_seed_and_grows_with_the_fleet(scene: str) -> None:
    few, again = (SCENES[scene](1, knee(scene, 4), 4, 200, None) for _ in range(2))
    many = SCENES[scene](1, knee(scene, 16), 16, 200, None)
    assert few == again
    assert many[-1].arrival_s < few[-1].arrival_s
    assert (scene == "Heavy client") == any(d.client == HEAVY for d in few)


@pytest.mark.parametrize(
    ("mine", "missed"),
    [
        ([seen(), seen()], []),
        ([seen(p99_s=1.04), seen(p99_s=1.04)], []),
        ([seen(p99_s=2.0), seen(p99_s=2.1)], ["p99_s"]),
        ([seen(p99_s=1.0), seen(p99_s=3.0)], []),
        ([seen(violations=2.0), seen(violations=2.1)], ["violations"]),
        ([seen(violations=0.9), seen(violations=0.9)], []),
    ],
    ids=["equal", "50 ms", "worse", "worse by chance", "violations", "a point"],
)
def test_a_cell_is_missed_where_another_is_surely_better(
    mine: list[Seen], missed: list[str]
) -> None:
    found = {(CELL, other): [seen(), seen()] for other in OTHERS}
    found[CELL, DEFAULT] = mine
    assert [miss.field for miss in misses(found, CELL)] == missed


def test_policies_are_run_on_the_same_requests() -> None:
    found = run_task((CELL, 0, ("least-loaded", "least-loaded"), None))
    assert found[0] == found[1]
    assert found[0].hits > 0
