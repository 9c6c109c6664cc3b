"""What a question may ask, what a plan may not go beyond, and what it may not fall below.

Attention makes a prompt token dearer in proportion to the length before it. A profile whose
measured prompts were too short to show it has a straight line through them. A longer prompt then
costs between the line and its square: that is the interval of a time to first token. A profile
with `attention_s_per_pair` has that cost in it.
"""

from collections.abc import Iterator
from math import ceil
from typing import Final

import msgspec
import numpy as np

from planner.errors import PlanError
from planner.goals import check_goals
from planner.records import FleetPlan, PoolPlan, Question, Reserved
from planner.search import price
from planner.workload.atoms import atoms_of
from planner.workload.moments import boundaries_of

SLACK: Final = 1.1
"""A prompt this much longer than the longest measured one is as good as measured."""
MAX_SHARE_BEYOND: Final = 0.01
"""Share of requests with longer prompts from which on P99s are extrapolated."""


def checked_boundaries(question: Question) -> tuple[int, ...]:
    """The boundaries to plan with; raises PlanError for an inconsistent question."""
    window, workload = question.window, question.workload
    if workload.longest_tokens > window:
        raise PlanError(
            f"requests of up to {workload.longest_tokens} tokens exceed the window of {window}",
            f"raise --max-model-len to {workload.longest_tokens} or more",
        )
    for node in (*question.nodes, question.short_node, question.long_node):
        if node is None:
            continue
        check_goals(node, question.goals)
        if node.window_slots(window) < 1 and node is not question.short_node:
            raise PlanError(
                f"{node.name} holds {node.kv_tokens} tokens of KV cache, less than one window of "
                f"{window}",
                "use more GPUs per node, a larger GPU, or a smaller --max-model-len",
            )
    if len(question.b_short) > 1 and (question.mode == "paper" or (question.gamma or 1) > 1):
        raise PlanError(
            "more than one boundary with mode paper or with gamma above 1",
            "give one boundary: the paper, and compression, are about two pools",
        )
    if not 0 <= question.p_c <= 1:
        raise PlanError(f"p_c is {question.p_c:g}", "give a share from 0 to 1")
    if question.gamma is not None and question.gamma < 1:
        raise PlanError(f"gamma is {question.gamma:g}", "give 1 (no compression) or more")
    if (question.gamma or 1) > 1 and question.compressible is None:
        raise PlanError(
            f"gamma {question.gamma:g} compresses, and p_c, the share of prompts that can be, is "
            "not known",
            "give --pc, the log of a gateway that compresses, or --gamma 1",
        )
    for b_short in question.b_short:
        if not 0 < workload.share(b_short) < 1:
            raise PlanError(
                f"no request lies on one side of a boundary at {b_short} tokens",
                f"choose one below the longest request ({workload.longest_tokens})",
            )
    if list(question.b_short) != sorted(set(question.b_short)):
        raise PlanError("boundaries are not ascending", "sort --b-short, shortest first")
    return question.b_short or boundaries_of(workload, window)


def check_range(question: Question) -> None:
    """Raise PlanError if too many prompts are longer than a node was measured on."""
    if question.extrapolate:
        return
    atoms = atoms_of(question.workload, np.array([], dtype=np.float64))
    for node in (*question.nodes, question.short_node, question.long_node):
        measured = None if node is None else node.measured
        if node is None or measured is None:
            continue
        longer = atoms.prompt > SLACK * measured.longest_prompt_tokens
        beyond = float(atoms.weight[longer].sum() / atoms.weight.sum())
        if beyond > MAX_SHARE_BEYOND:
            longest = int(_prompt_quantile(question, 0, question.window, 0.999))
            raise PlanError(
                f"{node.name} was measured on prompts up to {measured.longest_prompt_tokens} "
                f"tokens, and {100 * beyond:.0f} % of the requests have longer ones",
                f"run `sluice calibrate --max-prompt {longest}`, or give --extrapolate to plan "
                "with an interval",
            )


def notes_on_range(question: Question, fleet: FleetPlan) -> Iterator[str]:
    """Pools of a planned fleet that go beyond what their node was measured on."""
    low = 0
    for pool in fleet.pools:
        yield from _pool_notes(question, pool, low)
        low = pool.boundary_tokens or pool.window_tokens


def _pool_notes(question: Question, pool: PoolPlan, low: int) -> Iterator[str]:
    measured = pool.node.measured
    if measured is None:
        return
    prompt = _prompt_quantile(question, low, pool.boundary_tokens or pool.window_tokens, 0.99)
    most = measured.longest_prompt_tokens
    if prompt > SLACK * most:
        said = "is extrapolated"
        if not pool.node.attention_s_per_pair:
            # Beyond the straight line.
            dearer_s = pool.node.prefill_s_per_token * prompt * (prompt / most - 1)
            up_to_s = pool.ttft_p99_s + dearer_s
            said = f"lies between {1000 * pool.ttft_p99_s:.0f} and {1000 * up_to_s:.0f} ms"
        yield (
            f"pool {pool.name} has prompts of {prompt:,.0f} tokens at P99, {pool.node.name} was "
            f"measured up to {most:,}: its P99 TTFT {said}; "
            f"`sluice calibrate --max-prompt {prompt:.0f}` tells"
        )
    running = pool.utilisation * pool.slots_per_node
    if running > SLACK * measured.most_sequences:
        yield (
            f"pool {pool.name} runs {running:.0f} sequences a node, {pool.node.name} was measured "
            f"up to {measured.most_sequences}: give `sluice calibrate --most-concurrency "
            f"{running:.0f}`"
        )


def _prompt_quantile(question: Question, low: int, high: int, share: float) -> float:
    """A quantile of the prompts of requests whose total lies in (low, high]."""
    atoms = atoms_of(question.workload, np.array([], dtype=np.float64))
    inside = (atoms.upper > low) & (atoms.upper <= high)
    if not inside.any():
        return 0.0
    order = np.argsort(atoms.prompt[inside])
    weight = np.cumsum(atoms.weight[inside][order])
    index = int(np.searchsorted(weight, share * weight[-1]))
    return float(atoms.prompt[inside][order][min(index, len(order) - 1)])


def floored(fleet: FleetPlan, question: Question) -> FleetPlan:
    """The fleet with as many more nodes as its reserves need, in the pool where they are cheapest.

    The gateway splits a reserve over pools by their slots, so the fleet's slots count in all. One
    slot more stays free, which is the gateway's default headroom.
    """
    reserved = question.reserved
    if reserved is None or not fleet.pools:
        return fleet
    pools = list(fleet.pools)
    at = min(range(len(pools)), key=lambda i: price(pools[i].node) / pools[i].slots_per_node)
    pool = pools[at]
    slots = sum(pool.decode_serving * pool.slots_per_node for pool in pools)
    missing_slots = ceil((reserved.sequences + 1 - slots) / pool.slots_per_node)
    more = max(missing_slots, _missing_kv(pools, reserved, at))
    if more <= 0:
        return fleet
    serving = pool.serving_nodes + more
    # The other figures are those of fewer nodes, and so on the safe side.
    pools[at] = msgspec.structs.replace(
        pool,
        nodes=pool.nodes + more,
        serving_nodes=serving,
        utilisation=pool.utilisation * pool.decode_serving / (pool.decode_serving + more),
    )
    return msgspec.structs.replace(fleet, pools=tuple(pools), floor_nodes=more)


def _missing_kv(pools: list[PoolPlan], reserved: Reserved, at: int) -> int:
    each = pools[at].node
    if not reserved.kv_bytes or not each.kv_bytes_per_token:
        return 0
    held = sum(p.decode_serving * p.node.kv_tokens * p.node.kv_bytes_per_token for p in pools)
    return ceil((reserved.kv_bytes - held) / (each.kv_tokens * each.kv_bytes_per_token))
