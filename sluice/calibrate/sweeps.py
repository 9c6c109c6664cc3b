"""The sweeps: which requests are sent, in which order, and when to stop."""

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from typing import Final

import msgspec
import numpy as np

from planner.calibration.fit import Fit, Window, fit_windows
from planner.calibration.limits import Overhead, chunk_tokens, overhead, plateau, settled
from planner.calibration.profile import EngineLimits
from planner.calibration.traces import (
    Injection,
    StreamTrace,
    decode_windows,
    held_back,
    in_bursts,
    injection,
)
from planner.errors import PlanError
from sluice.calibrate.client import EngineClient

SHORT_TOKENS: Final = 32
_SWEEP_SHARE: Final = 0.65
"""Share of the time budget for sweeps; the rest is for the held-out load."""
_WINDOW_S: Final = 0.8
"""About how long decoding is watched at each point, seconds."""
_LOAD_REQUESTS: Final = 192
_LONG_TOKENS: Final = 256
"""Shorter prompts take mostly the fixed time of a request."""
_MIN_LOAD: Final = 12
_TRIES: Final = 6
"""Runs of one load before it is given up because its tokens come in bursts."""
_PAUSE_S: Final = 1.0
"""Before such a load is run again."""

Say = Callable[[str, float], None]
"""Progress callback: (current step, share done 0..1)."""


class SweepBounds(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of the measurement."""

    most_concurrency: int
    most_requests: int
    budget_s: float
    longest_prompt_tokens: int = 8192
    """Longest prompt to probe, if the window holds it."""


class Swept(msgspec.Struct, frozen=True, kw_only=True):
    """Results of the sweeps."""

    windows: tuple[Window, ...]
    """Windows of decoding only."""
    prompts: tuple[Window, ...]
    """Windows in which a prompt was computed too."""
    fit: Fit
    limits: EngineLimits
    overhead: Overhead
    most_resident_tokens: int
    longest_asked_tokens: int
    """Longest prompt that was to be timed."""


class Sweeps:
    """Runs the sweeps within the bounds; never raises a load that the engine refused."""

    def __init__(
        self,
        client: EngineClient,
        bounds: SweepBounds,
        *,
        window: int,
        kv_tokens: int | None,
        say: Say,
    ) -> None:
        """`window`: largest request, tokens; `kv_tokens`: K if known."""
        self._client = client
        self._bounds = bounds
        self._window = window
        self._kv = kv_tokens
        self._say = say
        self._start_s = time.perf_counter()
        self._windows: list[Window] = []
        self._injections: list[Injection] = []
        self._alone: list[StreamTrace] = []
        self._slots: int | None = None
        self._resident = 0
        self._iteration_s = 0.02
        self._alone_gap_s = 0.0
        """Time between two chunks of a stream alone."""
        self._prompt_token_s = 0.0
        """Slowest prompt token so far: what a longer prompt may take."""
        self._longest = min(window - 64, bounds.longest_prompt_tokens)
        self._most_sequences = 1

    async def run(self, first: StreamTrace) -> Swept:
        """Run all sweeps and fit; raises PlanError if there is too little data."""
        self._iteration_s = first.tpot_s or self._iteration_s
        tokens = min(256, max(48, round(_WINDOW_S / self._iteration_s)), self._window // 4)
        await self._levels(tokens)
        await self._idle()
        await self._prefills()
        await self._lengths(tokens)
        fit = fit_windows([*self._windows, *(i.window for i in self._injections)])
        chunk = chunk_tokens(self._injections, self._alone, fit)
        # The first fit assumed one iteration per prompt; the chunk size gives the actual number.
        prompts = [settled(one, chunk) for one in self._injections]
        fit = fit_windows([*self._windows, *prompts])
        limits = EngineLimits(
            slots=self._slots,
            chunk_tokens=chunk,
            longest_prompt_tokens=max(
                [trace.prompt_tokens for trace in self._alone]
                + [one.prompt_tokens for one in self._injections],
                default=0,
            ),
            most_sequences=self._most_sequences,
        )
        return Swept(
            windows=tuple(self._windows),
            prompts=tuple(prompts),
            fit=fit,
            limits=limits,
            overhead=overhead(self._alone, fit, chunk),
            most_resident_tokens=self._resident,
            longest_asked_tokens=max(_lengths(self._longest), default=0),
        )

    async def _levels(self, tokens: int) -> None:
        """One request, then twice as many each time, up to a plateau or the bound."""
        count = 1
        while self._slots is None and self._affords(count, tokens):
            failed = len(self._client.failures)
            traces = await self._batch(count, SHORT_TOKENS, tokens, f"{count} at once")
            self._slots = plateau(traces) if len(traces) == count else None
            if len(self._client.failures) > failed or count == self._bounds.most_concurrency:
                return
            count = min(2 * count, self._bounds.most_concurrency)

    async def _lengths(self, tokens: int) -> None:
        """The same with long prompts, which separates resident tokens from sequences."""
        prompt = min(2048, self._window // 4)
        most = min(self._slots or self._bounds.most_concurrency, self._bounds.most_concurrency)
        room = (self._kv or 8 * self._window) // (2 * (prompt + tokens))
        for count in sorted({max(1, most // 8), max(1, min(most // 2, room, 16))}):
            if self._affords(count, tokens):
                await self._batch(count, prompt, tokens, f"{count} long prompts")

    async def _idle(self) -> None:
        """TTFT of prompts of many lengths, each alone in the engine."""
        for length in _lengths(self._longest) * 3:
            if self._affords(1, 16, length):
                found = await self._batch(1, length, 2, f"{length} tokens alone")
                self._alone += found
                each = (trace.ttft_s / max(1, trace.prompt_tokens) for trace in found)
                if length >= _LONG_TOKENS:
                    self._prompt_token_s = max(self._prompt_token_s, *each)

    async def _prefills(self) -> None:
        """Prompts of many lengths, one after the other, beside one decoding stream."""
        for _ in range(_TRIES):
            background, injected = await self._beside()
            if background is None:
                return
            if not in_bursts([background], self._alone_gap_s):
                found = (injection([background], trace) for trace in injected)
                self._injections += [one for one in found if one is not None]
                return
            await self._pause(1, 16)
        raise _burst_error()

    async def _beside(self) -> tuple[StreamTrace | None, list[StreamTrace]]:
        """A decoding stream, and the prompts that ran beside it."""
        lengths = _lengths(self._longest)
        leave = asyncio.Event()
        output = min(self._window - 2 * SHORT_TOKENS, 8192)
        clock = asyncio.create_task(self._client.stream(SHORT_TOKENS, output, leave=leave))
        injected = []
        try:
            await asyncio.sleep(4 * self._iteration_s + 0.05)
            for number, length in enumerate((*lengths[2:], *lengths[:-5:-1])):
                if clock.done():
                    break
                if not self._affords(1, 16, length):
                    continue
                self._tell(f"a prompt of {length} tokens ({number + 1})")
                text = await self._client.prompt(length)
                # Counting tokens may have delayed the engine: let its timing settle.
                await asyncio.sleep(3 * self._iteration_s)
                trace = await self._client.stream(length, 2, text=text)
                injected += [trace] if trace else []
        finally:
            leave.set()
        return await clock, injected

    async def _batch(self, count: int, prompt: int, tokens: int, what: str) -> list[StreamTrace]:
        """Run so many requests at once and keep their traces."""
        self._tell(what)
        for _ in range(_TRIES):
            texts = [await self._client.prompt(prompt) for _ in range(count)]
            jobs = [self._client.stream(prompt, tokens, text=text) for text in texts]
            traces = [trace for trace in await asyncio.gather(*jobs) if trace is not None]
            if not self._came_in_bursts(traces):
                break
            await self._pause(count, tokens, prompt)
        else:
            raise _burst_error()
        # If some failed, the batch was smaller than intended.
        if len(traces) == count:
            self._most_sequences = max(self._most_sequences, min(count, self._slots or count))
        windows = decode_windows(traces) if len(traces) == count else []
        self._windows += windows
        if windows:
            self._iteration_s = windows[0].iteration_s
            resident = max(w.resident_tokens / w.iterations for w in windows)
            self._resident = max(self._resident, round(resident))
        return traces

    def _came_in_bursts(self, traces: Sequence[StreamTrace]) -> bool:
        """Whether to run it again; a short prompt alone is the measure of what follows."""
        if len(traces) == 1 and traces[0].prompt_tokens <= _LONG_TOKENS:
            if held_back(traces[0]):
                return True
            self._alone_gap_s = traces[0].gap_s or self._alone_gap_s
        return in_bursts(traces, self._alone_gap_s)

    async def _pause(self, count: int, tokens: int, prompt: int = 0) -> None:
        """Before a load is run again; raises PlanError if that is not affordable."""
        if not self._affords(count, tokens, prompt):
            raise _burst_error()
        await asyncio.sleep(_PAUSE_S)

    def _affords(self, count: int, tokens: int, prompt: int = 0) -> bool:
        """Whether the sweeps' time and requests suffice for one more point."""
        left_s = _SWEEP_SHARE * self._bounds.budget_s - self.elapsed_s
        requests = self._client.requests + count + _MIN_LOAD
        need_s = 1.5 * (tokens * self._iteration_s + prompt * self._prompt_token_s)
        return need_s < left_s and requests <= self._bounds.most_requests

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self._start_s

    def _tell(self, what: str) -> None:
        self._say(what, min(0.99, self.elapsed_s / self._bounds.budget_s))

    async def held_out(self, swept: Swept) -> list[StreamTrace]:
        """A mixed load, Poisson arrivals at half the concurrency; empty if time has run out."""
        fit = swept.fit
        most = min(self._bounds.most_concurrency, swept.limits.slots_used)
        draw = random.Random(7)
        # Prompts of the whole range that was probed, so that the verdict holds for it.
        longest = max(SHORT_TOKENS, swept.limits.longest_prompt_tokens)
        plan = [_request(draw, longest, self._window) for _ in range(_LOAD_REQUESTS)]
        prompt = sum(p for p, _ in plan) / len(plan)
        output = sum(o for _, o in plan) / len(plan)
        target = max(1.0, most / 2)
        each_s = fit.w_s + (fit.h_s + fit.h_s_per_token * (prompt + output / 2)) * target
        # Prompt tokens lengthen every iteration, so they get a fixed share of the time.
        prompts_s = float(fit.prompt_s(np.array([p for p, _ in plan], dtype=np.float64)).mean())
        rate = target / (output * each_s + target * prompts_s)
        left_s = self._bounds.budget_s - self.elapsed_s - 2 * output * each_s
        allowed = self._bounds.most_requests - self._client.requests
        count = min(len(plan), allowed, int(left_s * rate))
        if count < _MIN_LOAD:
            return []
        texts = [await self._client.prompt(p) for p, _ in plan[:count]]
        return await self._arrivals(plan[:count], texts, rate, draw)

    async def _arrivals(
        self,
        plan: Sequence[tuple[int, int]],
        texts: Sequence[str],
        rate: float,
        draw: random.Random,
    ) -> list[StreamTrace]:
        jobs = []
        next_s = time.perf_counter()
        for (prompt, output), text in zip(plan, texts, strict=True):
            self._tell(f"held-out load, {rate:.2g} requests/s")
            await asyncio.sleep(max(0.0, next_s - time.perf_counter()))
            jobs.append(asyncio.create_task(self._client.stream(prompt, output, text=text)))
            next_s += draw.expovariate(rate)
        return [trace for trace in await asyncio.gather(*jobs) if trace is not None]


def _burst_error() -> PlanError:
    return PlanError(
        "tokens come in bursts, faster than the engine makes them for one stream alone",
        "measure beside the engine, without a proxy that buffers, on a machine with free cores",
    )


def _lengths(longest: int) -> tuple[int, ...]:
    """Prompt lengths, two per octave, just below round numbers, which chunks usually are.

    The last one is the longest itself, unless another is within 5 % of it.
    """
    octaves = range(7, max(8, longest.bit_length()))
    found = [n for k in octaves for n in (2**k, 3 * 2 ** (k - 1)) if n <= longest]
    lengths = [round(0.96 * n) for n in found]
    if lengths and lengths[-1] < 0.95 * longest:
        lengths.append(longest)
    return tuple(lengths)


def _request(draw: random.Random, longest: int, window: int) -> tuple[int, int]:
    """Draw (prompt, output) tokens, both log-uniform; together they fit the window."""
    prompt = SHORT_TOKENS * (longest / SHORT_TOKENS) ** draw.random()
    output = 16 * 8 ** draw.random()
    return round(prompt), max(1, min(round(output), window - round(prompt) - 16))
