"""Questions that one replica's control plane asks the other replicas.

A client reaches any one replica, and the answers must not depend on which one. Decisions are found
on the replica that made them, lists and loads cover all replicas, and usage reports reach the
replica that holds the lease. Lists and loads leave out replicas that answer too late, or in another
version's format; what is searched for is called unknown only if every replica says so.

A question says no more than its answer needs, so that its size is bounded: a name, an id, or the
names of one page.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, TypeVar

import msgspec

from gateway.control.surface import Control
from gateway.fleet.fleet import PoolState
from gateway.metrics import Counter as CounterFamily
from gateway.metrics import Metrics
from gateway.payload.head import MAX_REQUEST_ID
from gateway.records.entitlement import RESULTS
from gateway.records.proof import Proof
from gateway.records.record import Record
from gateway.replicas.calls import ReplicaCalls
from gateway.usage.claims import RESULTS_PROVED, Claims

_json: Final = msgspec.json.Encoder().encode
_pack: Final = msgspec.msgpack.Encoder().encode
_T = TypeVar("_T")


def understood(decode: Callable[[bytes], _T], answers: Sequence[bytes]) -> Iterator[_T]:
    """Decoded answers; those of another version's format are left out."""
    for answer in answers:
        try:
            yield decode(answer)
        except (ValueError, msgspec.MsgspecError):
            continue


def answer_peers(
    control: Control,
    *,
    reload: Callable[[], None],
    own_decision: Callable[[str, str], bytes | None],
) -> None:
    """Register this replica's answers.

    `own_decision` is what a tenant may see of its request, by request id and tenant.
    """
    on, ring = control.peers.on, control.ring
    on("decision", lambda asked: ring.find(asked.decode()))
    on("decisions", lambda asked: _json(ring.latest(int(asked))))
    on("tenant_decision", lambda asked: own_decision(*_asked_by(asked)))
    on("audit", lambda asked: _json(control.registry.audit(int(asked))))
    on("load", lambda _: _pack(own_load(control)))
    on("demand", lambda asked: own_demand(control, asked.decode()))
    on("reload", lambda _: reload())
    on("proof", partial(_own_proof, control.claims))
    for topic, count in COUNTED.items():
        on(topic, partial(_counted, control.metrics, count))


# -- decisions


class _Timed(msgspec.Struct):
    time_unix_s: float


_timed: Final = msgspec.json.Decoder(list[_Timed]).decode
_asked_by: Final = msgspec.json.Decoder(tuple[str, str]).decode


async def find_decision(
    peers: ReplicaCalls, request_id: str, tenant: str | None = None
) -> bytes | None:
    """A request's record from another replica, or what its tenant may see of it, as JSON."""
    if len(request_id) > MAX_REQUEST_ID:  # of no request
        return None
    if tenant is None:
        answers = await peers.search("decision", request_id.encode())
    else:
        answers = await peers.search("tenant_decision", _json((request_id, tenant)))
    return answers[0] if answers else None


def _records(answer: bytes) -> list[dict[str, Any]]:
    _timed(answer)
    records: list[dict[str, Any]] = msgspec.json.decode(answer)
    return records


async def newest(
    peers: ReplicaCalls, topic: str, own: Sequence[object], count: int
) -> list[dict[str, Any]]:
    """The newest records of all replicas, newest first; `own` are this replica's."""
    reported = [_json(own), *await peers.ask(topic, b"%d" % count)]
    merged = [record for records in understood(_records, reported) for record in records]
    return sorted(merged, key=lambda record: -record["time_unix_s"])[:count]


# -- demand


def own_demand(control: Control, model: str) -> bytes | None:
    """What this replica was asked for, as JSON; None if it has no such model."""
    named = (served for served in control.models if served.name == model)
    return next((_json(served.demand.shown()) for served in named), None)


async def live_demand(control: Control, model: str) -> list[msgspec.Raw]:
    """The same of every replica, its own first; empty where this one has no such model."""
    own = own_demand(control, model)
    others = [] if own is None else await control.peers.ask("demand", model.encode())
    return [msgspec.Raw(each) for each in (own, *others) if each is not None]


# -- counts of entitlements

Counts = dict[str, dict[str, int]]
"""By entitlement, and by what is counted."""
Count = Callable[[Metrics, Collection[str]], Counts]
_counts: Final = msgspec.json.Decoder(Counts).decode
_names: Final = msgspec.json.Decoder(list[str]).decode


def _refused(metrics: Metrics, names: Collection[str]) -> Counts:
    refusals: Counts = {name: {} for name in names}
    for (entitlement, decision, reason), count in metrics.admission.values.items():
        if decision == "denied" and entitlement in refusals:
            refusals[entitlement][reason] = int(count)
    return refusals


def _kept(
    family: CounterFamily, names: Collection[str], results: Sequence[str] = RESULTS
) -> Counts:
    return {name: {r: int(family.values.get((name, r), 0)) for r in results} for name in names}


def _counted(metrics: Metrics, count: Count, asked: bytes) -> bytes:
    return _json(count(metrics, _names(asked)))


COUNTED: Final[Mapping[str, Count]] = {
    "refused": _refused,
    "slo": lambda metrics, names: _kept(metrics.slo_requests, names),
    "slo_tpot": lambda metrics, names: _kept(metrics.slo_tpot_requests, names),
    "proved": lambda metrics, names: _kept(metrics.proved_requests, names, RESULTS_PROVED),
}
"""What a replica counts of entitlements: since its start refusals by reason and targets kept,
since its proof was attached what was proved."""


async def counts(
    peers: ReplicaCalls, metrics: Metrics, topic: str, names: Collection[str]
) -> Counts:
    """What all replicas counted of some entitlements."""
    total = {name: Counter(own) for name, own in COUNTED[topic](metrics, names).items()}
    if total:
        for reported in understood(_counts, await peers.ask(topic, _json(list(total)))):
            for name in total.keys() & reported.keys():
                total[name].update(reported[name])
    return {name: dict(counted) for name, counted in total.items()}


async def attainment(
    peers: ReplicaCalls, metrics: Metrics, targets_ms: Mapping[str, float], topic: str = "slo"
) -> dict[str, dict[str, object]]:
    """By entitlement, how often all replicas kept its target.

    `topic`: `slo` to the first token, `slo_tpot` per output token.
    """
    requests = await counts(peers, metrics, topic, targets_ms)
    return {
        name: {
            "target_ms": target_ms,
            "met": (met := requests[name]["true"]),
            "missed": (missed := requests[name]["false"]),
            "refused": requests[name]["refused"],
            "attainment": met / (met + missed) if met + missed else None,
        }
        for name, target_ms in targets_ms.items()
    }


# -- the proof of the configuration in force

_proof: Final = msgspec.json.Decoder(tuple[Proof, float]).decode


def _own_proof(claims: Claims, asked: bytes) -> bytes | None:
    newer = claims.proof is not None and claims.since_unix_s > float(asked)
    return _json((claims.proof, claims.since_unix_s)) if newer else None


async def proof_in_force(control: Control) -> dict[str, Any] | None:
    """The newest proof of this gateway's file that a replica has, and what came of it since."""
    claims, peers = control.claims, control.peers
    answers = await peers.ask("proof", repr(claims.since_unix_s).encode())
    for proof, unix_s in understood(_proof, answers):
        claims.follow(proof, unix_s)
    if claims.proof is None:
        return None
    counted = await counts(peers, control.metrics, "proved", claims.entitlements)
    shown = {"since_unix_s": claims.since_unix_s, "counts": counted}
    return {**msgspec.to_builtins(claims.proof), **shown}


# -- load


class ReplicaLoad(Record, frozen=True, kw_only=True):
    """What a replica has in flight in a pool."""

    inflight: int
    beyond_window_tokens: int
    active: list[int]
    tokens: list[int]
    ids: tuple[str, ...]
    """Their workers."""


_loads: Final = msgspec.msgpack.Decoder(dict[str, list[ReplicaLoad]]).decode


def own_load(control: Control) -> dict[str, list[ReplicaLoad]]:
    """By model; under "" what a reload removed, which no model's own figures count."""

    def of(pools: Sequence[PoolState], inflight: Callable[[int], int]) -> list[ReplicaLoad]:
        return [
            ReplicaLoad(
                inflight=inflight(place),
                beyond_window_tokens=pool.beyond_window_tokens,
                ids=tuple(pool.workers),
                active=list(pool.active),
                tokens=list(pool.tokens),
            )
            for place, pool in enumerate(pools)
        ]

    here = {id(pool) for served in control.models for pool in served.fleet.pools}
    gone = {id(p): p for m in control.retiring for p in m.fleet.pools if id(p) not in here}
    loads = {s.name: of(s.fleet.pools, s.fleet.inflight) for s in control.models}
    left = list(gone.values())
    return {**loads, "": of(left, lambda place: left[place].inflight)} if left else loads


async def loads_elsewhere(peers: ReplicaCalls) -> list[dict[str, list[ReplicaLoad]]]:
    """The other replicas' loads."""
    return list(understood(_loads, await peers.ask("load")))


async def add_load(peers: ReplicaCalls, shown: Sequence[Mapping[str, Any]]) -> None:
    """Add the other replicas' load in flight to the models of `/admin/pools`, in place."""
    for reported in await loads_elsewhere(peers):
        for model in shown:
            for pool, load in zip(model["pools"], reported.get(model["model"], ()), strict=False):
                pool["inflight"] += load.inflight
                beyond = max(pool["beyond_window_tokens"], load.beyond_window_tokens)
                pool["beyond_window_tokens"] = beyond
                workers = {worker["id"]: worker for worker in pool["workers"]}
                for worker_id, active, tokens in zip(
                    load.ids, load.active, load.tokens, strict=False
                ):
                    if worker_id in workers:
                        workers[worker_id]["active_sequences"] += active
                        workers[worker_id]["reserved_tokens"] += tokens


def running_at(worker: str, loads: Iterable[Mapping[str, Iterable[ReplicaLoad]]]) -> int:
    """Sequences that replicas have at a worker, or at all ranks of an engine."""
    return sum(
        active
        for of_models in loads
        for pools in of_models.values()
        for load in pools
        for name, active in zip(load.ids, load.active, strict=False)
        if worker in (name, name.partition("#")[0])
    )
