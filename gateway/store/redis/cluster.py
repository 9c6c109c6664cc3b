"""The entitlements that a cluster's controller grants, in Redis: it publishes, gateways read.

One writer at a time: each controller that takes over has a greater epoch, and `lua/cluster.lua`
refuses a lower one, and another namespace's. Revisions only grow, also over servers that were
emptied, so that a gateway never takes an older set for news. A writer that has not written before,
or whose last write the server lost, writes all anew; gateways read nothing before a write is
complete. What another version wrote is left out, alone. Gateways write the demand that they
measured, and the controller reads it. All keys share one hash tag, and contain the number of their
layout. Nothing here retries.
"""

import asyncio
import logging
import time
from collections.abc import Mapping
from contextlib import suppress
from itertools import chain
from typing import Any, Final

import msgspec

from gateway.errors import SluiceError, StateFailure
from gateway.records.tenancy import NOT_GRANTED, ClusterEntitlement, ClusterState
from gateway.store.redis.route import Session, lua, route_of, script

MAX_ENTITLEMENTS: Final = 100_000
BATCH: Final = 250
"""Entitlements in one call, which has to come within TIMEOUT_S."""
SCAN_S: Final = 2.0
"""For each answer of a whole read, which begins anew where one does not come."""
MISSED_MOST: Final = 2_000
"""Changes that a gateway may have missed; after more it reads all."""
DEMAND_S: Final = 60.0
"""How long a measured demand counts."""
OTHER: Final = (
    "the controller of namespace {} publishes in this Redis; give this one a Redis, or a database "
    "of it, of its own; or, if that one is gone for good: redis-cli HDEL '{}' namespace"
)
_PARTS: Final = ("head", "rows", "changed", "gone", "demand")
_encode: Final = msgspec.json.Encoder().encode
_row: Final = msgspec.json.Decoder(ClusterEntitlement).decode
_pools: Final = msgspec.json.Decoder(dict[str, int]).decode
_log = logging.getLogger("sluice.tenancy")


class Fenced(SluiceError):
    """A controller that took over later has written."""

    def __init__(self, epoch: int) -> None:
        super().__init__(f"the controller of epoch {epoch} has written")
        self.epoch = epoch
        """Its own."""


class OtherNamespace(StateFailure):
    """The controller of another namespace publishes here."""


class ClusterStore:
    """The set in Redis. One object is used by one controller or one gateway."""

    def __init__(self, url: str, namespace: str = "") -> None:
        """`url` as in `route`; `namespace` the controller's. Nothing is opened before a call."""
        self._namespace = namespace
        *self._keys, self._demand = [f"sluice:1:{{cluster}}:{part}" for part in _PARTS]
        self._session = Session(route_of(url), self._demand)
        self._script = script("cluster", lua("cluster"))
        self._held: dict[str, ClusterEntitlement] | None = None
        """What Redis holds of this writer at that revision; None if that is not certain."""
        self._revision = 0
        """Of this writer's last write."""
        self._sent_us = 0
        """Orders its calls: one that Redis did not answer in time may come after the next."""

    # -- the controller

    async def publish(
        self, epoch: int, entitlements: Mapping[str, ClusterEntitlement], *, age_s: float
    ) -> None:
        """Have gateways hold exactly these; `age_s` ago the cluster was seen so.

        Call it every few seconds, changed or not: gateways distrust what nobody confirms. Raises
        Fenced if a controller with a greater epoch wrote, and StateFailure, which is
        OtherNamespace where the set is that of another one's objects.
        """
        if (many := len(entitlements)) > MAX_ENTITLEMENTS:
            raise StateFailure(f"{many} entitlements: gateways take {MAX_ENTITLEMENTS} at most")
        for _ in range(2):  # the second time after Redis lost writes
            held = self._held or {}
            puts = [e for name, e in entitlements.items() if held.get(name) != e]
            removes = [name for name in held if name not in entitlements]
            stored, most = 0, max(len(puts), len(removes), 1)
            for at in range(0, most, BATCH):
                some, gone = puts[at : at + BATCH], removes[at : at + BATCH]
                # Until Redis answers, each of these is written again, or removed.
                held.update(dict.fromkeys([*gone, *(e.name for e in some)], NOT_GRANTED))
                self._sent_us = max(self._sent_us + 1, time.time_ns() // 1_000)
                done, *answer = await self._run(
                    *("write", self._revision, MISSED_MOST, epoch, int(self._held is None)),
                    *(int(at + BATCH >= most), round(age_s * 1e6), self._sent_us),
                    *(self._namespace, len(some)),
                    *(part for e in some for part in (e.name, _encode(e))),
                    *gone,
                )
                if int(done) == -2:
                    raise OtherNamespace(OTHER.format(answer[0].decode(), self._keys[0]))
                if int(done) < 0:
                    raise Fenced(int(answer[0]))
                if not int(done):
                    break
                self._revision, stored = map(int, answer)
                self._held = held  # a write that is cut off goes on here
                held.update({e.name: e for e in some})
                for name in gone:
                    del held[name]
            else:
                if stored == many:  # a server short of memory may have dropped the rows alone
                    return
            self._held = None
        raise StateFailure("Redis lost writes, again and again; or another controller writes")

    async def demand(self) -> dict[tuple[str, str], int]:
        """(model, pool) -> desired replicas, as the gateways leading the models measured lately."""
        (now_s, _), demand = await self._session.pipeline([("TIME",), ("HGETALL", self._demand)])
        measured: dict[tuple[str, str], int] = {}
        for model, value in zip(demand[::2], demand[1::2], strict=True):
            at_s, _, pools = value.partition(b" ")
            with suppress(ValueError, msgspec.MsgspecError):  # of another version
                if int(now_s) - int(at_s) <= DEMAND_S:
                    measured.update({(model.decode(), p): n for p, n in _pools(pools).items()})
        return measured

    # -- a gateway

    async def read(self, known: tuple[int, int] = (0, 0)) -> ClusterState | None:
        """What changed after a version; None while nothing as new is published whole.

        Raises StateFailure.
        """
        answer = await self._run("read", known[1], MISSED_MOST, known[0])
        if not answer:
            return None
        epoch, revision, complete, age_us, seen_us, changes, names, rows, removed = answer
        version, whole = (int(epoch), int(revision)), changes != b"1"
        if complete != b"1" or version < known:
            return None
        row_of = dict(zip(names, rows, strict=True))
        if whole:
            cursor = b""
            while cursor != b"0":
                scan = ("HSCAN", self._keys[1], cursor or b"0", "COUNT", BATCH)
                cursor, pairs = await self._session.call(*scan, limit_s=SCAN_S)
                row_of.update(zip(pairs[::2], pairs[1::2], strict=True))
            # What changed meanwhile is read again; unless a writer began, whose rows are not all.
            after = await self._run("read", version[1], MISSED_MOST, epoch)
            if after[2:3] != [b"1"] or after[5] != b"1":
                return None
        # In a thread, because 100,000 are many; its loop lets others run in between.
        granted, unread = await asyncio.to_thread(_read, row_of)
        return ClusterState(
            version=version,
            whole=whole,
            entitlements=tuple(granted),
            removed=(*[name.decode() for name in removed], *unread),
            age_s=int(age_us) / 1e6,
            seen_us=int(seen_us),
        )

    async def report(self, demand: Mapping[str, Mapping[str, int]]) -> None:
        """Have the controller know desired replicas by model and pool. Raises StateFailure."""
        at_s = b"%d " % int((await self._session.call("TIME"))[0])
        measured = [(model, at_s + _encode(pools)) for model, pools in demand.items() if pools]
        if measured:
            await self._session.call("HSET", self._demand, *chain(*measured))

    async def close(self) -> None:
        """Close the connection."""
        await self._session.close()

    async def _run(self, *arguments: object) -> Any:
        call = (len(self._keys), *self._keys, *arguments)
        return (await self._session.run(self._script, [call]))[0]


def _read(row_of: Mapping[bytes, bytes | None]) -> tuple[list[ClusterEntitlement], list[str]]:
    """Entitlements by name, and the names of those that are none here: they open nothing."""
    granted, unread = [], []
    for name, row in row_of.items():
        try:
            granted.append(_row(row or b""))
        except msgspec.MsgspecError as error:
            unread.append(name.decode())
            problem = error
    if unread:
        _log.warning("the cluster grants what makes no sense here: %s: %s", unread[:5], problem)
    return granted, unread
