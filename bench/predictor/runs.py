"""Data behind the rows of `bench predictor`: QUARTZ's workloads before engine models.

A gateway without a trained predictor serves each workload in virtual time, and every prefill is
kept as its request log would keep it. The trained predictor is then judged on those rows in
order, predicting each before learning from it, as in shadow mode.
"""

from typing import Any, Final

import msgspec

from bench.quartz.workloads import MIXED, StreamShape, mixed
from gateway.fleet.fleet import PoolState
from gateway.scheduling.prefix_index import PrefixIndex
from gateway.scheduling.schedulers import make_scheduler
from predictor.online import PrefillPredictor
from predictor.rows import PrefillRow
from simulator.engine.engine import EngineProfile
from simulator.experiments.scheduling import WORKER, SimulatedGateway, serve

WORKERS: Final = 4
TRAINING_REQUESTS: Final = 12_000
NOMINAL_REQUESTS: Final = 3_000
"""Before each shift."""
SHIFT_REQUESTS: Final = 4_000

OTHER: Final = msgspec.structs.replace(
    WORKER,
    name="other",
    w_s=0.012,
    h_s=0.0003,
    prefill_s_per_token=1 / 4500,
    max_num_batched_tokens=1024,
)
"""Another engine: half the prefill rate, half the chunk, half a step's fixed cost."""


def slower(profile: EngineProfile, factor: float) -> EngineProfile:
    """The same engine, all of it slower."""
    return msgspec.structs.replace(
        profile,
        name=f"{profile.name}, {factor:g}x slower",
        w_s=profile.w_s * factor,
        h_s=profile.h_s * factor,
        prefill_s_per_token=profile.prefill_s_per_token * factor,
        h_s_per_token=-1.0,
    )


def shape_of(**changes: Any) -> StreamShape:
    """The Mixed workload with some things changed."""
    return msgspec.structs.replace(MIXED, **changes)


# Rates keep the fleet below saturation, where a prefill would tell of nothing but the queue.
SHIFTS: Final[dict[str, tuple[StreamShape, EngineProfile]]] = {
    "More RAG": (shape_of(rag=0.6, rate=9.0), WORKER),
    "Low Reuse": (shape_of(again=0.0, turns=1.0, documents=20_000, rate=9.0), WORKER),
    "Large Budget": (shape_of(output_factor=3.0, cap_tokens=4096, rate=6.0), WORKER),
    "1.4x slower": (shape_of(rate=7.5), slower(WORKER, 1.4)),
    "another engine": (shape_of(rate=5.0), OTHER),
}


class _Recording(PrefillPredictor):
    """Learns as any other, and keeps what it learned from."""

    def __init__(self, workers: int) -> None:
        super().__init__(workers=workers)
        self.rows: list[PrefillRow] = []

    def observe(
        self,
        worker: int,
        x: tuple[float, ...],
        mean_s: float,
        quantile_s: float,
        bucket: int,
        actual_s: float,
        client: str = "",
    ) -> None:
        """See PrefillPredictor."""
        self.rows.append(PrefillRow(x=x, prefill_s=actual_s, worker=str(worker)))
        super().observe(worker, x, mean_s, quantile_s, bucket, actual_s)


def rows_of(
    shape: StreamShape,
    profiles: EngineProfile | list[EngineProfile],
    requests: int,
    seed: int,
) -> list[PrefillRow]:
    """Every prefill of a workload, in order of first tokens."""
    profiles = profiles if isinstance(profiles, list) else [profiles] * WORKERS
    pool = PoolState("pool", tuple(map(str, range(len(profiles)))), 256)
    predictor = _Recording(len(profiles))
    scheduler = make_scheduler("quartz", pool, predictor=predictor)
    kept = PrefixIndex(len(profiles), capacity_tokens=160_000)
    gateway = SimulatedGateway(pool, scheduler, kept, predictor)
    serve(mixed(seed, shape, requests), [gateway], profiles=profiles, seed=seed)
    return predictor.rows
