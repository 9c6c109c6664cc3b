"""One poll of each engine: health, sleep, models, KV cache, metrics, and its progress.

Each engine has one task; its ranks share its pages and the verdict. A probe changes only whether a
worker is in rotation, never its load. `gateway.fleet.fleet` decides how many missed probes take a
worker out. A worker that refused a request's connection is probed at the next interval and returns
by itself. Probes are spread evenly over the interval, because thousands at once would block the
event loop.

Where a model's decisions use its engines' metrics, their pages are read about once a second,
between the probes. With many engines the interval grows, because reading pages shares the event
loop with requests, but it stays below the age at which a sample becomes stale. Requests never wait
for a page.
"""

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from math import floor, inf
from typing import Final

from gateway.background_task import BackgroundTasks
from gateway.errors import UpstreamFailure
from gateway.fleet import fleet
from gateway.fleet.engine_metrics import (
    ALIASES,
    NEEDED,
    STALE_S,
    EngineModel,
    EngineSample,
    is_asleep,
    not_served,
    read_adapters,
    read_kv_tokens,
    read_models,
    read_page,
    record,
)
from gateway.fleet.model_runtime import ModelRuntime, Pool
from gateway.ports import Upstream, UpstreamCall
from gateway.records.attempt import PhaseTimeouts, WorkerAddress
from gateway.records.endpoint import matches
from gateway.records.record import Record

PROBE_BATCH: Final = 128
"""Engines probed concurrently before the first request is served."""
OWN_SHARE: Final = 0.25
"""Share of a probe's time limit. After a longer stall of the event loop, a time-out is ignored."""
MODELS_EVERY: Final = 15
"""Probes for one reading of a worker's model list: adapters may be loaded at any time."""
PAGES_EVERY_S: Final = 1.0
MAX_PAGES_PER_S: Final = 128.0
"""Limit over all engines, unless samples would become stale."""
JITTER: Final = 0.1
MAX_INTERVAL_S: Final = 0.8 * STALE_S
"""Between two metrics pages; with jitter and response time, this stays below STALE_S."""
BEAT_S: Final = 0.1
NOTED_S: Final = 0.05
"""A shorter delay of the event loop is a busy loop, not a stall."""
_MAX_PAUSE_S: Final = 60.0
_SHOWN: Final = 5
"""Most adapters named in a line of the log."""

_log = logging.getLogger("sluice.probes")
_telemetry_log = logging.getLogger("sluice.telemetry")

OnFrozen = Callable[[ModelRuntime, Pool, int], None]
"""Called with (model, pool, worker) of a frozen engine, which gives no token to any client."""


class Prober:
    """Polls every engine of every model until stopped."""

    def __init__(
        self,
        models: Iterable[ModelRuntime],
        *,
        interval_s: float,
        timeout_s: float,
        upstream: Upstream,
        clock: Callable[[], float] = time.monotonic,
        on_frozen: OnFrozen | None = None,
    ) -> None:
        """`upstream` provides connections; `clock` is the requests' clock.

        `on_frozen` is called at each probe while an engine is frozen.
        """
        self._on_frozen = on_frozen
        self._interval_s = interval_s
        self._timeout_s = timeout_s
        self._clock = clock
        self._pages = EnginePages(upstream, timeout_s)
        self._background = BackgroundTasks()
        self._timer: asyncio.TimerHandle | None = None
        self._due_s = inf
        """When the timer fires, by the loop's clock."""
        self._late_s = 0.0
        self._told: set[tuple[str, str]] = set()
        """(model, what): of which a line in the log told; once for a model."""
        self._served: dict[Pool, ModelRuntime] = {}
        """Pool -> the model that has it now."""
        for served in models:
            self.follow(served, served.fleet.pools)

    def follow(self, served: ModelRuntime, pools: Iterable[Pool]) -> None:
        """Poll these pools' engines for this model from now on."""
        self._served |= dict.fromkeys(pools, served)

    async def start(self) -> None:
        """Probe every engine once, then continue in the background."""
        self._beat()
        engines = [(pool, e.ranks[0]) for pool in self._served for e in pool.engines]
        await self.look(engines)
        for number, (pool, worker) in enumerate(engines):
            self.watch(pool, worker, delay_s=self._interval_s * (1 + number / len(engines)))

    async def look(self, engines: Sequence[tuple[Pool, int]]) -> None:
        """Probe these engines, by pool and first worker, once, PROBE_BATCH at a time."""
        left = iter(engines)

        async def some() -> None:
            for which in left:
                await self._safely(self.probe, *which)

        await asyncio.gather(*(some() for _ in range(min(PROBE_BATCH, len(engines)))))

    def tune(self, interval_s: float, timeout_s: float) -> None:
        """Probe at another interval, with another time limit."""
        self._interval_s, self._timeout_s = interval_s, timeout_s
        self._pages.limit(timeout_s)

    def watch(self, pool: Pool, worker: int, delay_s: float = 0.0) -> None:
        """Probe a new engine in `delay_s` seconds, and poll it from then on."""
        at_s = asyncio.get_running_loop().time() + delay_s
        self._background.start(self._run(pool, worker, at_s), key=(pool, worker))

    def leave(self, pool: Pool, worker: int) -> None:
        """Stop polling an engine."""
        self._background.end((pool, worker))

    def drop(self, pool: Pool) -> None:
        """Stop polling a pool that is gone."""
        for engine in pool.engines:
            self.leave(pool, engine.ranks[0])
        self._served.pop(pool, None)

    async def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._due_s = inf
        await self._background.close()

    @property
    def page_interval_s(self) -> float:
        """Seconds between two metrics pages of an engine that responds, by their number."""
        pages = sum(len(p.engines) for p, m in self._served.items() if m.fleet.reads_metrics)
        return max(PAGES_EVERY_S, min(pages / MAX_PAGES_PER_S, MAX_INTERVAL_S))

    async def _run(self, pool: Pool, worker: int, probe_at_s: float) -> None:
        """Probe an engine at that time of the loop and every interval after it; read its pages."""
        loop = asyncio.get_running_loop()
        pause_s = self.page_interval_s
        # Spread over the first interval, so that the pages do not arrive all at once.
        read_at_s = loop.time() + random.uniform(0, pause_s)
        while True:
            reads = self._served[pool].fleet.reads_metrics and read_at_s < probe_at_s
            await asyncio.sleep((read_at_s if reads else probe_at_s) - loop.time())
            if not reads:
                await self._safely(self.probe, pool, worker)
                # A fixed schedule keeps engines spread; a probe that overruns skips its next turn.
                overrun_s = max(0.0, loop.time() - probe_at_s)
                probe_at_s += self._interval_s * (1 + floor(overrun_s / self._interval_s))
                continue
            # Who missed the last probe is not asked: its page would delay the next one.
            asked = not pool.engine_of[worker].why_down
            if asked and await self._safely(self.read, pool, worker):
                pause_s = self.page_interval_s
            else:
                for rank in pool.engine_of[worker].ranks:
                    fleet.heard(pool, rank, 0)
                pause_s = max(min(2 * pause_s, _MAX_PAUSE_S) if asked else 0, self.page_interval_s)
            read_at_s = loop.time() + pause_s * random.uniform(1 - JITTER, 1 + JITTER)

    async def _safely(
        self, work: Callable[[Pool, int], Awaitable[bool]], pool: Pool, worker: int
    ) -> bool:
        try:
            return await work(pool, worker)
        except Exception:  # noqa: BLE001 - a defect must end neither the polls nor the start
            _log.exception("probing worker %s failed", pool.addresses[worker].id)
            return False

    async def probe(self, pool: Pool, worker: int) -> bool:
        """Probe one worker and apply the verdict to its engine; returns whether it is healthy."""
        address, engine, served = pool.addresses[worker], pool.engine_of[worker], self._served[pool]
        late_s = self._stalled_s()
        refused, unfit = False, False
        try:
            why, unfit = await self._ails(pool, worker)
        except NOT_HAD as error:
            # Compiled code sets no cause.
            refused = isinstance(error.__cause__ or error.__context__, ConnectionRefusedError)
            why = self._reason_of(error, address.id, late_s, refused=refused)
            if not why:
                return engine.up
        answers = engine.progress.look(self._clock(), self._stalled_s())
        if why:
            engine.models_read_s = -inf
        # `RotationLog` tells what a verdict changes.
        if unfit:
            fleet.unfit(pool, worker, why)
        elif not why:
            fleet.probed(pool, worker, ok=True)
        elif refused and not answers:
            fleet.unreachable(pool, worker, why)
        else:
            fleet.missed(pool, worker, why, answers=answers)
            if engine.up:
                place = f"{served.name}/{pool.name}"
                _log.info("worker %s of %s missed a probe: %s", address.id, place, why)
        await self._look_for_frost(pool, worker)
        if not engine.up:
            engine.kv_read = False  # it may come back with another capacity
        # KV capacity is read once since the engine came up, where it matters.
        elif not why and not engine.kv_read:
            kv_bytes = served.admission.kv_bytes_per_token
            if kv_bytes or served.fleet.reads_metrics:
                engine.kv_read = True
                await self._read_kv(pool, worker, kv_bytes)
        return not why

    def _reason_of(self, error: Exception, worker: str, late_s: float, *, refused: bool) -> str:
        """What a probe that failed says of the engine; "" if this process is to blame."""
        kind, own_s = getattr(error, "kind", ""), self._stalled_s() - late_s
        if kind == "local":  # this machine could not send the probe
            return ""
        if isinstance(error, TimeoutError) or kind == "timeout":
            if own_s > OWN_SHARE * self._timeout_s:
                _log.info("no verdict on %s: this process stood still %.1f s", worker, own_s)
                return ""
            return f"no answer to a probe within {self._timeout_s:g} s"
        return "it refuses connections" if refused else f"a probe failed: {error}"

    async def _ails(self, pool: Pool, worker: int) -> tuple[str, bool]:
        """Why an engine cannot serve, "" if it can; and whether it says so itself.

        Where it says itself that it does not fit, one word is enough, and nothing is sent there.
        Its model list is asked for now and then, and in doubt: it may change what it serves at any
        time, as another model is swapped in, or adapters are loaded.
        Raises the exceptions in `NOT_HAD`.
        """
        address, engine, served = pool.addresses[worker], pool.engine_of[worker], self._served[pool]
        page, path = await self._pages.get(address, "/health"), "/health"
        if page is not None and page.status == 404:  # not every engine has /health
            page, path = await self._pages.get(address, "/v1/models"), "/v1/models"
            if page is not None and page.status == 404:
                return "/health and /v1/models answered 404: is the URL's path right?", False
        if page is None or page.status >= 500:
            return f"{path} answered {'too much' if page is None else page.status}", False
        # An engine without the page is asked again when it comes back.
        if not engine.sleepless or not engine.up:
            page = await self._pages.get(address, "/is_sleeping")
            if page is not None and page.status == 200:
                engine.sleepless = False
                if is_asleep(page.body):  # vLLM's sleep mode, where requests would hang
                    return "it sleeps: wake it with POST /wake_up", True
            elif page is not None and page.status in (404, 405):
                engine.sleepless = True
        in_doubt = not engine.up or (pool, worker) in served.adapters.doubted
        if not in_doubt and self._clock() - engine.models_read_s < MODELS_EVERY * self._interval_s:
            return "", False
        try:
            page = await self._pages.get(address, "/v1/models")
        except NOT_HAD:
            return "", False  # it is healthy; the next probe asks again
        if page is not None and page.status in (401, 403):
            what = "wants a key" if address.api_key is None else "refuses the key"
            why = f"/v1/models answered {page.status}, it {what}: set the worker's `api_key`"
            return why, False
        models = [] if page is None or page.status != 200 else read_models(page.body)
        if why := not_served(models, address.served_model or served.name):
            return why, True
        engine.models_read_s = self._clock()
        self._note_models(served, pool, worker, models)
        return "", False

    def _note_models(
        self, served: ModelRuntime, pool: Pool, worker: int, models: list[EngineModel]
    ) -> None:
        """Compare an engine's own window with the configured one, and note its LoRA adapters."""
        engine, address = pool.engine_of[worker], pool.addresses[worker].id
        place = served.fleet.route_of(served.fleet.pools.index(pool))
        expected = served.routing.pools[place].window_tokens
        windows = {model.window_tokens for model in models if model.window_tokens is not None}
        remark = ""
        if windows and expected not in windows:
            shown = ", ".join(map(str, sorted(windows)))
            remark = (
                f"reports max_model_len {shown}, but pool {pool.name} says {expected}: set it to "
                "the engine's"
            )
            if engine.remark != remark:
                _log.warning("worker %s %s", address, remark)
        engine.remark = remark
        if not models:
            return
        adapters = [model.name for model in models if model.parent is not None]
        known, aliases = served.adapters, served.aliases
        named = (*known.named, *aliases)
        taken = [n for n in adapters if known.discovers or any(matches(a, n) for a in named)]
        met, new = set(known.names), list[str]()
        for rank in engine.ranks:
            new = known.listed(pool, rank, taken)
        if new:
            names = ", ".join(new[:_SHOWN])
            _log.info("worker %s has %d more LoRA adapters: %s", address, len(new), names)
        for name in (set(new) & aliases) - met:
            _log.warning(
                "alias %s of %s is a LoRA adapter at worker %s, which answers under that name: "
                "move it from `aliases` to `loras`",
                name,
                served.name,
                address,
            )
        ignored = [name for name in adapters if name not in taken]
        if ignored and self._once(served, "adapters"):
            _log.info(
                "worker %s lists LoRA adapters that the configuration does not name, such as %s: "
                "clients can use them once they stand in `loras` of %s, or `discover_loras` is on",
                address,
                ignored[0],
                served.name,
            )

    async def _look_for_frost(self, pool: Pool, worker: int) -> None:
        """Check whether a silent engine still computes for other clients; report a frozen one."""
        address, engine, served = pool.addresses[worker], pool.engine_of[worker], self._served[pool]
        progress = engine.progress
        if not progress.silent_s:
            engine.counted = None
            return
        counted = await self._pages.counted(address)
        if counted is not None:
            before, engine.counted = engine.counted, counted
            if before is not None and counted != before:
                progress.got_on()
                return
        if self._on_frozen is not None and progress.frozen(served.fleet.health.stall_s):
            _log.warning(
                "worker %s of %s/%s is frozen: %d requests wait, and for %.0f s nobody was given "
                "a token",
                *(address.id, served.name, pool.name, len(progress.waiting()), progress.silent_s),
            )
            self._on_frozen(served, pool, worker)

    async def _read_kv(self, pool: Pool, worker: int, bytes_a_token: int) -> None:
        """Read a healthy engine's KV capacity.

        Of an engine that does not report it, limits apply only if the configuration states it.
        """
        body = await self._pages.metrics(pool.addresses[worker])
        for rank in pool.engine_of[worker].ranks:
            address = pool.addresses[rank]
            tokens = 0 if body is None else read_kv_tokens(body, address.rank)
            if bytes_a_token and tokens and tokens != pool.kv_tokens.get(rank):
                gib = tokens * bytes_a_token / (1 << 30)
                _log.info(
                    "worker %s has a KV cache of %d tokens, %.1f GiB", address.id, tokens, gib
                )
            pool.kv_tokens[rank] = tokens

    async def read(self, pool: Pool, worker: int) -> bool:
        """Read an engine's metrics page into the pool's view; False if that could not be.

        No response of an engine makes it raise.
        """
        served, body = self._served[pool], await self._pages.metrics(pool.addresses[worker])
        if body is None:
            return False
        reports, running = False, read_adapters(body)
        for rank in pool.engine_of[worker].ranks:
            address = pool.addresses[rank]
            sample = read_page(body, address.rank)
            if sample == EngineSample():
                if self._once(served, "metrics"):
                    _telemetry_log.warning(
                        "worker %s of %s tells no metrics known here", address.id, served.name
                    )
                continue
            reports = True
            if running is not None:
                served.adapters.running(pool, rank, running.names, running.most)
            for field in NEEDED:
                if getattr(sample, field) is None and self._once(served, field):
                    _telemetry_log.warning(
                        "worker %s of %s does not tell %s (none of %s)",
                        *(address.id, served.name, field, ", ".join(ALIASES[field])),
                    )
            fleet.heard(pool, rank, (sample.running or 0) + (sample.waiting or 0))
            if record(pool.view, rank, sample, self._clock()):
                _telemetry_log.info(
                    "worker %s restarted: its prefix cache is taken to be empty", address.id
                )
                if pool.prefixes is not None:
                    pool.prefixes.forget(rank)
        return reports

    def _once(self, served: ModelRuntime, what: str) -> bool:
        """Whether this is told of a model for the first time."""
        new = (served.name, what) not in self._told
        self._told.add((served.name, what))
        return new

    def _stalled_s(self) -> float:
        """Seconds that this process has stood still so far, for which no engine is blamed.

        While a long computation holds the loop, the gateway reads no response, however early it
        arrived. A timer fires ten times a second, and its delay tells.
        """
        late_s = asyncio.get_running_loop().time() - self._due_s
        return self._late_s + (late_s if late_s > NOTED_S else 0.0)

    def _beat(self) -> None:
        loop = asyncio.get_running_loop()
        self._late_s = self._stalled_s()
        self._due_s = loop.time() + BEAT_S
        self._timer = loop.call_at(self._due_s, self._beat)


MAX_PAGE_BYTES: Final = 8 * 1024 * 1024
"""Longest page; a longer one is ignored."""
_LINES: Final = b"accept: */*\r\nuser-agent: sluice\r\n"

LOOKS: Final = 3
LOOK_EVERY_S: Final = 1.0
Counted = tuple[float | None, float | None]
"""Tokens of prompts and of answers, as an engine counts them."""

NOT_HAD: Final = (UpstreamFailure, OSError)
"""The exceptions that `EnginePages.get` raises; a time-out is an OSError."""


class Page(Record, frozen=True):
    """An engine's response."""

    status: int
    body: bytes


class EnginePages:
    """Gets pages of engines, each whole response within `timeout_s`."""

    def __init__(self, upstream: Upstream, timeout_s: float) -> None:
        self._upstream = upstream
        self._calls: dict[str, UpstreamCall] = {}
        self._looks: dict[str, asyncio.Task[bool]] = {}
        """By URL of the engine: all who ask at once share the answer."""
        self.limit(timeout_s)

    def limit(self, timeout_s: float) -> None:
        """Set the time limit of a page."""
        self._timeout_s = timeout_s
        self._timeouts = PhaseTimeouts(
            connect_s=timeout_s, first_byte_s=timeout_s, idle_s=timeout_s
        )
        self._calls.clear()

    async def get(
        self, address: WorkerAddress, path: str, most_bytes: int = MAX_PAGE_BYTES
    ) -> Page | None:
        """Get a page; None if it is longer than `most_bytes`. Raises exceptions in `NOT_HAD`."""
        async with asyncio.timeout(self._timeout_s):
            if (call := self._calls.get(path)) is None:
                call = self._calls[path] = UpstreamCall(
                    method="GET", path=path, lines=_LINES, body=b"", timeouts=self._timeouts
                )
            answer = await self._upstream.open(address, call)
            try:
                pieces: list[bytes] = []
                length = 0
                while data := await answer.read():
                    pieces.append(data)
                    length += len(data)
                    if length > most_bytes:
                        answer.abort()
                        return None
            except BaseException:
                answer.abort()
                raise
        return Page(answer.status, b"".join(pieces))

    async def metrics(self, address: WorkerAddress) -> bytes | None:
        """An engine's /metrics page; None if it cannot be had. No answer makes it raise."""
        try:
            page = await self.get(address, "/metrics", MAX_PAGE_BYTES)
        except NOT_HAD:
            return None
        return page.body if page is not None and page.status == 200 else None

    async def counted(self, address: WorkerAddress) -> Counted | None:
        """An engine's own counters of tokens; None if it does not tell them."""
        body = await self.metrics(address)
        if body is None:
            return None
        sample = read_page(body)
        return sample.prompt_tokens_total, sample.generation_tokens_total

    async def generates(self, address: WorkerAddress) -> bool:
        """Whether an engine's counters of tokens move, looked at for a few seconds."""

        async def moves() -> bool:
            first = await self.counted(address)
            for _ in range(LOOKS if first is not None else 0):
                await asyncio.sleep(LOOK_EVERY_S)
                now = await self.counted(address)
                if now is not None and now != first:
                    return True
            return False

        look = self._looks.get(address.url)
        if look is None:
            look = self._looks[address.url] = asyncio.ensure_future(moves())
            look.add_done_callback(lambda _: self._looks.pop(address.url, None))
        return await asyncio.shield(look)
