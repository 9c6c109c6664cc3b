"""Runs of the paper's group, shared by several tables and plots of `bench bfio`."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Final

import numpy as np

from simulator.barrier.group import Policy, simulate_group
from simulator.barrier.lookahead import BySurvival, Oracle
from simulator.barrier.output_survival import OTHER, OutputSurvival
from simulator.barrier.policies import BfIo, Fcfs, Jsq, LeastKv, PowerOfD, RoundRobinPolicy
from simulator.barrier.records import BarrierSpec, BarrierWork, Floats, History
from simulator.barrier.state import BarrierGroup
from simulator.barrier.summary import Summary, summarise
from simulator.barrier.work import like_burst, of_lengths

REQUESTS: Final = 22_000
SEEDS: Final = (0, 1, 2)
GROUP: Final = BarrierSpec()
"""G = 16, B = 72, R = 128."""
CLASS_MEANS: Final = (50.0, 150.0, 300.0, 500.0)
CLASSES: Final = range(len(CLASS_MEANS))
LONGEST_TOKENS: Final = 4200
"""Up to which the survival curve is asked for: the workload's outputs end at 4,096."""

POLICIES: Final[dict[str, Callable[[], Policy]]] = {
    "FCFS": Fcfs,
    "JSQ": Jsq,
    "round robin": RoundRobinPolicy,
    "power of 2": PowerOfD,
    "least KV": LeastKv,
    "BF-IO H=0": BfIo,
    "BF-IO H=20": lambda: BfIo(20, ahead=Oracle()),
}


@cache
def burst(seed: int) -> BarrierWork:
    """The workload that stands for BurstGPT."""
    return like_burst(REQUESTS, np.random.default_rng(seed))


@cache
def history(name: str, seed: int) -> History:
    """One of POLICIES on that workload."""
    return simulate_group(GROUP, burst(seed), POLICIES[name]())


@cache
def summary(name: str, seed: int) -> Summary:
    """Its figures."""
    return summarise(history(name, seed))


def mean_of(summaries: Sequence[Summary], figure: str) -> float:
    """A figure's mean over seeds."""
    return float(np.mean([getattr(found, figure) for found in summaries]))


def by_class(seed: int) -> tuple[BarrierWork, list[int]]:
    """As long prompts; outputs that go by their class, within a fifth, of the same mean."""
    random = np.random.default_rng([seed, 2])
    prompts = like_burst(REQUESTS, random).prompt_tokens
    kinds = random.integers(0, len(CLASS_MEANS), REQUESTS)
    outputs = np.array(CLASS_MEANS)[kinds] * random.lognormal(0, 0.2, REQUESTS)
    return of_lengths(prompts, np.rint(outputs)), kinds.tolist()


def by_kaplan_meier(work: BarrierWork, horizon: int, kinds: Sequence[int] | None = None) -> Summary:
    """BF-IO that looks ahead by what it has learned in the same run of answers' lengths.

    `kinds`: each request's class; None where they are not told apart.
    """
    known = OutputSurvival()
    names = [f"class {kind}" for kind in CLASSES] if kinds is not None else [OTHER]

    def learn(_: BarrierGroup, ended: Sequence[int]) -> None:
        for request in ended:
            name = names[kinds[request]] if kinds is not None else OTHER
            known.observe(name, int(work.output_tokens[request]), censored=False)

    def curves() -> list[Floats]:
        ages = range(LONGEST_TOKENS)
        return [np.array([known.survival(name, age) for age in ages]) for name in names]

    policy = BfIo(horizon, ahead=BySurvival(curves, kinds))
    return summarise(simulate_group(GROUP, work, policy, ended=learn))
