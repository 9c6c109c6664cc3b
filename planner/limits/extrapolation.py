"""Whether a plan goes beyond what its node was measured on, and how wrong it may then be.

Attention makes a prompt token dearer in proportion to the length before it. A profile whose
measured prompts were too short to show it has a straight line through them. A longer prompt then
costs between the line and its square: that is the interval of a time to first token. A profile
with `attention_s_per_pair` has that cost in it.
"""

from collections.abc import Iterator
from typing import Final

import numpy as np

from planner.errors import PlanError
from planner.profile import NodeProfile
from planner.records import FleetPlan, PoolPlan, Question
from planner.workload.atoms import atoms_of

SLACK: Final = 1.1
"""A prompt this much longer than the longest measured one is as good as measured."""
MAX_SHARE_BEYOND: Final = 0.01
"""Share of requests with longer prompts from which on P99s are extrapolated."""


def check_range(question: Question) -> None:
    """Raise PlanError if too many prompts are longer than a node was measured on."""
    if question.extrapolate:
        return
    for node in (*question.nodes, question.short_node, question.long_node):
        measured = None if node is None else node.measured
        if node is None or measured is None:
            continue
        beyond = _share_beyond(question, SLACK * measured.longest_prompt_tokens)
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
            up_to_s = pool.ttft_p99_s + _dearer_s(pool.node, prompt, most)
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


def _dearer_s(node: NodeProfile, prompt: float, measured: int) -> float:
    """What a prompt may take beyond the straight line, seconds."""
    return node.prefill_s_per_token * prompt * (prompt / measured - 1)


def _share_beyond(question: Question, tokens: float) -> float:
    atoms = atoms_of(question.workload, np.array([], dtype=np.float64))
    total = float(atoms.weight.sum())
    return float(atoms.weight[atoms.prompt > tokens].sum()) / total


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
