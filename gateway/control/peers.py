"""Questions that one replica's control plane asks the other replicas.

A client reaches any one replica, and the answers must not depend on which one. Decisions are found
on the replica that made them, lists and loads cover all replicas, and usage reports reach the
replica that holds the lease. Lists and loads leave out replicas that answer too late, or in another
version's format; what is searched for is called unknown only if every replica says so.

A question says no more than its answer needs, so that its size is bounded: a name, an id, or the
names of one page.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Final, Protocol, TypeVar

import msgspec

from gateway.control.external_admission import Reporter, Settled, UsageReport
from gateway.errors import BadRequest, NotFound
from gateway.fleet.fleet import PoolState
from gateway.fleet.model_runtime import ModelRuntime
from gateway.payload.head import MAX_REQUEST_ID
from gateway.records.record import Record

_json: Final = msgspec.json.Encoder().encode
_pack: Final = msgspec.msgpack.Encoder().encode
_T = TypeVar("_T")


class Peers(Protocol):
    """The other replicas."""

    async def ask(self, topic: str, payload: bytes = b"") -> list[bytes]:
        """Ask all of them; returns the answers received. Raises nothing."""
        ...

    async def search(self, topic: str, payload: bytes) -> list[bytes]:
        """The same; raises Unavailable if there is no answer and a replica could not be asked."""
        ...

    def on(self, topic: str, respond: Callable[[bytes], bytes | None]) -> None:
        """Register the function that answers a topic."""


class Answers(Protocol):
    """Answers to questions from other replicas."""

    def knows(self, token: str) -> bool:
        """Whether this token is valid."""

    def answer(self, topic: str, payload: bytes) -> bytes | None:
        """Answer of this replica; None if it has none. Raises for one of another version."""


class NoPeers:
    """Peers of a single replica."""

    async def ask(self, topic: str, payload: bytes = b"") -> list[bytes]:
        return []

    async def search(self, topic: str, payload: bytes) -> list[bytes]:
        return []

    def on(self, topic: str, respond: Callable[[bytes], bytes | None]) -> None:
        """See Peers."""


def understood(decode: Callable[[bytes], _T], answers: Sequence[bytes]) -> Iterator[_T]:
    """Decoded answers; those of another version's format are left out."""
    for answer in answers:
        try:
            yield decode(answer)
        except (ValueError, msgspec.MsgspecError):
            continue


# -- decisions


class _Timed(msgspec.Struct):
    time_unix_s: float


_timed: Final = msgspec.json.Decoder(list[_Timed]).decode
_asked_by: Final = msgspec.json.Decoder(tuple[str, str]).decode


def _records(answer: bytes) -> list[dict[str, Any]]:
    _timed(answer)
    records: list[dict[str, Any]] = msgspec.json.decode(answer)
    return records


def answer_decisions(
    peers: Peers,
    find: Callable[[str], bytes | None],
    latest: Callable[[int], list[msgspec.Raw]],
) -> None:
    """Answer other replicas' queries from this replica's decision ring."""
    peers.on("decision", lambda payload: find(payload.decode()))
    peers.on("decisions", lambda payload: _json(latest(int(payload))))


async def find_decision(peers: Peers, request_id: str) -> bytes | None:
    """The record of a request from another replica, as JSON."""
    return await _search(peers, "decision", request_id, request_id.encode())


async def _search(peers: Peers, topic: str, request_id: str, payload: bytes) -> bytes | None:
    if len(request_id) > MAX_REQUEST_ID:  # of no request
        return None
    found = await peers.search(topic, payload)
    return found[0] if found else None


def answer_tenant_decisions(peers: Peers, find: Callable[[str, str], bytes | None]) -> None:
    """Answer other replicas' queries of one tenant; `find` takes a request id and the tenant."""

    def found(payload: bytes) -> bytes | None:
        request_id, tenant = _asked_by(payload)
        return find(request_id, tenant)

    peers.on("tenant_decision", found)


async def find_tenant_decision(peers: Peers, request_id: str, tenant: str) -> bytes | None:
    """What a tenant may see of its own request, from another replica, as JSON."""
    return await _search(peers, "tenant_decision", request_id, _json((request_id, tenant)))


async def newest(
    peers: Peers, topic: str, own: Sequence[object], count: int
) -> list[dict[str, Any]]:
    """The newest records of all replicas, newest first; `own` are this replica's."""
    reported = [_json(own), *await peers.ask(topic, b"%d" % count)]
    merged = [record for records in understood(_records, reported) for record in records]
    return sorted(merged, key=lambda record: -record["time_unix_s"])[:count]


def answer_audit(peers: Peers, audit: Callable[[int], list[dict[str, object]]]) -> None:
    """Answer other replicas' queries from this replica's audit."""
    peers.on("audit", lambda payload: _json(audit(int(payload))))


# -- counts of entitlements

Counts = dict[str, dict[str, int]]
"""By entitlement, and by what is counted."""
_counts: Final = msgspec.json.Decoder(Counts).decode
_names: Final = msgspec.json.Decoder(list[str]).decode


def answer_counts(peers: Peers, topic: str, count: Callable[[Collection[str]], Counts]) -> None:
    """Tell other replicas what this replica counted of some entitlements."""
    peers.on(topic, lambda payload: _json(count(_names(payload))))


async def all_counts(peers: Peers, topic: str, own: Counts) -> Counts:
    """What all replicas counted of some entitlements; `own` is this replica's count of each."""
    total = {name: Counter(counts) for name, counts in own.items()}
    if total:
        for reported in understood(_counts, await peers.ask(topic, _json(list(own)))):
            for name in total.keys() & reported.keys():
                total[name].update(reported[name])
    return {name: dict(counts) for name, counts in total.items()}


# -- load


class _ReplicaLoad(Record, frozen=True, kw_only=True):
    inflight: int
    beyond_window_tokens: int
    active: list[int]
    tokens: list[int]
    ids: tuple[str, ...]
    """Their workers."""


_loads: Final = msgspec.msgpack.Decoder(dict[str, list[_ReplicaLoad]]).decode


def answer_load(
    peers: Peers, models: Sequence[ModelRuntime], retiring: Sequence[ModelRuntime] = ()
) -> None:
    """Tell other replicas this replica's load in flight.

    `retiring`: models, or parts of them, that a reload removed; no model's own figures count them.
    """

    def load(_: bytes) -> bytes:
        told = {served.name: [_load_of(p) for p in served.fleet.pools] for served in models}
        here = {id(p) for served in models for p in served.fleet.pools}
        gone = {id(p): p for m in retiring for p in m.fleet.pools if id(p) not in here}
        if gone:
            told[""] = [_load_of(pool) for pool in gone.values()]
        return _pack(told)

    peers.on("load", load)


def _load_of(pool: PoolState) -> _ReplicaLoad:
    return _ReplicaLoad(
        inflight=pool.inflight,
        beyond_window_tokens=pool.beyond_window_tokens,
        ids=tuple(pool.workers),
        active=list(pool.active),
        tokens=list(pool.tokens),
    )


async def add_load(peers: Peers, shown: Sequence[Mapping[str, Any]]) -> None:
    """Add the other replicas' load in flight to the models of `/admin/pools`, in place."""
    for reported in understood(_loads, await peers.ask("load")):
        for model in shown:
            for pool, load in zip(model["pools"], reported.get(model["model"], ()), strict=False):
                pool["inflight"] += load.inflight
                beyond = max(pool["beyond_window_tokens"], load.beyond_window_tokens)
                pool["beyond_window_tokens"] = beyond
                known = {worker["id"]: worker for worker in pool["workers"]}
                for worker_id, active, tokens in zip(
                    load.ids, load.active, load.tokens, strict=False
                ):
                    if worker_id in known:
                        known[worker_id]["active_sequences"] += active
                        known[worker_id]["reserved_tokens"] += tokens


def answer_reload(peers: Peers, reload: Callable[[], None]) -> None:
    """Reload when another replica was told to."""

    def begin(_: bytes) -> None:
        reload()

    peers.on("reload", begin)


async def load_at(peers: Peers, worker: str) -> int:
    """Sequences that the other replicas have at a worker, or at all ranks of an engine."""
    return sum(
        active
        for reported in understood(_loads, await peers.ask("load"))
        for pools in reported.values()
        for load in pools
        for name, active in zip(load.ids, load.active, strict=False)
        if worker in (name, name.partition("#")[0])
    )


# -- usage that another proxy reports


class _Reported(Record, frozen=True, kw_only=True):
    report: UsageReport
    reporter: Reporter


class _SettleAnswer(Record, frozen=True, kw_only=True):
    settled: Settled | None = None
    message: str = ""
    """Why the report was refused."""
    reason: str = ""
    code: str | None = None
    param: str | None = None


_reported: Final = msgspec.msgpack.Decoder(_Reported).decode
_answer: Final = msgspec.msgpack.Decoder(_SettleAnswer).decode
Settle = Callable[[UsageReport, Reporter], Settled]


def answer_usage(peers: Peers, settle: Settle) -> None:
    """Settle leases that this replica holds, for usage reported to other replicas."""

    def settled(payload: bytes) -> bytes | None:
        reported = _reported(payload)
        try:
            return _pack(_SettleAnswer(settled=settle(reported.report, reported.reporter)))
        except NotFound:
            return None
        except BadRequest as error:
            return _pack(
                _SettleAnswer(
                    message=error.message, reason=error.reason, code=error.code, param=error.param
                )
            )

    peers.on("usage", settled)


async def settle_anywhere(
    peers: Peers, settle: Settle, report: UsageReport, reporter: Reporter
) -> Settled:
    """Settle a lease on the replica that holds it. Raises NotFound, BadRequest, Unavailable."""
    try:
        return settle(report, reporter)
    except NotFound as unknown:
        asked = _pack(_Reported(report=report, reporter=reporter))
        answers = list(understood(_answer, await peers.search("usage", asked)))
        if not answers:
            raise unknown from None
        answer = answers[0]
        if answer.settled is None:
            raise BadRequest(
                answer.message, reason=answer.reason, code=answer.code, param=answer.param
            ) from None
        return answer.settled
