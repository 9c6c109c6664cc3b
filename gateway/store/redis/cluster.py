"""The entitlements that a cluster's controller grants, in Redis: it publishes, gateways read.

One writer at a time: each controller that takes over has a greater epoch, and `lua/cluster.lua`
refuses a lower one. Revisions only grow, also over servers that were emptied, so that a gateway
never takes an older set for news. A writer that has not written before, or whose last write the
server lost, compares with what is kept, and has gateways read all anew; meanwhile they read
nothing. Back goes the demand that gateways measured. All keys share one hash tag, and contain the
number of their layout. Nothing here retries.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from gateway.errors import SluiceError, StateFailure
from gateway.records.tenancy import ClusterEntitlement, ClusterState
from gateway.store.redis.route import Session, lua, route_of, script

MAX_ENTITLEMENTS: Final = 100_000
BATCH: Final = 250
"""Entitlements in one call, which has to come within TIMEOUT_S."""
READ_MOST: Final = 2_000
"""Most changes that are read one by one."""
GONE_KEPT: Final = 10_000
"""Removed names that are kept for gateways that missed them."""
SCAN_BATCH: Final = 500
DEMAND_S: Final = 60.0
"""How long a measured demand counts."""
_NEWEST: Final = 2**53
"""Reads no change."""
_PARTS: Final = ("head", "rows", "changed", "gone")
_encode: Final = msgspec.json.Encoder().encode
_row: Final = msgspec.json.Decoder(ClusterEntitlement).decode
_pools: Final = msgspec.json.Decoder(dict[str, int]).decode


class Fenced(SluiceError):
    """A controller that took over later has written."""

    def __init__(self, epoch: int) -> None:
        super().__init__(f"the controller of epoch {epoch} has written")
        self.epoch = epoch
        """Its own."""


class ClusterStore:
    """The set in Redis. One object is used by one controller or one gateway."""

    def __init__(self, url: str) -> None:
        """`url` as in `route`. Nothing is opened before the first call."""
        self._keys = tuple(f"sluice:1:{{cluster}}:{part}" for part in _PARTS)
        self._demand = "sluice:1:{cluster}:demand"
        self._session = Session(route_of(url), self._keys[0])
        self._script = script("cluster", lua("cluster"))
        self._held: Mapping[str, ClusterEntitlement | None] | None = None
        """What Redis holds of this writer's; None if that is not certain."""
        self._revision = 0
        """Of this writer's last write."""

    # -- the controller

    async def publish(
        self, epoch: int, entitlements: Mapping[str, ClusterEntitlement], *, age_s: float
    ) -> None:
        """Have gateways hold exactly these; `age_s` ago the cluster was seen so.

        Call it every few seconds, changed or not: gateways distrust what nobody confirms. Raises
        Fenced if a controller with a greater epoch wrote, and StateFailure.
        """
        if len(entitlements) > MAX_ENTITLEMENTS:
            raise StateFailure(
                f"{len(entitlements)} entitlements, and gateways take {MAX_ENTITLEMENTS} at most"
            )
        for _ in range(2):  # the second time after Redis lost writes
            held, self._held = self._held, None  # not certain until all is written
            begins = held is None
            if held is None:
                self._revision, held = await self._kept()
            puts = [e for name, e in entitlements.items() if held.get(name) != e]
            removes = held.keys() - entitlements.keys()
            calls = _calls(puts, sorted(removes))
            for number, (some, gone) in enumerate(calls, start=1):
                first, last = begins and number == 1, number == len(calls)
                answer = await self._run(
                    *("write", epoch, GONE_KEPT, self._revision),
                    "both" if first and last else "first" if first else "last" if last else "",
                    *(round(age_s * 1e6), len(some)),
                    *(part for e in some for part in (e.name, _encode(e))),
                    *gone,
                )
                if int(answer[0]) < 0:
                    raise Fenced(int(answer[1]))
                if not int(answer[0]):
                    break
                self._revision = int(answer[1])
            else:
                # A server short of memory may have dropped the rows alone.
                if int(answer[2]) == len(entitlements):
                    self._held = dict(entitlements)
                    return
        raise StateFailure("Redis lost writes, again and again; or another controller writes")

    async def demand(self) -> dict[tuple[str, str], int]:
        """(model, pool) -> desired replicas, as the gateways leading the models measured lately."""
        (now_s, _), demand = await self._session.pipeline([("TIME",), ("HGETALL", self._demand)])
        found: dict[tuple[str, str], int] = {}
        for model, value in zip(demand[::2], demand[1::2], strict=True):
            at_s, _, pools = value.partition(b" ")
            if int(now_s) - int(at_s) <= DEMAND_S:
                found.update({(model.decode(), p): n for p, n in _pools(pools).items()})
        return found

    # -- a gateway

    async def read(self, since: int) -> ClusterState | None:
        """What changed after a revision; None while nothing is published whole.

        Raises StateFailure.
        """
        head = await self._head(since)
        if not head or head[2] != b"1":
            return None
        whole = head[4] != b"1"
        if whole:
            # What changes meanwhile is read again; unless a writer starts over, which may remove.
            rows, after = list((await self._scanned()).values()), await self._head(int(head[1]))
            if after[2:3] != [b"1"] or after[4] != b"1":
                return None
        else:
            rows = [row for row in head[5] if row is not None]
        try:
            return ClusterState(
                epoch=int(head[0]),
                revision=int(head[1]),
                whole=whole,
                entitlements=tuple([_row(row) for row in rows]),
                removed=tuple([name.decode() for name in head[6]]),
                age_s=int(head[3]) / 1e6,
            )
        except (msgspec.MsgspecError, ValueError) as error:
            raise StateFailure(f"Redis holds entitlements of another version ({error})") from error

    async def report(self, demand: Mapping[str, Mapping[str, int]]) -> None:
        """Have the controller know desired replicas by model and pool. Raises StateFailure."""
        if demand:
            at_s = b"%d " % int((await self._session.call("TIME"))[0])
            fields = (part for m, pools in demand.items() for part in (m, at_s + _encode(pools)))
            await self._session.pipeline(
                [("HSET", self._demand, *fields), ("EXPIRE", self._demand, 3600)]
            )

    async def close(self) -> None:
        """Close the connection."""
        await self._session.close()

    async def _head(self, since: int) -> Any:
        return await self._run("read", since, READ_MOST)

    async def _kept(self) -> tuple[int, Mapping[str, ClusterEntitlement | None]]:
        """Revision and entitlements in Redis, whoever wrote; None for what is unreadable."""
        head = await self._head(_NEWEST)
        held: dict[str, ClusterEntitlement | None] = {}
        for number, (name, row) in enumerate((await self._scanned()).items()):
            try:
                held[name] = _row(row)
            except msgspec.MsgspecError:
                held[name] = None
            if number % BATCH == 0:
                await asyncio.sleep(0)
        return int(head[1]) if head else 0, held

    async def _scanned(self) -> dict[str, bytes]:
        """All rows; of one that is written meanwhile the last."""
        rows: dict[str, bytes] = {}
        cursor = b""
        while cursor != b"0":
            scan = ("HSCAN", self._keys[1], cursor or b"0", "COUNT", SCAN_BATCH)
            cursor, pairs = await self._session.call(*scan)
            rows.update(zip((n.decode() for n in pairs[::2]), pairs[1::2], strict=True))
        return rows

    async def _run(self, *arguments: object) -> Any:
        call = (len(self._keys), *self._keys, *arguments)
        return (await self._session.run(self._script, [call]))[0]


def _calls(
    puts: Sequence[ClusterEntitlement], removes: Sequence[str]
) -> list[tuple[Sequence[ClusterEntitlement], Sequence[str]]]:
    """Both in parts of BATCH; at least one, which may be empty."""
    most = max(len(puts), len(removes), 1)
    return [(puts[at : at + BATCH], removes[at : at + BATCH]) for at in range(0, most, BATCH)]
