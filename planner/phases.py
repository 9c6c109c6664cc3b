"""Size pools in phases: nodes for prompts and nodes for answers, two queues in tandem.

An iteration of a profile lasts W + h (resident tokens) + e (prompt tokens) + q (pairs of prompt
tokens). Assumption: the same constants hold on nodes that do one of the two. With M the token
budget of an iteration, C the chunk, and L a prompt, follow

- prefill: prompts one after the other in full iterations, each of which reads the weights once and
  the prompt's own tokens: work s(L) = L (e + W / M) + (q + h / M) L^2 / 2 of a node. n nodes are
  M/G/n; a prompt waits for the iteration that runs, W / (1 - rho), at least, and takes
  ceil(L / C) W + e L + (q + h / M) L^2 / 2 alone;
- hand-over: KV bytes over the bandwidth of one node's link, one prompt at a time;
- decode: `planner.sizing` without prompts: one iteration takes a hand-over, then one a token.

P99 TTFT is the sum of prefill's P99, the hand-over of the P99 prompt, and decode's P99 wait for a
slot with two iterations.
"""

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec
import numpy as np

from planner.errors import PlanError
from planner.goals import Goals
from planner.profile import NodeProfile
from planner.queueing import erlang_c, wait_p99_s
from planner.records import FleetPlan, PhasesCompared, PhasesPlan, PoolPlan, Question
from planner.search import pool_loads
from planner.sizing import KV_USED, NORMAL_P99, Loads, columns, run_with, size_running
from planner.split import size_ranges
from planner.workload.atoms import atoms_of
from planner.workload.moments import (
    HELD,
    MASS,
    PROMPT,
    PROMPT2,
    PROMPT3,
    PROMPT4,
    STEP_TOKENS,
    prepare,
)
from planner.workload.workload import Floats

_WHOLE: Final = 1 << 40
"""More tokens than any prompt: a hand-over is one chunk, within any budget."""
_TRIED: Final = 128
"""Numbers of nodes tried for each phase, from the fewest that keep up."""
_PARTS: Final = 8
"""Steps in which `skip_below_tokens` is lowered until decode holds its goals."""


def prefill_node(node: NodeProfile) -> NodeProfile:
    """The node as a server of prompts alone: `prompt_s` is the work of one."""
    budget = node.max_num_batched_tokens
    return msgspec.structs.replace(
        node,
        prefill_s_per_token=node.prefill_s_per_token + node.w_s / budget,
        attention_s_per_pair=node.attention_s_per_pair + node.h_s_per_token / budget,
    )


def decode_node(node: NodeProfile) -> NodeProfile:
    """The node without prompts: KV arrives in one iteration and costs nothing else."""
    return msgspec.structs.replace(
        node,
        prefill_s_per_token=0.0,
        attention_s_per_pair=0.0,
        chunk_tokens=_WHOLE,
        max_num_batched_tokens=_WHOLE,
    )


class Phased(NamedTuple):
    """A fleet in both forms; without pools where one of them meets no goals."""

    together: FleetPlan
    apart: FleetPlan
    """With pools in phases: all, or those that cost less so."""
    pools: tuple[PhasesCompared, ...]

    def best(self, question: Question) -> FleetPlan:
        """The form to choose."""
        cheaper = self.apart.weight < self.together.weight * (1 - 1e-9)
        return self.apart if question.phases == "always" or cheaper else self.together


def phased(question: Question, fleet: FleetPlan) -> Phased:
    """Size a fleet's pools together and apart; raises PlanError if that cannot be told."""
    if question.mode != "paged":
        raise PlanError(f"phases in mode {question.mode}", "plan them in mode paged")
    pools = tuple(
        PhasesCompared(together=_together(question, fleet, at), apart=_apart(question, fleet, at))
        for at in range(len(fleet.pools))
    )
    always = question.phases == "always"
    together = [pool.together for pool in pools]
    apart = [pool.apart if always or pool.apart_wins else pool.together for pool in pools]
    label = f"{fleet.label.removesuffix(', paged')}, apart"
    return Phased(_with(fleet, together, fleet.label), _with(fleet, apart, label), pools)


def _with(fleet: FleetPlan, pools: Sequence[PoolPlan | None], label: str) -> FleetPlan:
    sized = tuple(pool for pool in pools if pool is not None)
    whole = len(sized) == len(pools)
    return msgspec.structs.replace(fleet, label=label, pools=sized if whole else ())


def without_cached(question: Question) -> Question:
    """The question with prompts that cost what caches leave of them, as the workload observed."""
    hit = question.workload.cached_share or 0.0

    def cheaper(node: NodeProfile) -> NodeProfile:
        return msgspec.structs.replace(
            node,
            prefill_s_per_token=(1 - hit) * node.prefill_s_per_token,
            attention_s_per_pair=(1 - hit * hit) * node.attention_s_per_pair,
        )

    short, long = question.short_node, question.long_node
    return msgspec.structs.replace(
        question,
        nodes=tuple(map(cheaper, question.nodes)),
        short_node=short and cheaper(short),
        long_node=long and cheaper(long),
    )


def one_unsized(question: Question, label: str) -> FleetPlan:
    """One pool that no number of nodes serves together: phases may."""
    node = question.long_node or question.nodes[0]
    pool = PoolPlan(
        name="all",
        window_tokens=question.window,
        boundary_tokens=None,
        node=node,
        nodes=0,
        serving_nodes=0,
        slots_per_node=0,
        rate_per_s=question.goals.rate_per_s,
        utilisation=0.0,
        step_s=math.inf,
        wait_p99_s=math.inf,
        ttft_p99_s=math.inf,
        tpot_p99_s=math.inf,
    )
    return FleetPlan(label=label, pools=(pool,))


def _together(question: Question, fleet: FleetPlan, at: int) -> PoolPlan | None:
    """The pool with all nodes alike, sized as exactly as phases are; None if none holds.

    Prompts are M/G/n here too, with an iteration that also reads resident tokens; the mode's own
    sum of P99s takes more nodes. And TPOT counts the prompts that start during an answer of A
    tokens, not their mean alone: they add (rate of a node) t E[s^2] / A to its variance.
    """
    pool, goals = fleet.pools[at], question.goals
    loads = _loads(question, fleet, at, pool.node)
    easy = msgspec.structs.replace(goals, ttft_s=math.inf, tpot_s=None)
    nodes = float(size_running(loads, pool.node, easy).nodes[0]) + np.arange(float(_TRIED))
    sized = run_with(columns(loads, np.zeros(_TRIED, dtype=np.intp)), pool.node, nodes)
    rate = float(loads.rate_per_s[0]) / nodes
    held = loads.sums[STEP_TOKENS, 0] / loads.sums[MASS, 0] * pool.node.h_s_per_token
    prompts = _prompts(loads, pool.node)
    busy_s, _ = prompts.times(nodes, pool.node.w_s + rate * held * sized.step_s)
    ttft = sized.wait_p99_s + busy_s
    _, weight, answer = _requests(question, fleet, at)
    each = float(weight @ (1 / answer)) / float(weight.sum())
    between = rate * sized.step_s * prompts.square_s * each
    tpot = sized.step_s + np.hypot(sized.tpot_p99_s - sized.step_s, NORMAL_P99 * np.sqrt(between))
    holds = np.flatnonzero((ttft <= goals.ttft_s) & (tpot <= (goals.tpot_s or math.inf)))
    if not holds.size:
        return None
    best = int(holds[0])
    return msgspec.structs.replace(
        pool,
        nodes=int(goals.installed(nodes)[best]),
        serving_nodes=int(nodes[best]),
        slots_per_node=int(loads.slots[0]),
        utilisation=float(sized.utilisation[best]),
        step_s=float(sized.step_s[best]),
        wait_p99_s=float(sized.wait_p99_s[best]),
        ttft_p99_s=float(ttft[best]),
        tpot_p99_s=float(tpot[best]),
    )


def _apart(question: Question, fleet: FleetPlan, at: int) -> PoolPlan | None:
    """One pool of a fleet in phases; None if no number of nodes meets the goals."""
    pool, goals = fleet.pools[at], question.goals
    node = decode_node(pool.node)
    loads = _loads(question, fleet, at, node)
    prompts = _prompts(loads, pool.node)
    moved_s = _moved_s(question, pool.node)
    link = prompts.rate_per_s * prompts.moments[0] * moved_s
    least = float(size_running(loads, node, goals).nodes[0])
    tried = np.arange(float(_TRIED))
    prefilling = _fewest(max(prompts.load, link), goals) + tried
    answering = max(least, _fewest(link, goals)) + tried
    p99_s, wait_s = prompts.times(prefilling, pool.node.w_s)
    decode = run_with(columns(loads, np.zeros(_TRIED, dtype=np.intp)), node, answering)
    handed_s = moved_s * prompts.p99_tokens
    # For each number of decode nodes, the fewest that compute prompts in the time that is left.
    left_s = goals.ttft_s - handed_s - decode.ttft_p99_s
    enough = np.searchsorted(-p99_s, -left_s)
    first = np.minimum(enough, _TRIED - 1)
    total = goals.installed(prefilling[first]) + goals.installed(answering)
    total[(enough == _TRIED) | ~np.isfinite(answering)] = np.inf
    best = int(total.argmin())
    if not np.isfinite(total[best]):
        return None
    at_prefill, serving = int(first[best]), int(answering[best])
    ttft_s = float(goals.ttft_s - left_s[best] + p99_s[at_prefill])
    rest_s = goals.ttft_s - handed_s - float(p99_s[at_prefill])
    skip = _skip_below(question, fleet, at, loads, float(wait_s[at_prefill]), serving, rest_s)
    return msgspec.structs.replace(
        pool,
        nodes=int(total[best]),
        serving_nodes=int(prefilling[at_prefill]) + serving,
        slots_per_node=int(loads.slots[0]),
        utilisation=float(decode.utilisation[best]),
        step_s=float(decode.step_s[best]),
        wait_p99_s=ttft_s - 2 * float(decode.step_s[best]),
        ttft_p99_s=ttft_s,
        tpot_p99_s=float(decode.tpot_p99_s[best]),
        phases=PhasesPlan(
            prefill_nodes=int(goals.installed(prefilling)[at_prefill]),
            prefill_serving=int(prefilling[at_prefill]),
            prefill_slots=_prefill_slots(pool.node, prompts.p99_tokens),
            prefill_utilisation=prompts.load / float(prefilling[at_prefill]),
            prefill_tokens_per_s=prompts.moments[0] / prompts.work_s,
            prefill_p99_s=float(p99_s[at_prefill]),
            transfer_p99_s=handed_s,
            skip_below_tokens=skip,
        ),
    )


def _fewest(load: float, goals: Goals) -> float:
    return max(float(goals.least_nodes), math.ceil(load / goals.utilisation - 1e-9))


def _moved_s(question: Question, node: NodeProfile) -> float:
    """Seconds that the KV of one token takes to a decode node."""
    if question.transfer_bytes_per_s is None:
        raise PlanError("phases without the speed of a link", "give --transfer-gb-per-s")
    if not node.kv_bytes_per_token:
        raise PlanError(
            f"{node.name} does not say how large the KV of a token is",
            "write kv_bytes_per_token in the profile, or plan without phases",
        )
    return node.kv_bytes_per_token / question.transfer_bytes_per_s


def _prefill_slots(node: NodeProfile, prompt_p99_tokens: float) -> int:
    """Sequences of a prefill node: as many P99 prompts as its cache holds."""
    fit = int(KV_USED * node.kv_tokens / prompt_p99_tokens)
    return max(1, min(fit, node.max_num_seqs))


def _loads(question: Question, fleet: FleetPlan, at: int, node: NodeProfile) -> Loads:
    """The load of one pool of a fleet, counted as on such a node; arrays of one pool.

    An iteration reads the tokens that are resident while answers grow, not their final lengths.
    """
    rate, window = question.goals.rate_per_s, question.window
    sums = prepare(
        question.workload,
        boundaries=fleet.boundaries,
        gammas=(fleet.gamma,),
        chunk_tokens=node.chunk_tokens,
        max_cut=question.max_cut,
    )
    if fleet.gamma > 1:
        every = pool_loads(sums, "paged", node, window, rate, question.p_c, long=at == 1)
        where = 0
    else:
        ranges = size_ranges(sums, node, "paged", question.goals, window)
        where = list(zip(ranges.low, ranges.high, strict=True)).index((at, at + 1))
        every = ranges.loads
    loads = columns(every, np.array([where]))  # a copy
    loads.sums[STEP_TOKENS] = loads.sums[HELD]
    return loads


def _requests(question: Question, fleet: FleetPlan, at: int) -> tuple[Floats, Floats, Floats]:
    """Prompts, weights and answers of a pool's requests before any compression."""
    edges = (0, *fleet.boundaries, question.window)
    atoms = atoms_of(question.workload, np.array(edges, dtype=np.float64))
    inside = (atoms.upper > edges[at]) & (atoms.upper <= edges[at + 1])
    return atoms.prompt[inside], atoms.weight[inside], atoms.answer[inside]


def _skip_below(
    question: Question,
    fleet: FleetPlan,
    at: int,
    loads: Loads,
    wait_s: float,
    nodes: int,
    left_s: float,
) -> int:
    """Prompt tokens below which decode computes the prompt itself.

    Its sequences then lose less time than the request would by the wait for prefill and the
    hand-over. Lowered until so many decode nodes hold their goals with these prompts.
    """
    node, goals = fleet.pools[at].node, question.goals
    slope = node.prefill_s_per_token - _moved_s(question, node)
    curve = node.attention_s_per_pair
    equal = math.inf
    if curve:
        equal = (math.sqrt(slope * slope + 2 * curve * wait_s) - slope) / curve
    elif slope > 0:
        equal = wait_s / slope
    below = min(equal, question.window) * np.arange(_PARTS, -1, -1) / _PARTS
    prompt, weight, _ = _requests(question, fleet, at)
    moved = columns(loads, np.zeros(below.size, dtype=np.intp))
    skipped = (prompt < below[:, None]) * weight
    for power, row in enumerate((PROMPT, PROMPT2, PROMPT3, PROMPT4), 1):
        moved.sums[row] = skipped @ prompt**power
    moved = msgspec.structs.replace(moved, prompt_p99_tokens=np.zeros(below.size))
    sized = run_with(moved, node, np.full(below.size, float(nodes)))
    holds = sized.ttft_p99_s <= left_s
    if goals.tpot_s is not None:
        holds &= sized.tpot_p99_s <= goals.tpot_s
    return int(below[holds][0]) if holds.any() else 0


class _Prompts(msgspec.Struct, frozen=True, kw_only=True):
    """A pool's prompts as load of nodes that compute them one after the other."""

    rate_per_s: float
    moments: tuple[float, float, float, float]
    """E[L] to E[L^4] of a prompt."""
    p99_tokens: float
    node: NodeProfile

    @property
    def load(self) -> float:
        """Nodes that full iterations keep busy."""
        return self.rate_per_s * self.work_s

    @property
    def work_s(self) -> float:
        """Mean work of a prompt in full iterations."""
        server = prefill_node(self.node)
        return self._work(np.array(server.prefill_s_per_token))[0].item()

    @property
    def square_s(self) -> float:
        """Mean square of the time that a prompt adds to iterations."""
        return self._work(np.array(self.node.prefill_s_per_token))[1].item()

    def _work(self, per_token_s: Floats) -> tuple[Floats, Floats]:
        """Mean work of a prompt, and mean square of it."""
        tokens, square, cube, fourth = self.moments
        e, q = per_token_s, prefill_node(self.node).attention_s_per_pair / 2
        return e * tokens + q * square, e * e * square + 2 * e * q * cube + q * q * fourth

    def times(self, nodes: Floats, iteration_s: Floats | float) -> tuple[Floats, Floats]:
        """P99 from arrival to the end of a prompt, and mean wait, on so many nodes.

        `iteration_s`: an iteration without prompts. Two bounds from above: each prompt alone in
        its iterations, or full iterations and one more to join them.
        """
        chunks = math.ceil(self.moments[0] / self.node.chunk_tokens) * iteration_s
        full = self.moments[0] / self.node.max_num_batched_tokens * iteration_s
        alone, wait = self._queue(nodes, iteration_s, chunks)
        packed, _ = self._queue(nodes, iteration_s, full)
        compute = self.rate_per_s * self._work(np.array(self.node.prefill_s_per_token))[0]
        joined = packed + iteration_s / np.maximum(1 - compute / nodes, 1e-9)
        return np.minimum(alone, joined), np.minimum(wait, joined)

    def _queue(
        self, nodes: Floats, iteration_s: Floats | float, each_s: Floats | float
    ) -> tuple[Floats, Floats]:
        """The times if each prompt adds `each_s` of iterations to its own work: M/G/n."""
        node, tokens = self.node, self.moments[0]
        mean, square = self._work(
            node.prefill_s_per_token + each_s / tokens + np.zeros(nodes.shape)
        )
        variation = np.maximum(square / mean**2 - 1, 0.0)
        load = np.minimum(self.rate_per_s * mean, nodes * (1 - 1e-12))
        late = wait_p99_s(nodes, load, mean, variation)
        wait = erlang_c(nodes, load) * (1 + variation) * mean / (2 * (nodes - load))
        last = math.ceil(self.p99_tokens / node.chunk_tokens) * iteration_s
        longest = self.p99_tokens * node.prefill_s_per_token + last
        longest += prefill_node(node).attention_s_per_pair / 2 * self.p99_tokens**2
        # The P99 of a sum of two that do not depend on one another, by their tails.
        tails = np.hypot(np.maximum(late - wait, 0.0), np.maximum(longest - mean, 0.0))
        return np.asarray(wait + mean + tails), np.asarray(wait)


def _prompts(loads: Loads, node: NodeProfile) -> _Prompts:
    mass = float(loads.sums[MASS, 0])
    first, second, third, fourth = (
        float(loads.sums[row, 0]) / mass for row in (PROMPT, PROMPT2, PROMPT3, PROMPT4)
    )
    return _Prompts(
        rate_per_s=float(loads.rate_per_s[0]),
        moments=(first, second, third, fourth),
        p99_tokens=float(loads.prompt_p99_tokens[0]),
        node=node,
    )
