"""Tenants with unequal targets: attainment when the scheduler is told the targets and when not.

Every second client expects its first token within TIGHT_S, the others within PATIENT_S. Both runs
of a pair see the same requests.
"""

from collections.abc import Callable, Iterable
from typing import Final

import msgspec
import numpy as np

from bench.common.report import Row
from bench.quartz.lab import interval
from bench.quartz.lab import run as simulate
from bench.quartz_loads.scenes import SCENES, knee
from gateway.fleet.fleet import PoolState
from gateway.scheduling.prefix_index import PrefixIndex
from gateway.scheduling.schedulers import make_scheduler
from predictor.online import PrefillPredictor
from simulator.experiments.scheduling import WORKER, Demand, SimulatedGateway

TIGHT_S: Final = (0.5, 2.0)
PATIENT_S: Final = 30.0
LOADS: Final = (0.8, 1.0, 1.2)
_SCENES: Final = ("Mixed", "Mixed Bursty")
_WORKERS: Final = 4
_REQUESTS: Final = 1500
VARIANTS: Final = len(_SCENES) * len(TIGHT_S) * len(LOADS)
"""Pairs that `rows` runs for each seed."""
_MAX_HARM: Final = 1.0
"""Points of attainment."""


class TargetFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Attainment of one run, in per cent."""

    all: float
    tight: float
    patient: float


def experiment(scene: str, load: float, tight_s: float, seed: int, *, told: bool) -> TargetFigures:
    """`told`: the scheduler knows the targets."""
    rate = knee(scene, _WORKERS) * load
    drawn = SCENES[scene](seed, rate, _WORKERS, _REQUESTS, None)
    demands = [_with_target(demand, tight_s, told=told) for demand in drawn]
    pool = PoolState("pool", tuple(f"w{i}" for i in range(_WORKERS)), WORKER.max_num_seqs)
    predictor = PrefillPredictor(workers=_WORKERS)
    scheduler = make_scheduler("quartz", pool, predictor=predictor)
    gateway = SimulatedGateway(pool, scheduler, PrefixIndex(_WORKERS), predictor)
    served = simulate(demands, [gateway], seed=seed, profiles=[WORKER] * _WORKERS)
    targets_s = np.array([demand.slo_s for demand in demands])
    met = 100.0 * (served.ttft_s <= targets_s)
    tight = targets_s < PATIENT_S
    return TargetFigures(
        all=float(met.mean()), tight=float(met[tight].mean()), patient=float(met[~tight].mean())
    )


def _with_target(demand: Demand, tight_s: float, *, told: bool) -> Demand:
    tight = int(demand.client.removeprefix("client-")) % 2
    slo_s = tight_s if tight else PATIENT_S
    return msgspec.structs.replace(demand, slo_s=slo_s, told_slo_s=slo_s if told else 0.0)


def rows(seeds: Iterable[int], step: Callable[[], None] = lambda: None) -> list[Row]:
    """One row for each workload, target and load."""
    seeds, out = list(seeds), []
    for scene in _SCENES:
        for tight_s in TIGHT_S:
            for load in LOADS:
                pairs = []
                for seed in seeds:
                    pairs.append(
                        [
                            experiment(scene, load, tight_s, seed, told=told)
                            for told in (True, False)
                        ]
                    )
                    step()
                out.append(_row(f"{scene}, targets {tight_s:g} and 30 s, load {load:g}", pairs))
    return out


def _row(name: str, pairs: list[list[TargetFigures]]) -> Row:
    def mean(of: int, field: str) -> float:
        return float(np.mean([getattr(pair[of], field) for pair in pairs]))

    gain = np.array([told.all - untold.all for told, untold in pairs])
    low, high = interval(gain)
    return Row(
        metric=f"{name}: attainment by knowing targets, points",
        measured=float(gain.mean()),
        target=f">= -{_MAX_HARM:g}",
        holds=float(gain.mean()) >= -_MAX_HARM,
        note=f"{low:+.1f} to {high:+.1f}; all {mean(1, 'all'):.1f} -> {mean(0, 'all'):.1f} %, "
        f"tight {mean(1, 'tight'):.1f} -> {mean(0, 'tight'):.1f} %, "
        f"patient {mean(1, 'patient'):.1f} -> {mean(0, 'patient'):.1f} %",
    )
