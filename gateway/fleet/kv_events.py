"""Subscribes to the events of engines' prefix caches (vLLM 0.32 and newer, --kv-events-config).

ZeroMQ PUB sockets send batches in msgpack, numbered without gaps: a subscriber that falls behind
misses some, and the number tells. Needs the extra `kv-events`.
"""

import asyncio
import contextlib
import importlib
import logging
import time
from collections.abc import Callable, Iterable
from typing import Annotated, Any, Final, Literal

import msgspec

from gateway.fleet import members
from gateway.fleet.model_runtime import ModelRuntime, Pool
from gateway.metrics import Metrics
from gateway.scheduling.prefix_notices import Block, PrefixNotices

_BATCHES: Final = 1_000
"""Batches that may wait to be read."""
_MAX_BYTES: Final = 64 << 20
_HEARTBEAT_MS: Final = 5_000

_log = logging.getLogger("sluice.kv_events")


class _Event(msgspec.Struct):
    type: Literal["BlockStored", "BlockRemoved", "AllBlocksCleared"]
    block_hashes: list[Block] = []
    parent_block_hash: Block | None = None
    block_size: Annotated[int, msgspec.Meta(ge=1)] = 1
    group_idx: int | None = None
    session_id: str | None = None


class _Batch(msgspec.Struct, array_like=True):
    unix_s: float
    events: list[_Event]


_KINDS: Final = {
    "BlockStored": "stored",
    "BlockRemoved": "removed",
    "AllBlocksCleared": "cleared",
}
_decode: Final = msgspec.msgpack.Decoder(_Batch).decode


class _Subscription:
    """What is heard of one worker's engine."""

    def __init__(self, pool: str, endpoint: str, notices: PrefixNotices, metrics: Metrics) -> None:
        self._pool = pool
        self.endpoint = endpoint
        self.notices = notices
        self._metrics = metrics
        self._number: int | None = None
        """Of the last batch; None at the beginning of a connection."""
        self.task = asyncio.ensure_future(self._follow())

    async def _follow(self) -> None:
        """Take what comes until cancelled; the socket connects again by itself."""
        zmq: Any = importlib.import_module("zmq")
        sockets: Any = importlib.import_module("zmq.asyncio")
        with contextlib.ExitStack() as closing:
            socket = closing.enter_context(sockets.Context.instance().socket(zmq.SUB))
            monitor = closing.enter_context(socket.get_monitor_socket(zmq.EVENT_DISCONNECTED))
            # First: writing to a monitor that is closed, the I/O thread of all would wait for ever.
            closing.callback(socket.disable_monitor)
            for option, value in (
                (zmq.RCVHWM, _BATCHES),
                (zmq.MAXMSGSIZE, _MAX_BYTES),
                (zmq.HEARTBEAT_IVL, _HEARTBEAT_MS),
                (zmq.RECONNECT_IVL_MAX, _HEARTBEAT_MS),
                (zmq.IPV6, 1),
                (zmq.LINGER, 0),
                (zmq.SUBSCRIBE, b""),
            ):
                socket.setsockopt(option, value)
            socket.connect(self.endpoint)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._watch(monitor))
                tasks.create_task(self._hear(socket))

    async def _watch(self, monitor: Any) -> None:
        """A lost connection is a gap: after a restart, numbers may go on by chance."""
        while True:
            await monitor.recv_multipart()
            self._number = None
            self._gap()

    async def _hear(self, socket: Any) -> None:
        while True:
            frames: list[bytes] = await socket.recv_multipart()
            before, self._number = self._number, int.from_bytes(b"".join(frames[1:2]), "big")
            if before is not None and self._number != before + 1:
                self._gap()
            self._take(frames[-1])
            await asyncio.sleep(0)  # between two that are there already, requests run

    def _gap(self) -> None:
        self._metrics.kv_events.add(self._pool, "gap")
        self.notices.forget()

    def _take(self, payload: bytes) -> None:
        notices, pool, count = self.notices, self._pool, self._metrics.kv_events
        notices.heard_unix_s = time.time()
        try:
            events = _decode(payload).events
        except msgspec.DecodeError as error:
            if (pool, "malformed") not in count.values:
                _log.warning("events of an engine of pool %s are unknown here: %s", pool, error)
            count.add(pool, "malformed")
            notices.stop()
            return
        for event in events:
            if event.group_idx:  # further groups of layers; the first has all of a prompt
                continue
            count.add(pool, _KINDS[event.type])
            if event.type == "BlockStored":
                session, parent = event.session_id or "", event.parent_block_hash
                notices.stored(session, event.block_hashes, parent, event.block_size)
            elif event.type == "BlockRemoved":
                notices.removed(event.block_hashes)
            else:
                notices.forget()


class KvEvents:
    """The subscriptions of one process: one for each worker with an endpoint and an index."""

    def __init__(self, models: Callable[[], Iterable[ModelRuntime]], metrics: Metrics) -> None:
        self._models = models
        self._metrics = metrics
        self._subscriptions: dict[tuple[Pool, int], _Subscription] = {}

    def look(self) -> None:
        """Subscribe to what workers that came have, and leave what is gone; about once a second."""
        wanted = {
            (pool, worker): (endpoint, pool.prefixes)
            for served in self._models()
            for pool in served.fleet.pools
            for worker, _ in members.present(pool)
            if pool.prefixes is not None and (endpoint := pool.addresses[worker].kv_events)
        }
        for place, held in list(self._subscriptions.items()):
            if wanted.get(place) != (held.endpoint, held.notices.index) or held.task.done():
                self._leave(place)
        for (pool, worker), (endpoint, index) in wanted.items():
            if (pool, worker) not in self._subscriptions:
                notices = pool.notices[worker] = PrefixNotices(index, pool.gossip, worker)
                made = _Subscription(pool.name, endpoint, notices, self._metrics)
                self._subscriptions[pool, worker] = made

    async def close(self) -> None:
        """End all subscriptions."""
        tasks = [held.task for held in self._subscriptions.values()]
        for place in list(self._subscriptions):
            self._leave(place)
        await asyncio.gather(*tasks, return_exceptions=True)

    def _leave(self, place: tuple[Pool, int]) -> None:
        pool, worker = place
        held = self._subscriptions.pop(place)
        if held.task.done() and not held.task.cancelled():
            error = held.task.exception()
            _log.warning("events of %s cannot be heard, next try: %s", held.endpoint, error)
        held.task.cancel()
        held.notices.stop()
        del pool.notices[worker]
