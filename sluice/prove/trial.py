"""One run of a log through one model of a configuration, in virtual time, and its counts."""

from collections.abc import Callable, Mapping
from math import nan
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from gateway.records.entitlement import BACKFILL, OWN_LIMITS, Entitlement
from gateway.settings import Config, ModelConfig, load
from planner.errors import PlanError
from planner.profile import NodeProfile, profile_from_json
from simulator.engine.profiles import EngineProfile
from simulator.fleet.traffic import Floats, Ints, Traffic
from simulator.pipeline.intake import OPEN
from simulator.pipeline.prompts import SharedPrompts
from simulator.pipeline.records import (
    BROKEN,
    NO_WORKER,
    QUEUE_FULL,
    QUEUE_TIMEOUT,
    REFUSED_LENGTH,
    Gateway,
    PipelineOutcome,
)
from simulator.pipeline.run import run_pipeline
from sluice.prove.verdict import LATE, Counts, Tally
from sluice.simulated.fleet import engine_of
from sluice.simulated.gateway import gateway_of, tenant_traffic, tenants_of
from sluice.simulated.recorded import RecordedTraffic

RETRIES: Final = 2
"""As OpenAI's clients come back."""
TAUGHT: Final = 5000
"""Most served requests of the log of which the estimator knows, as that of the gateway in force."""
PIECE_S: Final = 300.0
"""Length of the pieces by which a long log is sampled, and over which peaks are taken."""
WARM_UP_S: Final = 600.0
"""Longest start of a run that is not counted; at most a fifth of it."""
_POOL_LOSSES: Final = frozenset({QUEUE_FULL, QUEUE_TIMEOUT, NO_WORKER, BROKEN})
_UNIT: Final = {"queue_full": "refused by a full queue", "queue_timeout": "too long in a queue"}


class Engines(msgspec.Struct, frozen=True, kw_only=True):
    """Measured engines: of each pool, or one for all under the name "".

    Engines that compute prompts alone (POOL/prefill) are the pool's, unless they have their own.
    """

    nodes: Mapping[str, NodeProfile]
    models: Mapping[str, EngineProfile]
    """Engine models of profiles that have one, by pool."""

    def node(self, pool: str) -> NodeProfile:
        """The profile of a pool; raises PlanError without one."""
        for name in _names(pool):
            if name in self.nodes:
                return self.nodes[name]
        raise PlanError(f"no profile of pool {pool}", f"write {pool}.json beside the others")

    def model(self, pool: str) -> EngineProfile | None:
        """The engine model of the same profile, if it has one."""
        return next((self.models[name] for name in _names(pool) if name in self.models), None)


def _names(pool: str) -> tuple[str, ...]:
    """Under which names a pool's profile may be, best first."""
    return pool, pool.removesuffix("/prefill"), ""


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """The requests to simulate, and for how many of the log each stands."""

    recorded: RecordedTraffic
    weights: Floats
    span_s: float
    """Length of the whole log."""
    words: str = ""
    """How it was sampled; empty for the whole log."""


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """One run of one model of a file."""

    file: Path
    model: str
    sample: Sample
    engines: Engines
    seed: int


def read_engines(path: Path) -> Engines:
    """A profile of `sluice calibrate`, or a folder with one for each pool (POOL.json).

    Raises PlanError for a folder without profiles, or a bad one.
    """
    files = [path]
    if path.is_dir():
        files = sorted([*path.glob("*.json"), *path.glob("*/prefill.json")])
    if not files:
        raise PlanError(f"{path} has no profile", "write POOL.json there for each pool")
    nodes, models = {}, {}
    for file in files:
        name = file.relative_to(path).with_suffix("").as_posix() if path.is_dir() else ""
        try:
            document = msgspec.json.decode(file.read_bytes())
            nodes[name] = profile_from_json(document, origin=str(file))
            if "engine" in document:
                models[name] = msgspec.convert(document["engine"], EngineProfile)
        except (OSError, ValueError) as error:
            if isinstance(error, PlanError):
                raise
            raise PlanError(f"{file}: {error}", "give a profile of `sluice calibrate`") from None
    return Engines(nodes=nodes, models=models)


def sampled(recorded: RecordedTraffic, most: int) -> Sample:
    """At most about `most` requests, in pieces of PIECE_S: the busiest, and some in between.

    What lies between the pieces is left out of the time. The busiest pieces stand for themselves,
    the others for all the rest.
    """
    count, span_s = len(recorded.at_s), max(float(recorded.at_s[-1]), 1e-9)
    if count <= most:
        return Sample(recorded=recorded, weights=np.ones(count), span_s=span_s)
    piece = (recorded.at_s // PIECE_S).astype(np.int64)
    sizes = np.bincount(piece)
    order = np.argsort(-sizes, kind="stable")
    busiest = order[: max(1, int(np.searchsorted(np.cumsum(sizes[order]), most / 2, "right")))]
    rest = np.setdiff1d(np.arange(len(sizes)), busiest)
    stride = max(1, -(-2 * int(sizes[rest].sum()) // most))
    others = rest[stride // 2 :: stride]
    chosen = np.sort(np.concatenate([busiest, others]))
    place = np.full(len(sizes), -1)
    place[chosen] = np.arange(len(chosen))
    index = np.flatnonzero(place[piece] >= 0)
    at_s = recorded.at_s[index] + (place[piece[index]] - piece[index]) * PIECE_S
    heavy = sizes[rest].sum() / max(1, sizes[others].sum())
    return Sample(
        recorded=recorded.of(index, at_s - at_s[0]),
        weights=np.where(np.isin(piece[index], busiest), 1.0, heavy),
        span_s=span_s,
        words=f"sampled: {len(index):,} of {count:,} requests, {len(chosen)} of {len(sizes)} "
        f"pieces of {PIECE_S / 60:g} minutes, the {len(busiest)} busiest among them",
    )


def run(trial: Trial, progress: Callable[[int], None] | None = None) -> Tally:
    """Serve the sample; raises PlanError for a fleet that cannot be built."""
    sample, recorded = trial.sample, trial.sample.recorded
    config = load(trial.file)
    (model,) = (entry for entry in config.models if entry.name == trial.model)
    gateway = _gateway(config, model, trial.engines, recorded)
    traffic = Traffic(
        arrival_s=recorded.at_s, prompt_tokens=recorded.prompts, output_tokens=recorded.answers
    )
    tenants = tenants_of(gateway.entitlements, None)
    requests = tenant_traffic(traffic, tenants, np.random.default_rng(trial.seed), recorded)
    p_c = recorded.compressible()
    requests = msgspec.structs.replace(
        requests,
        compressible=np.nan_to_num(p_c),
        prompts=_shared(gateway, recorded, requests.entitlement),
    )
    retries = RETRIES if recorded.comes_back else 0
    known = np.flatnonzero(recorded.at_s >= 0 if recorded.uncut is None else recorded.uncut)
    taught = known[:: len(known) // TAUGHT + 1].tolist()
    outcome = run_pipeline(
        gateway, requests, seed=trial.seed, retries=retries, taught=taught, progress=progress
    )
    late = recorded.at_s >= min(0.2 * float(recorded.at_s[-1]), WARM_UP_S)
    reasons = np.array(outcome.reasons, dtype=object)
    window = outcome.fleet.compressed.copy()
    window[list(outcome.uncut)] = True
    weights = sample.weights
    per_s = float(weights.sum()) / sample.span_s / max(float(weights[late].sum()), 1e-9)
    if recorded.batched is not None:
        late &= ~recorded.batched  # promised as a batch, not one by one
    return Tally(
        entitlements={
            owner.name: _entitlement(
                owner, sample, gateway, outcome, reasons, late & (outcome.entitlement == i), per_s
            )
            for i, owner in enumerate(gateway.entitlements or (OPEN,))
        },
        pools=_pools(sample, gateway, outcome, reasons, late, per_s),
        window=int(window.sum()),
        guessed=int((window & np.isnan(p_c)).sum()),
    )


def _shared(gateway: Gateway, recorded: RecordedTraffic, owners: Ints) -> SharedPrompts | None:
    """What prompts share in engines; None where the log shows no caches."""
    if recorded.digests is None or not recorded.shows_caches:
        return None
    names = [owner.tenant for owner in gateway.entitlements or (OPEN,)]
    tenants = np.array([names.index(name) for name in names])[owners]
    salted = gateway.served.scheduling.salted
    return SharedPrompts(recorded.digests, recorded.prompts, tenants if salted else None)


def states_transfer(model: ModelConfig) -> bool:
    """Whether the file says how fast KV is handed over, where it is."""
    links = [pool.transfer for pool in model.pools.values() if pool.transfer is not None]
    return model.kv_bytes_per_token is not None and all(link.bytes_per_second for link in links)


def _gateway(
    config: Config, model: ModelConfig, engines: Engines, recorded: RecordedTraffic
) -> Gateway:
    """The gateway with the measured engines, as large as the file says."""
    first = engines.node(next(iter(model.pools)))
    gateway = gateway_of(config, model, first, counting="paged")
    speed = recorded.kv_tokens_per_s
    if speed is not None and not states_transfer(model):
        gateway = msgspec.structs.replace(gateway, kv_tokens_per_s=speed)
    profiles = []
    for base, (name, pool) in zip(gateway.profiles, model.all_pools.items(), strict=True):
        measured = engines.model(name)
        engine = measured or engine_of(engines.node(name), base.max_model_len, "paged")
        sizes = {name: getattr(base, name) for name in ("max_model_len", "max_num_seqs")}
        if pool.kv_cache_gib is not None:
            sizes["kv_blocks"] = base.kv_blocks
        batched = max(engine.max_num_batched_tokens, base.max_num_seqs)
        cached = None if measured is None else measured.prefix_cache_tokens
        cached = cached if recorded.shows_caches else 0
        profiles.append(
            msgspec.structs.replace(
                engine, max_num_batched_tokens=batched, prefix_cache_tokens=cached, **sizes
            )
        )
    return msgspec.structs.replace(gateway, profiles=tuple(profiles))


def _entitlement(
    owner: Entitlement,
    sample: Sample,
    gateway: Gateway,
    outcome: PipelineOutcome,
    reasons: NDArray[np.object_],
    mine: NDArray[np.bool_],
    per_s: float,
) -> Counts:
    weights, log, fleet = sample.weights, sample.recorded, outcome.fleet
    slow = (fleet.ttft_s > owner.slo_ms / 1000) & (owner.slo_ms > 0)
    slow |= (fleet.tpot_s > owner.slo_tpot_ms / 1000) & (owner.slo_tpot_ms > 0)
    first = np.array(outcome.first_refusals, dtype=object)
    put_off = mine & (reasons == "") & (first != "")  # its client came back
    limited = np.isin(np.where(put_off, first, reasons), list(OWN_LIMITS)) & mine
    before = 0.0 if log.limited is None else float(weights[mine & log.limited].sum())
    unserved = float(weights[mine & (reasons != "")].sum()) / max(float(weights[mine].sum()), 1.0)
    limits = gateway.served.fleet.timeouts
    overdue = (fleet.end_s - fleet.arrival_s > limits.first_byte_s) | (fleet.ttft_s > limits.idle_s)
    if owner.service_class in BACKFILL:  # promised no capacity
        at_once = (reasons == "") & ~put_off
        mine = mine & (at_once | limited | (reasons == REFUSED_LENGTH))
    served = mine & (reasons == "")
    lost: dict[str, float] = {}
    for p, pool in enumerate(gateway.served.fleet.pools):
        late = served & slow & (first == "") & (fleet.pool == p)
        _count(lost, LATE + pool.name, weights, late)
    why = np.where(put_off, first, reasons)
    for reason in set(why[mine & (why != "") & ~limited].tolist()):
        words = _UNIT.get(reason, f"refused ({reason})")
        _count(lost, words, weights, mine & (why == reason))
    return Counts(
        requests=float(weights[mine].sum()),
        simulated=int(mine.sum()),
        lost=lost,
        limited=float(weights[limited].sum()),
        limited_before=before,
        overdue=float(weights[served & overdue & ~slow].sum()),
        per_s=float(weights[mine].sum()) * per_s,
        unserved=unserved,
        ttft_p99_s=float(np.quantile(fleet.ttft_s[served], 0.99)) if served.any() else nan,
    )


def _count(lost: dict[str, float], words: str, weights: Floats, which: NDArray[np.bool_]) -> None:
    total = float(weights[which].sum())
    if total:
        lost[words] = total


def _pools(
    sample: Sample,
    gateway: Gateway,
    outcome: PipelineOutcome,
    reasons: NDArray[np.object_],
    late: NDArray[np.bool_],
    per_s: float,
) -> dict[str, Counts]:
    """Of each pool, and of the engines that compute its prompts, where those are others.

    Those are measured in engines, not in slots: one prompt at a time keeps an engine busy.
    """
    fleet, weights, recorded = outcome.fleet, sample.weights, sample.recorded
    model = gateway.served.fleet
    bounds = [pool.boundary_tokens or 0 for pool in gateway.served.routing.pools[:-1]]
    totals = recorded.prompts + recorded.answers
    home = np.where(fleet.planned >= 0, fleet.planned, np.searchsorted(bounds, totals))
    routes = np.array([model.route_of(p) for p in range(len(model.pools))])
    home = np.where(fleet.pool >= 0, routes[fleet.pool], home)
    apart = outcome.prefilled_s > fleet.start_s  # else its start is that of the answer's engine
    answering_s = fleet.end_s - np.where(apart, outcome.sent_s, fleet.start_s)
    tallies = {}
    for p, pool in enumerate(model.pools):
        wanted = late & (home == routes[p])
        sent, service_s = wanted & (fleet.planned >= 0), answering_s
        served = sent & (reasons == "")
        if p != routes[p]:
            sent &= apart | (outcome.lost_in == p)
            service_s = np.where(apart, _prompt_s(gateway.profiles[p], fleet.prompt_tokens), 0.0)
        elif p in model.phases:
            sent &= outcome.lost_in != model.phases[p].prefill
        lost: dict[str, float] = {}
        for reason in _POOL_LOSSES:
            _count(lost, _UNIT.get(reason, reason), weights, sent & (reasons == reason))
        mean_s = service_s[served].mean() if served.any() else nan
        engines = sum(len(engine.ranks) for engine in pool.engines)
        tallies[pool.name] = Counts(
            requests=float(weights[sent].sum()),
            simulated=int(sent.sum()),
            lost=lost,
            per_s=float(weights[sent].sum()) * per_s,
            slots=engines * (gateway.profiles[p].max_num_seqs if p == routes[p] else 1),
            unit="slots" if p == routes[p] else "engines",
            expected=float(weights[wanted].sum() * per_s * mean_s),
            peak=float(_peak_per_s(recorded.at_s[wanted]) * mean_s),
        )
    return tallies


def _prompt_s(engine: EngineProfile, tokens: Ints) -> Floats:
    """How long prompts keep an engine busy that computes them in full iterations, nothing else."""
    budget, per_kv = engine.max_num_batched_tokens, engine.h_s_per_token
    pairs = (engine.attention_s_per_pair + per_kv / budget) * tokens**2 / 2
    return tokens * (engine.prefill_s_per_token + engine.w_s / budget) + pairs


def _peak_per_s(at_s: Floats) -> float:
    """Requests per second in the busiest five minutes, or over all of a shorter time."""
    if not len(at_s):
        return 0.0
    counts: Ints = np.bincount((at_s // PIECE_S).astype(np.int64))
    whole = float(at_s[-1] - at_s[0])
    return float(counts.max()) / PIECE_S if whole >= PIECE_S else len(at_s) / max(whole, 1.0)
