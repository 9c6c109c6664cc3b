"""Compare the fitted engine, run in virtual time, with the real engine under a held-out load."""

import math
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec
import numpy as np

from planner.calibration.limits import Overhead
from planner.calibration.traces import StreamTrace
from simulator.engine.engine import Engine, EngineProfile, EngineRequest
from simulator.fleet.statistics import quantile_bounds

TOLERANCE: Final = 0.15
"""Largest relative error of any figure for a profile to count as verified."""
_LONGEST_S: Final = 1e9
_MIDDLE: Final = 0.5


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """One figure of the held-out load, measured and modelled."""

    name: str
    measured: float
    modelled: float
    bounds: tuple[float, float] | None = None
    """95 % bounds of a measured tail: the P99 of some 200 requests is nearly their maximum."""

    @property
    def off(self) -> float:
        """(modelled - measured) / measured; infinite where nothing was measured."""
        return (self.modelled - self.measured) / self.measured if self.measured else math.inf

    @property
    def holds(self) -> bool:
        """Whether the relative error, from the nearest value that can be true, is tolerable."""
        nearest = self.measured
        if self.bounds is not None:
            nearest = min(max(self.modelled, self.bounds[0]), self.bounds[1])
        return bool(nearest) and abs(self.modelled - nearest) <= TOLERANCE * abs(nearest)


def modelled(
    engine: EngineProfile, load: Sequence[StreamTrace], before: Overhead
) -> list[StreamTrace]:
    """Replay the load on the model; each request arrives there after the overhead `before`.

    Raises ValueError for a request that does not fit the engine's window.
    """
    model = Engine(engine)
    seen: dict[str, list[tuple[float, int]]] = {}
    arrivals = [trace.submit_s + before.seconds(trace.prompt_tokens) for trace in load]
    order = sorted(range(len(load)), key=lambda index: arrivals[index])
    zero_s = arrivals[order[0]]
    events = []
    for index in order:
        trace, at_s = load[index], arrivals[index] - zero_s
        events += model.run_until(at_s)
        model.submit(
            EngineRequest(
                id=str(index),
                prompt_tokens=max(1, trace.prompt_tokens),
                output_tokens=trace.output_tokens,
            ),
            at_s,
        )
    events += model.run_until(_LONGEST_S)
    for at_s, emission in events:
        seen.setdefault(emission.id, []).append((zero_s + at_s, emission.index))
    return [
        msgspec.structs.replace(
            trace,
            times_s=tuple(at_s for at_s, _ in seen[str(index)]),
            tokens=tuple(number for _, number in seen[str(index)]),
        )
        for index, trace in enumerate(load)
    ]


def compare(load: Sequence[StreamTrace], model: Sequence[StreamTrace]) -> tuple[Check, ...]:
    """Compare TTFT, TPOT and tokens/s per request at p50 and p99, and total output tokens/s."""
    pairs = (
        ("TTFT", "s", [t.ttft_s for t in load], [t.ttft_s for t in model]),
        ("TPOT", "s", _tpots(load), _tpots(model)),
        ("request rate", "tokens/s", list(_rates(load)), list(_rates(model))),
    )
    checks = [
        Check(
            name=f"{name} p{round(100 * share)} ({unit})",
            measured=float(np.quantile(real, share)),
            modelled=float(np.quantile(ours, share)),
            bounds=quantile_bounds(real, share) if share > _MIDDLE else None,
        )
        for name, unit, real, ours in pairs
        for share in (0.5, 0.99)
    ]
    total = Check(
        name="throughput (tokens/s)", measured=_throughput(load), modelled=_throughput(model)
    )
    return (*checks, total)


def _tpots(traces: Sequence[StreamTrace]) -> list[float]:
    return [t.tpot_s for t in traces if t.output_tokens > t.tokens[0]] or [0.0]


def _rates(traces: Sequence[StreamTrace]) -> Iterable[float]:
    return (t.output_tokens / max(t.last_s - t.submit_s, 1e-9) for t in traces)


def _throughput(traces: Sequence[StreamTrace]) -> float:
    span_s = max(t.last_s for t in traces) - min(t.submit_s for t in traces)
    return sum(t.output_tokens for t in traces) / max(span_s, 1e-9)
