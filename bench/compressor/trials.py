"""Answers preserved in prompts compressed to a share of their bytes, by us and by baselines."""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, Literal

import numpy as np

import compressor
from bench.compressor.prompts import Messages, PromptCase
from compressor.extraction.plan import planned
from compressor.extraction.select import rendered, selected
from compressor.messages import read_chat, written
from compressor.text.terms import Floats

Method = Literal["default", "paper", "random", "head+tail"]
METHODS: Final[tuple[Method, ...]] = ("default", "paper", "random", "head+tail")
REDUCTIONS: Final = (0.10, 0.154, 0.25, 0.40, 0.50)


@dataclass(frozen=True, slots=True)
class Trial:
    """One prompt compressed once."""

    prompt: PromptCase
    method: Method
    reduction: float
    kept: bool
    """Whether every gold sentence is still there, word for word. False when refused."""
    refused: str
    cut: float
    fits: bool


def size_of(messages: Messages) -> int:
    """UTF-8 bytes of the contents."""
    return sum(len(message["content"].encode()) for message in messages)


def trial(prompt: PromptCase, method: Method, reduction: float) -> Trial:
    """`prompt` cut to 1 - `reduction` of its bytes: no estimate of tokens is involved."""
    size = size_of(prompt.messages)
    budget = int(size * (1 - reduction))
    if method in {"default", "paper"}:
        result = compressor.compress(
            prompt.messages,
            budget,
            1.0,
            safety=1.0,
            profile="paper" if method == "paper" else "default",
            when="any",
        )
        if isinstance(result, compressor.Refused):
            return Trial(prompt, method, reduction, False, result.reason, 0.0, True)
        messages = result.messages
    else:
        messages = _baseline(prompt.messages, budget, _SCORES[method])
    after = size_of(messages)
    return Trial(
        prompt, method, reduction, kept_in(messages, prompt.gold), "", 1 - after / size,
        after <= budget,
    )  # fmt: skip


def kept_in(messages: Messages, gold: tuple[str, ...]) -> bool:
    """Whether all sentences are in the messages, line breaks aside."""
    text = " ".join(" ".join(message["content"].split()) for message in messages)
    return all(" ".join(sentence.split()) in text for sentence in gold)


def _baseline(messages: Messages, budget: int, score: Callable[[int], Floats]) -> Messages:
    """The same units and the same protection with other scores."""
    prompt = read_chat(messages)
    free = [slot for slot in prompt.slots if slot.role != "system"]
    protected = size_of(messages) - sum(len(slot.text.encode()) for slot in free)
    plan = planned(free, budget, "default")
    if isinstance(plan, tuple):
        return messages
    layout = plan.layout
    plan = replace(plan, scores=score(len(plan.scores)))
    room = budget - protected - plan.margin_bytes
    kept = selected(plan.costs, plan.section, plan.tiers, plan.scores, room)
    texts = {
        slot.path: rendered(layout.ground.chars, layout.parts.spans, kept, int(start), int(end))
        for slot, start, end in zip(free, layout.starts, layout.ends, strict=True)
    }
    found: Messages = written(messages, texts)
    return found


def _random(units: int) -> Floats:
    return np.array([random.Random(units * 7919 + i).random() for i in range(units)])


def _head_and_tail(units: int) -> Floats:
    at = np.arange(units)
    return -np.minimum(at, units - 1 - at).astype(np.float64)


_SCORES: Final[dict[str, Callable[[int], Floats]]] = {
    "random": _random,
    "head+tail": _head_and_tail,
}
