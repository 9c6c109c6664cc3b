"""The ground that bench quartz loads maps, and how its cells are judged."""

import math

import numpy as np
import pytest

from bench.quartz.lab import LabFigures
from bench.quartz.loads import (
    DEFAULT,
    OTHERS,
    SCENES,
    LoadCell,
    completed_per_s,
    experiment,
    knee,
    misses,
    run_task,
)
from bench.quartz.workloads import HEAVY

CELL = LoadCell(scene="Mixed", workers=4, load=0.5)


def seen(p50_s: float = 0.2, p99_s: float = 1.0, violations: float = 0.0) -> LabFigures:
    values = dict.fromkeys(LabFigures.__struct_fields__, 0.5)
    return LabFigures(**{**values, "p50_s": p50_s, "p99_s": p99_s, "violations": violations})


@pytest.mark.parametrize("scene", SCENES)
def test_a_scene_repeats_by_seed_and_grows_with_the_fleet(scene: str) -> None:
    few, again = (SCENES[scene](1, knee(scene, 4), 4, 200, None) for _ in range(2))
    many = SCENES[scene](1, knee(scene, 16), 16, 200, None)
    assert few == again
    assert many[-1].arrival_s < few[-1].arrival_s
    assert (scene == "Heavy client") == any(d.client == HEAVY for d in few)


JUDGED = {
    "50 ms": ([seen(p99_s=1.04), seen(p99_s=1.04)], []),
    "worse": ([seen(p99_s=2.0), seen(p99_s=2.1)], ["p99_s"]),
    "worse by chance": ([seen(p99_s=1.0), seen(p99_s=3.0)], []),
    "violations": ([seen(violations=0.02), seen(violations=0.021)], ["violations"]),
    "a point": ([seen(violations=0.009), seen(violations=0.009)], []),
    "worse, one seed": ([seen(p99_s=2.0)], ["p99_s"]),
    "unknown": ([seen(p99_s=math.nan), seen()], ["p99_s"]),
}


@pytest.mark.parametrize(("mine", "missed"), JUDGED.values(), ids=JUDGED)
def test_a_cell_is_missed_where_another_is_surely_better(
    mine: list[LabFigures], missed: list[str]
) -> None:
    found = {(CELL, other): [seen()] * len(mine) for other in OTHERS}
    found[CELL, DEFAULT] = mine
    assert [miss.field for miss in misses(found, CELL)] == missed


def test_what_is_completed_beyond_the_knee_is_less_than_what_is_offered() -> None:
    scene, rate = SCENES["RAG"], knee("RAG", 4)
    calm, crowded = (
        completed_per_s(scene(0, offered, 4, 1500, None), "FIFO-LL", 4, 0)
        for offered in (rate / 2, rate * 1.15)
    )
    assert calm == pytest.approx(rate / 2, rel=0.1)
    assert calm < crowded < 0.95 * 1.15 * rate


def test_past_the_knee_the_default_keeps_its_hits_and_a_lower_p99_than_sticky() -> None:
    near, far = (LoadCell(scene="Mixed", workers=4, load=load) for load in (0.8, 1.2))
    runs = [
        [run_task((cell, seed, policies, None)) for seed in range(2)]
        for cell, policies in ((near, (DEFAULT,)), (far, (DEFAULT, "Locality-aware")))
    ]
    calm, crowded = ([values[0] for values in cell] for cell in runs)
    sticky = [values[1] for values in runs[1]]
    assert mean(crowded, "hit") >= 0.9 * mean(calm, "hit")
    assert mean(crowded, "p99_s") < mean(sticky, "p99_s")


def mean(values: list[LabFigures], field: str) -> float:
    return float(np.mean([getattr(value, field) for value in values]))


@pytest.mark.parametrize(("tight_s", "gain"), [(0.5, 1.0), (2.0, 8.0)])
def test_who_knows_the_targets_keeps_more_of_them_past_the_knee(
    tight_s: float, gain: float
) -> None:
    told, untold = (experiment("Mixed", 1.2, tight_s, 20, told=told) for told in (True, False))
    assert told.all > untold.all + gain
    assert told.patient > 99.0
