"""Summarise a plan in sentences, for readers of a single page."""

import math
from typing import Final

from planner.goals import Goals
from planner.limits import notes_on_range
from planner.records import FleetPlan, PhasesCompared, PlanResult

_NO_RATE: Final = 1e-6
"""Requests per second that are none but for rounding."""


def notes_of(plan: PlanResult) -> tuple[str, ...]:
    """The plan's conclusions, its limits and its assumptions."""
    notes = [_answer(plan), *map(_winner, plan.compared), _lengths(plan), _compression(plan)]
    notes += _limits(plan)
    notes += _shape(plan)
    if plan.question.mode != "paged":
        notes.append(
            "slots are counted by window here, as the papers do; engines that allocate KV by "
            "block run more, and mode paged is what to provision with"
        )
    if plan.question.mode == "paper":
        notes.append(
            "billed as the paper's tables are, a node as one GPU; eight A100 cost eight times that"
        )
    if len(plan.chosen.pools) == 1 and plan.chosen.boundaries:
        notes.append(
            f"no pool is left for what stays above {plan.chosen.boundaries[0]} tokens when "
            "compression fails"
        )
    if plan.question.mode in {"paper", "exact"} and plan.chosen.gamma > 1:
        notes.append(
            f"mode {plan.question.mode} leaves compressed requests out of the short pool's mix, "
            "as published: such a fleet overloads its short pool; see mode corrected"
        )
    for node in {pool.node for pool in plan.chosen.pools}:
        if node.source.startswith("roofline"):
            notes.append(f"{node.name} is a roofline, not a measurement")
        if node.verified is False:
            notes.append(f"{node.name} is unverified: its held-out load was missed")
    sources = {node.source.startswith("roofline") for node in plan.question.nodes}
    if len(sources) > 1:
        notes.append(
            "rooflines charge prompts their arithmetic, the published constants do not: the kinds "
            "of node are not compared like for like"
        )
    notes += _phases(plan)
    notes += _floor(plan)
    notes += notes_on_range(plan.question, plan.chosen)
    notes += plan.question.workload.notes
    return tuple(notes)


def _answer(plan: PlanResult) -> str:
    chosen = plan.chosen
    if not chosen.feasible:
        return f"no fleet meets the goals{_easier(plan)}"
    if not chosen.boundaries:
        others = [f for f in (plan.two, plan.compressed, *plan.splits) if f.feasible]
        cheapest = min(others, key=lambda fleet: fleet.weight, default=None)
        if cheapest is None:
            why = "no split of it meets the goals" if plan.grid else "no boundary would split it"
            return f"one pool of {chosen.nodes} nodes; {why}"
        shape = plan.shape
        kind = f" (archetype {shape.archetype})" if shape is not None else ""
        either = ", compressed or not," if plan.compressed.feasible else ""
        return (
            f"one pool of {chosen.nodes} nodes: the best split of these lengths{kind}{either} "
            f"takes {cheapest.nodes}, so pools would buy no nodes here"
        )
    saved = ""
    if plan.savings is not None:
        side = "below" if plan.savings >= 0 else "above"
        saved = f", {100 * abs(plan.savings):.1f} % {side} {plan.baseline}"
    return f"{chosen.label}: {fleet_line(chosen)} nodes{saved}"


def _lengths(plan: PlanResult) -> str:
    """The lengths that were planned with, and where they are from."""
    workload = plan.question.workload
    prompt, answer = workload.mean_lengths()
    return (
        f"lengths: {workload.source or workload.name}; {prompt:,.0f} tokens of prompt and "
        f"{answer:,.0f} of answer on average"
    )


def _compression(plan: PlanResult) -> str:
    """The p_c that was planned with, and where it is from."""
    question = plan.question
    if question.compressible is None:
        return (
            "no compression is planned: p_c, the share of prompts above a boundary that can be "
            "cut, is not known; give --pc, or the log of a gateway that compresses"
        )
    share = question.compressed_share(plan.chosen)
    used = f"p_c {share:.2f}" if plan.chosen.gamma > 1 else "none is worth it"
    return f"compression: {used} ({question.compressible_said or 'p_c as given'})"


def _easier(plan: PlanResult) -> str:
    """Advice on how to meet the SLO; names the TTFT of the longest prompt if that exceeds it."""
    goals: Goals = plan.question.goals
    node = plan.question.long_node or plan.question.nodes[0]
    longest = plan.question.workload.longest_tokens
    least_s = (math.ceil(longest / node.chunk_tokens) + 1) * node.w_s
    least_s += node.prompt_s(longest)
    if least_s <= goals.ttft_s:
        return ": raise --slo-ttft-ms or --slo-tpot-ms"
    return (
        f": the longest prompts take up to {1000 * least_s:.0f} ms of prefill alone on an idle "
        f"{node.name}; raise --slo-ttft-ms above that, or use a node with larger chunks"
    )


def _limits(plan: PlanResult) -> list[str]:
    """Why alternatives are not feasible, and pools not full."""
    lost = [fleet.label for fleet in plan.alternatives if not fleet.feasible]
    out = [f"{'; '.join(lost)}: no number of nodes meets the goals{_easier(plan)}"] if lost else []
    goals = plan.question.goals
    for pool in plan.chosen.pools:
        if pool.rate_per_s < _NO_RATE:
            out.append(
                f"pool {pool.name} gets no requests as planned: its {pool.nodes} nodes are for "
                "prompts that compression turns out not to cut"
            )
        elif pool.utilisation < 0.5 * goals.utilisation:
            least = pool.serving_nodes <= goals.least_nodes
            why = (
                f"it has the fewest nodes that a pool may have, {goals.least_nodes}"
                if least
                else "latency or KV bandwidth sizes it, not slots"
            )
            out.append(f"pool {pool.name} uses {100 * pool.utilisation:.0f} % of its slots: {why}")
    return out


def _floor(plan: PlanResult) -> list[str]:
    """What reserved baselines need."""
    reserved, chosen = plan.question.reserved, plan.chosen
    if reserved is None or not chosen.feasible:
        return []
    needs = f"{reserved.entitlements} entitlements reserve {reserved.sequences} sequences"
    if reserved.tokens_per_s:
        needs += f" and {reserved.tokens_per_s:,.0f} tokens/s"
    if not chosen.floor_nodes:
        return [f"{needs}: within what the demand needs"]
    return [f"{needs}: {chosen.floor_nodes} nodes more than the demand needs"]


def _shape(plan: PlanResult) -> list[str]:
    shape = plan.shape
    # One pool is the verdict: advice on how to split would contradict it.
    if shape is None or not plan.chosen.boundaries:
        return []
    out = [f"archetype {shape.archetype}: {shape.advice}"]
    if plan.closed_form_savings is not None:
        out.append(
            f"alpha (1 - 1/rho) promises {100 * plan.closed_form_savings:.0f} %; it gives the "
            "long pool the mix of all requests and counts slots by window"
        )
    return out


def _phases(plan: PlanResult) -> list[str]:
    """What phases are planned with."""
    out = [
        f"pool {pool.name} in phases: prefill's P99 is {1000 * phases.prefill_p99_s:.0f} ms at "
        f"{100 * phases.prefill_utilisation:.0f} % use, the P99 prompt's KV moves in "
        f"{1000 * phases.transfer_p99_s:.0f} ms, decode computes prompts below "
        f"{phases.skip_below_tokens} tokens itself"
        for pool in plan.chosen.pools
        if (phases := pool.phases) is not None
    ]
    if plan.compared:
        out.append(
            "phases: nodes that prefill or decode alone are taken to have the iteration of the "
            "profile; together, TPOT counts the prompts between an answer's tokens"
        )
        hit = plan.question.workload.cached_share
        out += [f"phases: {100 * hit:.0f} % of prompt tokens are planned as cached"] if hit else []
    return out


def _winner(pool: PhasesCompared) -> str:
    together, apart = pool.together, pool.apart
    if apart is None or apart.phases is None:
        name = "" if together is None else f"pool {together.name}: "
        return f"{name}together wins: in phases no number of nodes meets the goals"
    sides = f"{apart.phases.prefill_nodes} prefill + {apart.decode_nodes} decode"
    if together is None:
        return f"pool {apart.name}: apart wins: {sides}; together no number meets the goals"
    more = f"{100 * (apart.nodes / together.nodes - 1):+.0f} %"
    if pool.apart_wins:
        return f"pool {apart.name}: apart wins: {sides} against {together.nodes} together, {more}"
    return f"pool {apart.name}: together wins: {together.nodes} against {sides} apart, {more}"


def fleet_line(fleet: FleetPlan) -> str:
    """Nodes by pool, as `39 + 60`, in phases `3p+5d`; or `not feasible`."""
    if not fleet.feasible:
        return "not feasible"
    return " + ".join(
        f"{pool.phases.prefill_nodes}p+{pool.decode_nodes}d" if pool.phases else str(pool.nodes)
        for pool in fleet.pools
    )
