"""Nodes that a pool needs, under one of two models of a node's iteration.

- full (`exact`, `mix`): every slot is taken, S = it (W + h n_max L), and n follows from
  equation 11 and the cap on utilisation, as published in FleetOpt;
- running (`corrected`, `paged`): an iteration lasts W + h (resident tokens) + e (prompt tokens)
  + q (pairs of one and a token before it in its prompt), and Little's law gives the resident
  tokens. With k = lambda (h E[it L] + e E[L_in] + q E[L_in^2] / 2) and x = k / n,
  t = W / (1 - x) is a fixed point in closed form, and
  slots:          n >= lambda W E[it] / (rho slots) + k
  prefill budget: n >= lambda W E[L_in] / (rho budget) + k
  stability:      n >= k / x_max
  a limit t <= T: n >= k T / (T - W).
  TTFT at P99 is the sum of the P99 wait for a slot, (chunks + 1) t, and the time for prompts.
  A node computes prompts one after the other (M/G/1). Their time is the larger of two sums: the
  P99 prompt after a mean wait, or a mean prompt after the P99 wait.
  TPOT at P99 adds 2.33 standard deviations of the resident tokens on a node that gets a random
  share of requests (least-loaded dispatch does better). Occupancy is Poisson, proportional to
  t - W; slower iterations hold requests longer, which multiplies its variance by t / W. The
  limit t + b sqrt((t - W) t / W) <= T is therefore a quadratic in t.
All functions take arrays over pools.
"""

from collections.abc import Callable
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from planner.goals import Goals
from planner.profile import NodeProfile
from planner.queueing import wait_p99_s
from planner.workload.moments import (
    HELD,
    MASS,
    PROMPT,
    PROMPT2,
    PROMPT3,
    PROMPT4,
    STEP_TOKENS,
    STEP_TOKENS2,
    STEPS,
    STEPS2,
    STEPS2_TOKENS,
    STEPS2_TOKENS2,
)
from planner.workload.workload import Floats

WaitOf = Callable[[Floats, NDArray[np.intp]], Floats]
"""(nodes, indices of pools) -> waiting times, seconds."""

_MIN_VARIATION: Final = 0.01
NORMAL_P99: Final = 2.326
_CEIL_SLACK: Final = 1e-9
_MAX_STEPS: Final = 64
KV_USED: Final = 0.9
"""Share of the KV cache that a paged pool is planned to fill."""


class Loads(msgspec.Struct, frozen=True, kw_only=True):
    """Loads of pools; arrays over pools."""

    sums: Floats
    """Rows of planner.workload.moments, shape (ROWS, pools)."""
    rate_per_s: Floats
    prompt_p99_tokens: Floats
    chunks_p99: Floats
    """Chunks of the P99 prompt."""
    slots: Floats
    """Sequences that a node runs at once."""


class Sized(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes and times of pools; arrays over pools."""

    nodes: Floats
    """Whole numbers; infinite if no number of nodes meets the goals."""
    unrounded: Floats
    """Nodes before rounding up and before adding nodes for the wait."""
    utilisation: Floats
    """Share of slots in use."""
    step_s: Floats
    """Mean iteration, seconds."""
    wait_p99_s: Floats
    ttft_p99_s: Floats
    tpot_p99_s: Floats


def columns(loads: Loads, at: NDArray[np.intp]) -> Loads:
    """The loads of some pools, in this order; a pool may be taken more than once."""
    return Loads(
        sums=loads.sums[:, at],
        rate_per_s=loads.rate_per_s[at],
        prompt_p99_tokens=loads.prompt_p99_tokens[at],
        chunks_p99=loads.chunks_p99[at],
        slots=loads.slots[at],
    )


def paged_slots(sums: Floats, profile: NodeProfile) -> Floats:
    """Sequences whose time-weighted resident tokens fill KV_USED of the cache."""
    held = sums[HELD] / np.maximum(sums[STEPS], 1e-300)
    fit = np.floor(KV_USED * profile.kv_tokens / np.maximum(held, 1.0))
    return np.asarray(np.clip(fit, 1, profile.max_num_seqs))


def size_full(loads: Loads, profile: NodeProfile, goals: Goals) -> Sized:
    """Size with every slot taken; prefill is not subtracted from the SLO (as published)."""
    mean, variation, per_step = _full_service(loads, profile)
    load = loads.rate_per_s * mean / loads.slots
    floor = np.maximum(np.ceil(load / goals.utilisation - _CEIL_SLACK), np.ceil(load) + 1)
    floor[loads.rate_per_s <= 0] = 0

    def wait_of(nodes: Floats, pick: NDArray[np.intp]) -> Floats:
        slots = loads.slots[pick]
        return wait_p99_s(nodes * slots, load[pick] * slots, mean[pick], variation[pick])

    nodes, wait = _raise_until(floor, wait_of, np.full(load.shape, goals.ttft_s))
    return Sized(
        nodes=nodes,
        unrounded=load / goals.utilisation,
        utilisation=load / np.maximum(nodes, 1),
        step_s=per_step,
        wait_p99_s=wait,
        ttft_p99_s=wait + (loads.chunks_p99 + 1) * per_step,
        tpot_p99_s=per_step,
    )


def size_running(loads: Loads, profile: NodeProfile, goals: Goals) -> Sized:
    """Size by iterations as they run; TTFT is P99 of wait + (chunks + 1) t + own prompt (eq. 8)."""
    means = _means(loads, profile)
    w = profile.w_s
    needed = means.demand + w * np.maximum(
        loads.rate_per_s * means.steps / (goals.utilisation * loads.slots),
        loads.rate_per_s * means.prompt / (goals.utilisation * profile.max_num_batched_tokens),
    )
    needed = np.maximum(needed, means.demand / goals.stretch)
    own = _own_prefill_s(loads, profile)
    prefill_limit = np.maximum(goals.ttft_s - own, 0.0) / (loads.chunks_p99 + 1)
    needed = np.maximum(needed, _nodes_for_step(means.demand, prefill_limit, w))
    if goals.tpot_s is not None:
        step = _step_within(goals.tpot_s, means.spread, w)
        needed = np.maximum(needed, _nodes_for_step(means.demand, step, w))
    used = loads.rate_per_s > 0
    floor = np.where(used, np.maximum(np.ceil(needed - _CEIL_SLACK), goals.least_nodes), 0.0)

    def wait_of(nodes: Floats, pick: NDArray[np.intp]) -> Floats:
        step = w / (1 - means.demand[pick] / nodes)
        service = means.steps[pick] * step
        servers, load = nodes * loads.slots[pick], loads.rate_per_s[pick] * service
        # The SLO limits wait and prefill together, so prefill is passed as part of the wait.
        wait = wait_p99_s(servers, load, service, means.variation[pick])
        prompts = _prompts_s(means, loads.rate_per_s[pick] / nodes, own, pick)
        return wait + (loads.chunks_p99[pick] + 1) * step + prompts

    limit = np.full(needed.shape, goals.ttft_s)
    nodes, _ = _raise_until(floor, wait_of, limit)
    return _running(loads, means, profile, nodes, np.where(used, needed, 0.0))


def run_with(loads: Loads, profile: NodeProfile, nodes: Floats) -> Sized:
    """Times of pools with given numbers of nodes; infinite if they cannot keep up."""
    means = _means(loads, profile)
    return _running(loads, means, profile, nodes, means.demand)


class _Means(msgspec.Struct, frozen=True, kw_only=True):
    """Means per request of a pool."""

    steps: Floats
    """E[it], iterations."""
    prompt: Floats
    """E[L_in], prompt tokens."""
    variation: Floats
    """Var[it] / E[it]^2."""
    demand: Floats
    """k, nodes kept busy by resident and prompt tokens alone."""
    spread: Floats
    """b: 2.33 h sd(resident tokens) = b sqrt((t - W) t / W)."""
    own_s: Floats
    """E[s], the time that a prompt adds to its iterations."""
    own_square: Floats
    """E[s^2]."""


def _means(loads: Loads, profile: NodeProfile) -> _Means:
    sums, mass = loads.sums, np.maximum(loads.sums[MASS], 1e-300)
    steps, prompt = sums[STEPS] / mass, sums[PROMPT] / mass
    tokens = sums[STEP_TOKENS] / mass
    e, q = profile.prefill_s_per_token, profile.attention_s_per_pair / 2
    own_s = e * prompt + q * sums[PROMPT2] / mass
    own_square = (e * e * sums[PROMPT2] + 2 * e * q * sums[PROMPT3] + q * q * sums[PROMPT4]) / mass
    demand = loads.rate_per_s * (profile.h_s_per_token * tokens + own_s)
    # occupancy = lambda E[it] t / n = lambda E[it] (t - W) / k.
    resident = sums[STEP_TOKENS2] / np.maximum(sums[STEPS], 1e-300)
    busy = demand > 0
    occupancy = np.where(busy, loads.rate_per_s * steps / np.where(busy, demand, 1.0), 0.0)
    return _Means(
        steps=steps,
        prompt=prompt,
        variation=np.maximum(
            sums[STEPS2] / mass / np.maximum(steps**2, 1e-300) - 1, _MIN_VARIATION
        ),
        demand=demand,
        spread=NORMAL_P99 * profile.h_s_per_token * np.sqrt(resident * occupancy),
        own_s=own_s,
        own_square=own_square,
    )


def _prompts_s(means: _Means, rate: Floats, own_p99_s: Floats, pick: NDArray[np.intp]) -> Floats:
    """Time until a node has computed a prompt and those before it, one after the other, at P99.

    `rate`: prompts/s of one node of each picked pool; `own_p99_s` is of all pools.
    """
    own, busy = means.own_s[pick], rate * means.own_s[pick]
    square = np.where(own > 0, own**2, 1.0)
    variation = np.maximum(means.own_square[pick] / square - 1, 0.0)
    late = own + wait_p99_s(np.ones(busy.shape), busy, own, variation)
    mean = rate * means.own_square[pick] / np.maximum(2 * (1 - busy), 1e-300)
    return np.asarray(np.maximum(late, own_p99_s[pick] + mean))


def _running(
    loads: Loads, means: _Means, profile: NodeProfile, nodes: Floats, needed: Floats
) -> Sized:
    with np.errstate(all="ignore"):
        stretch = means.demand / np.maximum(nodes, 1e-9)
        step = np.where(stretch < 1, profile.w_s / (1 - stretch), np.inf)
        step = np.where(np.isfinite(nodes), step, profile.w_s)
        service = means.steps * step
        servers = np.where(np.isfinite(nodes), nodes, 1.0) * loads.slots
        load = np.where(nodes > 0, loads.rate_per_s * service, 0.0)
        busy = np.isfinite(nodes) & (nodes > 0)
        wait = np.zeros(nodes.shape)
        wait[busy] = wait_p99_s(servers[busy], load[busy], service[busy], means.variation[busy])
        prompts = _own_prefill_s(loads, profile)
        pick = np.flatnonzero(busy)
        prompts[pick] = _prompts_s(means, loads.rate_per_s[pick] / nodes[pick], prompts, pick)
        utilisation = np.where(busy, load / np.maximum(servers, 1e-9), 0.0)
        tail = means.spread * np.sqrt((step - profile.w_s) * step / profile.w_s)
    return Sized(
        nodes=nodes,
        unrounded=needed,
        utilisation=utilisation,
        step_s=step,
        wait_p99_s=wait,
        ttft_p99_s=wait + (loads.chunks_p99 + 1) * step + prompts,
        tpot_p99_s=step + tail,
    )


def _own_prefill_s(loads: Loads, profile: NodeProfile) -> Floats:
    """Time that the P99 prompt adds to its own iterations, beyond the mean of all prompts."""
    prompt = loads.prompt_p99_tokens
    own: Floats = prompt * (profile.prefill_s_per_token + profile.attention_s_per_pair * prompt / 2)
    return own


def _full_service(loads: Loads, profile: NodeProfile) -> tuple[Floats, Floats, Floats]:
    """Mean S, its squared variation, and mean seconds per iteration."""
    s, w, grow = loads.sums, profile.w_s, profile.h_s_per_token * loads.slots
    mass = np.maximum(s[MASS], 1e-300)
    mean = (w * s[STEPS] + grow * s[STEP_TOKENS]) / mass
    square = w * w * s[STEPS2] + 2 * w * grow * s[STEPS2_TOKENS] + grow**2 * s[STEPS2_TOKENS2]
    variation = np.maximum(square / mass / np.maximum(mean**2, 1e-300) - 1, _MIN_VARIATION)
    return mean, variation, mean * mass / np.maximum(s[STEPS], 1e-300)


def _step_within(tpot_s: float, spread: Floats, w_s: float) -> Floats:
    """The mean iteration t at which t + b sqrt((t - W) t / W) equals the limit."""
    square = spread**2
    linear = 2 * tpot_s - square
    root = spread * np.sqrt(square + 4 * tpot_s * (tpot_s / w_s - 1))
    return np.asarray(2 * tpot_s**2 / (linear + root))


def _nodes_for_step(demand: Floats, limit_s: Floats, w_s: float) -> Floats:
    """Nodes at which t = W / (1 - k / n) is within the limit; infinite if W exceeds it."""
    share = w_s / np.maximum(limit_s, 1e-300)
    return np.where(share < 1, demand / np.maximum(1 - share, 1e-300), np.inf)


def _raise_until(floor: Floats, wait_of: WaitOf, limit: Floats) -> tuple[Floats, Floats]:
    """The fewest nodes, at least `floor`, whose wait is within the limit, and that wait."""
    nodes, wait = floor.copy(), np.zeros(floor.shape)
    active = np.flatnonzero((floor > 0) & np.isfinite(floor))
    wait[active] = wait_of(nodes[active], active)
    over = active[wait[active] > limit[active]]
    for step in range(_MAX_STEPS):
        if over.size == 0:
            break
        nodes[over] += 1 if step < _MAX_STEPS // 2 else np.maximum(1, nodes[over] // 16)
        wait[over] = wait_of(nodes[over], over)
        over = over[wait[over] > limit[over]]
    nodes[over] = np.inf
    return nodes, wait
