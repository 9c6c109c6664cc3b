"""Mode `paper`: reproduce FleetOpt's published fleets sample for sample.

These rules reproduce Tables 3, 5 and 6 (arXiv:2603.16514):
- a pool's service time comes from 3,000 draws with seed 42: a uniform number picks the first
  bucket that holds it, then a whole length within; H grows with the request's own length
  (H L/8192);
- the short pool draws from the breakpoints up to B, the long pool from those above gamma B;
  compressed requests are in neither;
- n is the larger of the first n > load with W99 <= SLO, and load / .85; prefill is not
  subtracted from the SLO; a reported TTFT is W99 plus mean chunks of W + H.
"""

import math
from collections.abc import Iterator
from functools import lru_cache
from itertools import accumulate
from random import Random
from typing import Final

import msgspec
import numpy as np

from planner.profile import PAPER_WINDOW_TOKENS, NodeProfile
from planner.queueing import wait_p99_s
from planner.workload.distribution import Cdf

SAMPLES: Final = 3000
SEED: Final = 42
UTILISATION: Final = 0.85
_MIN_VARIATION: Final = 0.01
_MIN_RATE: Final = 0.01
"""Requests per second below which a long pool gets no node."""


class Service(msgspec.Struct, frozen=True, kw_only=True):
    """Service times of one pool, from its calibration."""

    slots: int
    mean_s: float
    """E[S], seconds a request holds a slot."""
    variation: float
    """C_s^2, the squared coefficient of variation."""
    iterations: float
    """Mean iterations of a request."""
    chunks: float
    """Mean prefill chunks of a request."""

    @property
    def node_rate_per_s(self) -> float:
        """mu_gpu, requests per second of one node."""
        return self.slots / self.mean_s


class PoolResult(msgspec.Struct, frozen=True, kw_only=True):
    """One sized pool."""

    nodes: int
    utilisation: float
    """lambda / (n mu_gpu): rho_ana of Table 5."""
    wait_p99_s: float
    ttft_s: float
    """TTFT as section 7.4 reports it: W99 plus mean prefill."""
    service: Service | None


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """Both pools at one boundary and gamma."""

    b_short: int
    gamma: float
    short: PoolResult
    long: PoolResult

    @property
    def nodes(self) -> int:
        """Nodes of both pools."""
        return self.short.nodes + self.long.nodes


_NO_POOL: Final = PoolResult(nodes=0, utilisation=0.0, wait_p99_s=0.0, ttft_s=0.0, service=None)


def homogeneous(
    cdf: Cdf,
    window: int,
    profile: NodeProfile,
    rate: float,
    slo_s: float,
    input_share: float = 0.8,
) -> PoolResult:
    """One pool whose slots hold a whole window; `rate` in requests/s."""
    service = _calibrate(cdf, 1, window, profile.window_slots(window), profile, input_share)
    return _size(rate, service, profile, slo_s)


def two_pools(
    cdf: Cdf,
    *,
    b_short: int,
    gamma: float,
    compressible: float,
    window: int,
    profile: NodeProfile,
    rate: float,
    slo_s: float,
    input_share: float = 0.8,
) -> Cell | None:
    """The fleet at one boundary; None if a pool has requests but no breakpoints to draw from."""
    reach = int(gamma * b_short)
    up_to, below_reach = cdf.share(b_short), cdf.share(reach)
    share = up_to + compressible * (below_reach - up_to)
    short_cdf = _head(cdf.with_breakpoint(b_short), b_short)
    if short_cdf is None:
        return None
    slots = profile.window_slots(b_short)
    short = _calibrate(short_cdf, 1, b_short, slots, profile, input_share)
    first = _size(share * rate, short, profile, slo_s)
    long_rate = (1 - share) * rate
    if long_rate <= _MIN_RATE:
        return Cell(b_short=b_short, gamma=gamma, short=first, long=_NO_POOL)
    long_cdf = _tail(cdf, reach)
    if long_cdf is None:
        return None
    slots = profile.window_slots(window)
    long = _calibrate(long_cdf, reach, window, slots, profile, input_share)
    second = _size(long_rate, long, profile, slo_s)
    return Cell(b_short=b_short, gamma=gamma, short=first, long=second)


def _head(cdf: Cdf, b_short: int) -> Cdf | None:
    points = [(t, s) for t, s in cdf.points if t <= b_short]
    if not points or points[-1][1] <= 0:
        return None
    return Cdf(tuple(t for t, _ in points), tuple(s / points[-1][1] for _, s in points))


def _tail(cdf: Cdf, reach: int) -> Cdf | None:
    below = cdf.share(reach)
    points = [(t, (s - below) / (1 - below)) for t, s in cdf.points if t > reach and below < 1]
    if not points:
        return None
    return Cdf(tuple(t for t, _ in points), (*(s for _, s in points[:-1]), 1.0))


@lru_cache(maxsize=1024)
def _calibrate(
    cdf: Cdf, low: int, high: int, slots: int, profile: NodeProfile, input_share: float
) -> Service:
    """Calibrate from 3,000 draws of lengths in low ... high."""
    per_slot = profile.h_s_per_token * PAPER_WINDOW_TOKENS
    times, iterations, chunks = [], 0, 0
    for length in _draws(cdf, low, high):
        prompt = max(1, int(input_share * length))
        answer = max(1, length - prompt)
        pieces = math.ceil(prompt / profile.chunk_tokens)
        step_s = profile.w_s + per_slot * slots * length / PAPER_WINDOW_TOKENS
        times.append((pieces + answer) * step_s)
        iterations += pieces + answer
        chunks += pieces
    # Left to right, as published: sum() would add more exactly since Python 3.12.
    *_, mean = (t / SAMPLES for t in accumulate(times))
    *_, square = (t / SAMPLES for t in accumulate(t * t for t in times))
    return Service(
        slots=slots,
        mean_s=mean,
        variation=max(_MIN_VARIATION, square / mean**2 - 1),
        iterations=iterations / SAMPLES,
        chunks=chunks / SAMPLES,
    )


def _draws(cdf: Cdf, low: int, high: int) -> Iterator[int]:
    random = Random(SEED)
    for _ in range(SAMPLES):
        drawn, previous = random.random(), 0
        for tokens, share in cdf.points:
            if drawn <= share:
                first, last = max(low, previous + 1), min(high, tokens)
                yield random.randint(first, last) if first <= last else high
                break
            previous = tokens
        else:
            yield high


def _size(rate: float, service: Service, profile: NodeProfile, slo_s: float) -> PoolResult:
    """Equation 11 and the cap on utilisation; prefill is not subtracted."""
    load = rate / service.node_rate_per_s
    nodes = 1
    if rate > 0:
        nodes = math.ceil(load) + 1
        while _wait(rate, nodes, service) > slo_s:
            nodes += 1
        nodes = max(nodes, math.ceil(load / UTILISATION))
    wait = _wait(rate, nodes, service)
    step_s = profile.w_s + profile.h_s_per_token * PAPER_WINDOW_TOKENS
    return PoolResult(
        nodes=nodes,
        utilisation=load / nodes,
        wait_p99_s=wait,
        ttft_s=wait + service.chunks * step_s,
        service=service,
    )


def _wait(rate: float, nodes: int, service: Service) -> float:
    if rate <= 0:
        return 0.0
    servers = np.array([float(nodes * service.slots)])
    load, mean = np.array([rate * service.mean_s]), np.array([service.mean_s])
    return float(wait_p99_s(servers, load, mean, np.array([service.variation]))[0])
