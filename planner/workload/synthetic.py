"""Synthetic workloads from a few figures, for planning before there is traffic."""

from typing import Final

import numpy as np

from planner.errors import PlanError
from planner.workload.workload import Workload, from_lengths

_REQUESTS: Final = 20_000
_SEED: Final = 1
_KEYS: Final = {"prompt": 1500.0, "answer": 250.0, "spread": 1.0, "longest": 65_536.0}


def synthetic(spec: str) -> Workload:
    """Log-normal prompts and answers: `prompt=1500,answer=250,spread=1,longest=65536`.

    `prompt` and `answer` are medians in tokens, `spread` the standard deviation of their
    logarithms, `longest` a limit on totals. The same text gives the same requests.
    """
    given = dict(_KEYS)
    for part in filter(None, spec.split(",")):
        key, _, value = part.partition("=")
        try:
            given[key if key in _KEYS else ""] = float(value)
        except ValueError:
            raise PlanError(f"synthetic:{spec}", "every value is a number") from None
    if "" in given or min(given["prompt"], given["answer"]) < 1 or given["longest"] < 2:
        raise PlanError(f"synthetic:{spec}", f"use {', '.join(_KEYS)}, in tokens")
    if not 0 <= given["spread"] <= 3:
        raise PlanError(f"a spread of {given['spread']:g}", "give 0 (all alike) to 3")
    random = np.random.default_rng(_SEED)
    drawn = random.normal(0.0, given["spread"], size=(2, _REQUESTS))
    prompts = np.ceil(np.clip(given["prompt"] * np.exp(drawn[0]), 1, given["longest"] - 1))
    room = given["longest"] - prompts
    answers = np.ceil(np.clip(given["answer"] * np.exp(drawn[1]), 1, room))
    note = "made up: plan again once there is a log"
    return from_lengths(prompts, answers, name=f"synthetic:{spec}", notes=(note,))
