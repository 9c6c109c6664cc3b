"""Requests to replay: from a log or a trace with times, or drawn from a workload."""

from typing import Final, Literal

import msgspec
import numpy as np

from planner.errors import PlanError
from planner.workload.workload import Workload
from simulator.fleet.arrivals import poisson
from simulator.fleet.traffic import Floats
from sluice.simulated.fleet import lengths_of
from sluice.simulated.recorded import RecordedTraffic

MAX_REQUESTS: Final = 1_000_000
Arrivals = Literal["recorded", "poisson"]


class ReplayRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request to send."""

    at_s: float
    """Seconds from the start."""
    prompt_tokens: int
    output_tokens: int
    category: str | None = None
    entitlement: str | None = None
    """Whose request it was; None if the log does not tell."""


def from_recording(
    found: RecordedTraffic,
    *,
    arrivals: Arrivals,
    rate_per_s: float | None,
    speed: float,
    duration_s: float | None,
    seed: int,
) -> list[ReplayRequest]:
    """The recording in its order, at its own or Poisson times, repeated up to `duration_s`.

    `rate_per_s` wins over `speed`; raises PlanError unless both are above 0.
    """
    if not speed > 0 or (rate_per_s is not None and not rate_per_s > 0):
        raise PlanError("a rate or speed of 0 or less", "give one above 0")
    span_s, count = float(found.at_s[-1]), len(found.at_s)
    own = (count - 1) / span_s if span_s > 0 else None
    rate = rate_per_s or (None if own is None else own * speed)
    if rate is None:
        raise PlanError("the recording has one time for all requests", "give --rate")
    wanted = count if duration_s is None else max(1, round(rate * duration_s))
    if wanted > MAX_REQUESTS:
        raise PlanError(f"{wanted:,} requests", f"replay at most {MAX_REQUESTS:,}")
    if arrivals == "poisson" or own is None:
        times = poisson(rate, wanted, np.random.default_rng(seed))
    else:
        times = _repeated(found.at_s * (own / rate), wanted, 1 / rate)
    index = np.arange(wanted) % count
    return _asks(times, found, index, duration_s)


def from_workload(
    workload: Workload, *, rate_per_s: float | None, duration_s: float, seed: int
) -> list[ReplayRequest]:
    """Poisson arrivals with lengths drawn from the workload."""
    rate = workload.rate_per_s if rate_per_s is None else rate_per_s
    if rate is None:
        raise PlanError("the workload has no times", "give --rate, in requests/s")
    if not rate > 0:
        raise PlanError(f"a rate of {rate:g}", "give one above 0")
    wanted = max(1, round(rate * duration_s))
    if wanted > MAX_REQUESTS:
        raise PlanError(f"{wanted:,} requests", f"replay at most {MAX_REQUESTS:,}")
    random = np.random.default_rng(seed)
    prompts, answers = lengths_of(workload).sample(wanted, random)
    found = RecordedTraffic(
        at_s=poisson(rate, wanted, random), prompts=prompts, answers=answers, categories=()
    )
    return _asks(found.at_s, found, np.arange(wanted), duration_s)


def _repeated(times_s: Floats, wanted: int, gap_s: float) -> Floats:
    rounds = -(-wanted // len(times_s))
    each = float(times_s[-1]) + gap_s
    return np.concatenate([times_s + each * n for n in range(rounds)])[:wanted]


def _asks(
    times_s: Floats, found: RecordedTraffic, index: np.ndarray, duration_s: float | None
) -> list[ReplayRequest]:
    asks = []
    for at_s, i in zip(times_s.tolist(), index.tolist(), strict=True):
        if duration_s is not None and at_s > duration_s:
            break
        asks.append(
            ReplayRequest(
                at_s=at_s,
                prompt_tokens=int(found.prompts[i]),
                output_tokens=int(found.answers[i]),
                category=found.categories[i] if found.categories else None,
                entitlement=found.entitlements[i] if found.entitlements else None,
            )
        )
    return asks
