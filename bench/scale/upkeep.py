"""`bench scale`, upkeep: background work beside requests, with 4 to 2,000 workers.

Pages of engines' metrics and health probes go through the shipped readers and their connections
over a transport without sockets, which answers within 20 ms; the cost of sockets is extra. Other
chores are called as the gateway's tasks call them.
"""

import asyncio
import gc
import tracemalloc
from collections import deque
from hashlib import sha256
from itertools import chain
from random import Random
from typing import Any, Final

import msgspec

from bench.scale.measure import WatchedLoop, clock_ns, least_us, resident_bytes, watched
from bench.scale.traffic import SLOTS, ChatBodies, Size, fleet_of, fleet_text, key_of
from gateway.admission.capacity import WorkerShare
from gateway.admission.terms import Terms
from gateway.admission.token_pool import TokenPool
from gateway.fleet import fleet
from gateway.fleet.engine_metrics import read_page
from gateway.fleet.model_runtime import ModelRuntime
from gateway.fleet.probes import Prober
from gateway.payload.members import by_name
from gateway.replicas.notes import SchedulerNotes
from gateway.scheduling.prefix_digests import points_of
from gateway.scheduling.prefix_index import PrefixIndex
from gateway.settings import ConfigError, HealthConfig, SchedulingConfig, parse
from gateway.store.memory_leases import MemoryLeases
from gateway.store.upkeep import ModelSpec, StoreUpkeep
from gateway.upstream import ConnectionKey, HttpUpstream, UpstreamConnection

Figures = dict[str, float]
_ANSWERS_S: Final = 0.02
_BATCH: Final = 10
"""Pages on their way at a time: 500/s of 20 ms each."""
_KV_LINE: Final = 'vllm:cache_config_info{block_size="16",num_gpu_blocks="20000"} 1.0\n'


def engine_page() -> bytes:
    """As long as a vLLM's page: some 45 KB, most of it histograms."""
    lines = [
        'vllm:num_requests_running{engine="0",model_name="m"} 3.0\n',
        'vllm:num_requests_waiting{engine="0",model_name="m"} 0.0\n',
        'vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.4\n',
        'vllm:prompt_tokens_total{engine="0",model_name="m"} 81234.0\n',
        'vllm:generation_tokens_total{engine="0",model_name="m"} 41234.0\n',
        _KV_LINE,
    ]
    bucket = 'vllm:request_prefill_time_seconds_bucket{engine="0",le="%d",model_name="m"} 7.0\n'
    return ("".join(lines) + "".join(bucket % number for number in range(560))).encode()


class _Engines:
    """The gateway's own connections to engines that answer after a while; no sockets."""

    def __init__(self) -> None:
        self.random = Random(3)
        self.answers = {b"/metrics": _answer(engine_page()), b"/health": _answer(b"")}
        self.models = _answer(b'{"data": [{"id": "m"}]}')

    async def connect(
        self,
        upstream: HttpUpstream,
        loop: asyncio.AbstractEventLoop,
        key: ConnectionKey,
        connect_s: float,
    ) -> UpstreamConnection:
        """See HttpUpstream."""
        connection = UpstreamConnection(upstream, key)
        connection.connection_made(_Wire(self, connection, loop))
        return connection


class _Wire(asyncio.Transport):
    """One connection: what is written is answered later."""

    def __init__(
        self, engines: _Engines, connection: UpstreamConnection, loop: asyncio.AbstractEventLoop
    ) -> None:
        super().__init__()
        self._engines, self._connection, self._loop = engines, connection, loop

    def write(self, data: Any) -> None:
        """See asyncio.Transport."""
        engines = self._engines
        answer = engines.answers.get(bytes(data).split(b" ", 2)[1], engines.models)
        later_s = engines.random.uniform(0, _ANSWERS_S)
        self._loop.call_later(later_s, self._connection.data_received, answer)

    def get_write_buffer_size(self) -> int:
        """Nothing is buffered."""
        return 0

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """See asyncio.Transport."""

    def is_closing(self) -> bool:
        """See asyncio.Transport."""
        return False

    def resume_reading(self) -> None:
        """See asyncio.Transport."""

    def abort(self) -> None:
        """See asyncio.Transport."""


def _answer(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)


def upkeep_point(size: Size) -> Figures:
    """CPU of each chore, and the longest turn of the loop that it takes."""
    served = fleet_of("quartz", size.workers)
    found = _pages(served, size) | _probes(served, size) | _scheduler(served, size)
    token_pool = TokenPool(Terms(slots=(SLOTS * size.workers,)))
    store = MemoryLeases({"m": served}, _clock, {"m": token_pool}, wall_clock=_clock)
    spec = ModelSpec(
        base=token_pool.terms,
        pools=served.fleet.pools,
        shares=(WorkerShare(slots=SLOTS, replicas=(1, size.workers)),),
        entitlements=tuple,
        kv_bytes=lambda pool, worker: served.fleet.pools[pool].kv_tokens.get(worker, 0),
    )
    upkeep = StoreUpkeep(store, {"m": spec}, _clock, _clock)
    watched(upkeep.step)
    _, found["keeper_ms"], _ = watched(upkeep.step)
    return found


def _clock() -> float:
    return 1_000.0


def _pages(served: ModelRuntime, size: Size) -> Figures:
    page = engine_page()
    parse_us = least_us(lambda: read_page(page), 50)

    async def read() -> float:
        prober = Prober(
            [served],
            interval_s=2.0,
            timeout_s=2.0,
            upstream=HttpUpstream(_Engines().connect),
            clock=_clock,
        )
        workers = range(size.workers)
        for start in range(0, size.workers, _BATCH):
            part = workers[start : start + _BATCH]
            await asyncio.gather(*(prober.read(served, 0, worker) for worker in part))
        return prober.page_interval_s

    interval_s, spent_ms, _ = watched(read)
    each_us = spent_ms * 1e3 / size.workers
    return {
        "page_parse_us": parse_us,
        "page_us": each_us,
        "page_interval_s": interval_s,
        "pages_share": each_us * size.workers / interval_s / 1e6,
    }


def _probes(served: ModelRuntime, size: Size) -> Figures:
    """A round of probes in the background, as it is while requests are served."""
    interval_s = HealthConfig().interval_s

    async def probe() -> tuple[float, float]:
        prober = Prober(
            [served],
            interval_s=interval_s,
            timeout_s=5.0,
            upstream=HttpUpstream(_Engines().connect),
        )
        await prober.start()  # the first asks for windows, too
        await asyncio.sleep(interval_s)
        loop = asyncio.get_running_loop()
        assert isinstance(loop, WatchedLoop)
        loop.holds_ms.clear()
        begin_ns = clock_ns()
        await asyncio.sleep(interval_s)
        found = (clock_ns() - begin_ns) / 1e6, max(loop.holds_ms)
        await prober.close()
        return found

    (spent_ms, hold_ms), _, _ = watched(probe)
    return {
        "probe_us": spent_ms * 1e3 / size.workers,
        "probe_interval_s": interval_s,
        "probes_share": spent_ms / 1e3 / interval_s,
        "probes_hold_ms": hold_ms,
    }


def _scheduler(served: ModelRuntime, size: Size) -> Figures:
    """A tick, the notes for other replicas, and a worker that goes and returns."""
    scheduler = served.scheduling.schedulers[0]
    assert scheduler is not None
    notes = SchedulerNotes([served], _Board(), "p", lambda _: 2, _clock)
    pool = served.fleet.pools[0]

    def flap() -> None:
        fleet.probed(pool, 0, ok=False)
        scheduler.tick(_clock())
        fleet.probed(pool, 0, ok=True)
        scheduler.tick(_clock())

    return {
        "tick_us": least_us(lambda: scheduler.tick(_clock())),
        "notes_ms": least_us(lambda: deque(chain(notes.send(), notes.receive()), maxlen=0)) / 1e3,
        "flap_ms": least_us(flap) / 1e3 / 2,
    }


class _Board:
    """Where one other replica has the same to say."""

    def __init__(self) -> None:
        self._payload = b""

    def publish(self, name: str, payload: bytes) -> None:
        """See Board."""
        self._payload = payload

    def peers(self, name: str) -> list[bytes]:
        """See Board."""
        note = msgspec.msgpack.decode(self._payload)
        return [msgspec.msgpack.encode({**note, "replica": "q"})]


def file_point(size: Size) -> Figures:
    """A configuration of so many entitlements: read, checked, and what it takes meanwhile."""
    text = (
        fleet_text("quartz", 4)
        + "entitlements:\n"
        + "".join(
            f"  - {{name: e{n}, model: m, tenant: t, service_class: elastic, "
            f'api_keys: ["sha256:{sha256(key_of(n)).hexdigest()}"]}}\n'
            for n in range(size.entitlements)
        )
    )
    resident = resident_bytes()
    began_ns = clock_ns()
    try:
        parse(text, "scale.yaml", {})
        fits = 1.0
    except ConfigError:
        fits = 0.0
    return {
        "fits": fits,
        "text_bytes": len(text),
        "parse_ms": (clock_ns() - began_ns) / 1e6,
        "resident_bytes": resident_bytes() - resident,
    }


def index_point(size: Size) -> Figures:
    """Memory of a prefix index that so many prompts of conversations went through."""
    talk, facts = ChatBodies(8 * size.workers), 4_000
    index = PrefixIndex(size.workers, max_entries=SchedulingConfig().prefix_entries)
    bodies = (talk.body() for _ in range(size.requests))
    gc.collect()
    tracemalloc.start()
    for number, body in enumerate(bodies):
        index.insert(points_of("chat", by_name(body), facts), number % size.workers, 0.25)
    size_bytes = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return {"entries": len(index), "bytes": size_bytes, "bytes_each": size_bytes / len(index)}
