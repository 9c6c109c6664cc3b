"""Judge whether a planned fleet meets its SLOs, by simulating each pool long enough.

Pools without spillover are independent under Poisson arrivals, so each is run alone, for at
least ten times its longest service.
"""

from functools import partial
from math import ceil
from typing import Final

import msgspec
import numpy as np

from simulator.engine.profiles import EngineProfile
from simulator.experiments.verdict_records import (
    ArrivalProgress,
    Criterion,
    FleetVerdict,
    LatencyGoals,
    PoolVerdict,
    faults_of,
    verdict_of,
)
from simulator.fleet import arrivals
from simulator.fleet.fleet import FleetSpec, PoolSpec
from simulator.fleet.outcome import HORIZON_SERVICES
from simulator.fleet.routing import REFUSED
from simulator.fleet.spec import routed
from simulator.fleet.summary import summarise
from simulator.fleet.tandem import simulate_pool
from simulator.fleet.traffic import (
    Lengths,
    Traffic,
    joined,
    selected,
)

__all__ = ["FleetVerdict", "LatencyGoals", "PoolVerdict", "faults_of", "judge"]

MIN_REQUESTS: Final = 20_000
MAX_DRAWN: Final = 30_000_000
"""Most requests drawn for one pool, those of other pools included."""
_DRAWN_FOR_MORE: Final = 3_000_000
"""Most requests drawn to reach MIN_REQUESTS of a rarely used pool."""
_PILOT: Final = 100_000
_BATCH: Final = 1_000_000


def judge(
    spec: FleetSpec,
    lengths: Lengths,
    *,
    rate_per_s: float,
    slo_s: float,
    tpot_slo_s: float | None = None,
    criterion: Criterion = "ttft",
    seed: int = 0,
    services: int = HORIZON_SERVICES,
    most_drawn: int = MAX_DRAWN,
    progress: ArrivalProgress | None = None,
) -> FleetVerdict:
    """Run each pool alone on its share of a Poisson stream, and compare it with the SLOs.

    `services` is the least length of a run in longest services. With heavy tails, loads differ by
    several percent between runs of ten: use 100 to compare figures. Raises ValueError if the fleet
    spills, since its pools are then not independent (use `simulate`).
    """
    if spec.spill_queue is not None:
        raise ValueError("a fleet that spills is judged as a whole: take spill_queue away")
    goals = LatencyGoals(slo_s=slo_s, tpot_slo_s=tpot_slo_s, criterion=criterion)
    pools = tuple(
        _judge_pool(spec, p, lengths, rate_per_s, goals, seed, services, most_drawn, progress)
        for p in range(len(spec.pools))
    )
    random = np.random.default_rng(seed)
    pilot = routed(spec, *lengths.sample(_PILOT, random), random)
    return FleetVerdict(
        pools=pools,
        criterion=criterion,
        slo_s=slo_s,
        refused_share=float((pilot.pool == REFUSED).mean()),
    )


def _judge_pool(
    spec: FleetSpec,
    p: int,
    lengths: Lengths,
    rate_per_s: float,
    goals: LatencyGoals,
    seed: int,
    services: int,
    most_drawn: int,
    progress: ArrivalProgress | None,
) -> PoolVerdict:
    pilot = _share_of(spec, p, lengths, rate_per_s, _PILOT, seed)
    pool = spec.pools[p]
    if pilot is None:
        count = most_drawn
    else:
        service_s = _longest_service_s(pool.profile, pilot)
        share = len(pilot) / _PILOT
        for_tails = min(MIN_REQUESTS / share, _DRAWN_FOR_MORE)
        count = min(most_drawn, ceil(max(services * service_s * rate_per_s, for_tails)))
    requests = _share_of(spec, p, lengths, rate_per_s, count, seed)
    if requests is None:
        return _idle(pool, count / rate_per_s)
    alone = msgspec.structs.replace(
        spec,
        pools=(msgspec.structs.replace(pool, boundary_tokens=None),),
        gamma=1.0,
    )
    arrived = None if progress is None else partial(progress, pool.name, total=len(requests))
    outcome = simulate_pool(alone, requests, seed=seed, progress=arrived)
    return verdict_of(summarise(alone, outcome).pools[0], count / rate_per_s, goals)


def _share_of(
    spec: FleetSpec, p: int, lengths: Lengths, rate_per_s: float, count: int, seed: int
) -> Traffic | None:
    """One pool's requests out of a stream to the fleet, after compression; None if empty."""
    random = np.random.default_rng((seed, p))
    found: list[Traffic] = []
    start_s = 0.0
    for drawn in range(0, count, _BATCH):
        at_s = start_s + arrivals.poisson(rate_per_s, min(_BATCH, count - drawn), random)
        start_s = float(at_s[-1])
        prompts, outputs = lengths.sample(len(at_s), random)
        plan = routed(spec, prompts, outputs, random)
        mine = plan.pool == p
        if mine.any():
            whole = Traffic(arrival_s=at_s, prompt_tokens=plan.prompt_tokens, output_tokens=outputs)
            found.append(selected(whole, mine))
    return joined(found) if found else None


def _longest_service_s(profile: EngineProfile, requests: Traffic) -> float:
    """Duration of the longest sequence if every slot is taken by the typical mix."""
    chunks = -(-requests.prompt_tokens // profile.chunk_tokens)
    iterations = chunks + requests.output_tokens - 1
    tokens = requests.total_tokens
    if profile.timing == "slots":
        step_s = profile.w_s + profile.h_s * profile.max_num_seqs
    else:
        mean = float(iterations @ tokens) / max(1.0, float(iterations.sum()))
        held = min(profile.max_num_seqs * mean, profile.kv_blocks * profile.block_tokens)
        step_s = profile.w_s + profile.h_s_per_token * held
    return float(iterations.max()) * step_s


def _idle(pool: PoolSpec, duration_s: float) -> PoolVerdict:
    return PoolVerdict(
        name=pool.name,
        instances=pool.instances,
        requests=0,
        utilisation=0.0,
        wait_p99_s=0.0,
        ttft_p99_s=0.0,
        tpot_p99_s=0.0,
        duration_s=duration_s,
        drifting=False,
        short_run=False,
        longest_service_s=0.0,
        ttft_p99=None,
        faults=(),
    )
