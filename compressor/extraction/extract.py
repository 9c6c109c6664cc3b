"""Extract texts within a budget: the steps in order, and when they refuse.

Rules:
- Without a counter the budget is tokens x bytes per token x a safety margin: prompts vary around
  their kind's mean, and the extract's ratio differs from the prompt's.
- With a counter the extract is counted and the budget corrected until it fits and is full.
- System prompts, JSON and everything that the body promises stay whole.
- Extracts that would harm are refused: see `Reason`. The caller then sends the prompt as it is.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from compressor.extraction.plan import ExtractPlan, planned
from compressor.extraction.select import rendered, selected
from compressor.extraction.task import When, task_refused
from compressor.messages import SYSTEM_ROLES, Path, Promise, PromptText, all_texts
from compressor.result import Reason, Refused, Trace
from compressor.scoring.score import Profile
from compressor.text.protect import is_json

Counter = Callable[[str], int]

BLOCK_SHARE: Final = 0.20
"""Largest share of the prompt that a dropped block may have."""
COARSE: Final = 0.50
"""Least share of its budget that an extract must fill; below, too much was lost."""
CUT_TOLERANCE: Final = 0.05
"""Tolerance on `max_cut`, since sizes in tokens are estimates."""
_PROMISES: Final[dict[Promise, str]] = {
    "prefill": "the model continues the last message",
    "cache_control": "a cache holds the texts up to a mark",
    "tool_results": "the results of tools that the request does not define",
}
_TRIES: Final = 6
_FULL: Final = 0.98


@dataclass(frozen=True, slots=True)
class ExtractLimits:
    """The limits of an extract."""

    tokens: int
    """Tokens left for text."""
    bytes_per_token: float
    safety: float
    max_cut: float
    profile: Profile
    counter: Counter | None = None
    when: When = "asked"
    mark: bool = True

    @property
    def budget_bytes(self) -> int:
        """Bytes that fit: a safe bound without a counter, an estimate with one."""
        margin = 1.0 if self.counter else self.safety
        return int(max(self.tokens, 0) * self.bytes_per_token * margin)


@dataclass(frozen=True, slots=True)
class Extract:
    """New texts by path, and the decision on each unit."""

    texts: dict[Path, str]
    bytes_before: int
    bytes_after: int
    tokens_after: int | None
    question: str
    trace: Trace | None


def size_bytes(text: str) -> int:
    """UTF-8 bytes; lone surrogates count three."""
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


def extract(prompt: PromptText, limits: ExtractLimits) -> Extract | Refused:
    """An extract of the prompt's slots that fits, or the reason for refusing."""
    budget = limits.budget_bytes
    before = sum(map(size_bytes, all_texts(prompt)))

    def refused(reason: Reason, detail: str, protected: int = 0) -> Refused:
        return Refused(reason, detail, before, budget, protected)

    if budget <= 0:
        return refused("no_budget", f"{limits.tokens} tokens are left for the prompt")
    if not prompt.slots:
        return refused("no_text", "there is no text to extract from")
    tokens = None
    if limits.counter:
        tokens = sum(counted(limits.counter, text) for text in all_texts(prompt))
        # The prompt's own ratio is the best estimate of the extract's.
        limits = replace(limits, bytes_per_token=before / max(tokens, 1))
    if before <= limits.budget_bytes if tokens is None else tokens <= limits.tokens:
        return Extract({}, before, before, tokens, "", None)
    if prompt.promise:
        return refused(prompt.promise, _PROMISES[prompt.promise])
    budget = limits.budget_bytes
    cut = 1 - limits.tokens * limits.bytes_per_token / before
    if cut > limits.max_cut + CUT_TOLERANCE:
        return refused("cut_too_deep", f"{cut:.0%} would go, {limits.max_cut:.0%} may")
    found = _planned(prompt, limits)
    if isinstance(found[0], str):
        return refused(*found)
    plan, protected = found
    required = protected + plan.required_bytes + plan.margin_bytes
    if required > budget:
        detail = f"{required} bytes are kept whatever the score, {budget} fit"
        return refused("protected_too_large", detail, required)
    fitted = _fitted(plan, prompt, limits, before, protected)
    return refused(*fitted, required) if isinstance(fitted, tuple) else fitted


def _planned(
    prompt: PromptText, limits: ExtractLimits
) -> tuple[ExtractPlan, int] | tuple[Reason, str]:
    """The plan and the bytes that no plan changes, or why the texts must stay as they are."""
    turns = [slot for slot in prompt.slots if slot.role not in SYSTEM_ROLES]
    free = [slot for slot in turns if not is_json(slot.text)]
    if not any(slot.text.strip() for slot in free):
        if any(slot.text.strip() for slot in turns):
            return "json", "all texts are JSON or a system prompt"
        return "protected_too_large", "all text is a system prompt"
    plan = planned(free, limits.budget_bytes, limits.profile)
    if isinstance(plan, tuple):
        return plan
    if fault := task_refused(plan, limits.when):
        return fault
    whole = sum(map(size_bytes, all_texts(prompt)))
    return plan, whole - sum(size_bytes(slot.text) for slot in free)


def _fitted(
    plan: ExtractPlan, prompt: PromptText, limits: ExtractLimits, before: int, protected: int
) -> Extract | tuple[Reason, str]:
    """The fullest extract that fits, by bytes or by count."""
    budget = limits.budget_bytes
    best: Extract | None = None
    for attempt in range(_TRIES):
        kept = selected(
            plan.costs,
            plan.section,
            plan.tiers,
            plan.scores,
            budget - protected - plan.margin_bytes,
            plan.layout.firsts if limits.mark else None,
        )
        found = _extracted(plan, kept, before, protected, mark=limits.mark)
        if problem := _lost(plan, kept, found, budget, protected):
            return best or problem
        if limits.counter is None:
            return found
        tokens = sum(counted(limits.counter, text) for text in _texts_after(prompt, found.texts))
        if tokens <= limits.tokens:
            best = _better(best, found, tokens)
            if tokens >= _FULL * limits.tokens or attempt >= _TRIES // 2:
                break
        # Slightly less than proportional: the next units may have more tokens per byte.
        budget = int(found.bytes_after * limits.tokens / max(tokens, 1) * 0.995)
    if best is None:
        return "over_budget", f"no extract of at most {limits.tokens} tokens was found"
    return best


def _better(best: Extract | None, found: Extract, tokens: int) -> Extract:
    if best is not None and best.bytes_after >= found.bytes_after:
        return best
    return replace(found, tokens_after=tokens)


def _extracted(
    plan: ExtractPlan, kept: npt.NDArray[np.bool_], before: int, protected: int, *, mark: bool
) -> Extract:
    layout = plan.layout
    chars, spans = layout.ground.chars, layout.parts.spans
    texts = {
        slot.path: rendered(chars, spans, kept, start, end, mark=mark)
        for slot, start, end in zip(
            layout.texts, layout.starts.tolist(), layout.ends.tolist(), strict=True
        )
    }
    asked = zip(
        spans.starts[plan.question.units].tolist(),
        spans.ends[plan.question.units].tolist(),
        strict=True,
    )
    return Extract(
        texts={
            slot.path: texts[slot.path] for slot in layout.texts if texts[slot.path] != slot.text
        },
        bytes_before=before,
        bytes_after=protected + sum(map(size_bytes, texts.values())),
        tokens_after=None,
        question="\n".join([chars.text[start:end] for start, end in asked]),
        trace=Trace(
            text=chars.text,
            starts=spans.starts,
            ends=spans.ends,
            slots=layout.slots,
            passages=layout.parts.passage,
            tiers=plan.tiers,
            scores=plan.scores,
            kept=kept,
        ),
    )


def _lost(
    plan: ExtractPlan, kept: npt.NDArray[np.bool_], found: Extract, budget: int, protected: int
) -> tuple[Reason, str] | None:
    """Why an extract lost too much: a large block, or most of its budget."""
    spans = plan.layout.parts.spans
    for start, _ in plan.layout.blocks:
        unit = int(np.searchsorted(spans.starts, start))
        size = int(plan.costs.unit[unit])
        if size > BLOCK_SHARE * found.bytes_before and not kept[unit]:
            return "block_too_large", f"a block of {size} bytes does not fit beside the rest"
    if found.bytes_after > budget:
        return "over_budget", f"marks alone need {found.bytes_after} bytes, {budget} fit"
    room = min(budget, found.bytes_before) - protected
    if found.bytes_after - protected < COARSE * room:
        return "too_coarse", f"only {found.bytes_after} bytes of {budget} could be used"
    return None


def counted(counter: Counter, text: str) -> int:
    """Tokens of `text`; lone surrogates are counted as question marks."""
    try:
        return counter(text)
    except UnicodeError:
        return counter(text.encode("utf-8", "replace").decode())


def _texts_after(prompt: PromptText, texts: dict[Path, str]) -> list[str]:
    return [texts.get(slot.path, slot.text) for slot in prompt.slots] + prompt.fixed
