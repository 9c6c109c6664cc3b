"""Whether the prompt's task survives extraction: a question about one of several passages.

Summaries, translations, proofreading and extraction need every sentence; so do examples that the
model is to follow. This module knows no language's words for such tasks. It recognises a question
over retrieved passages by its form:

- one user turn, whose text or tool results consist of passages with headers;
- a sentence that asks, or a short text beside tools' results, with words that occur in the
  passages, and in some passages only.
"""

from typing import Final, Literal

import numpy as np

from compressor.extraction.plan import ExtractPlan, Layout
from compressor.messages import TOOL_ROLES
from compressor.result import Reason
from compressor.scoring.question import SHORT_BYTES
from compressor.text.chars import RUN, Ints
from compressor.text.examples import shows_examples
from compressor.text.markers import MIN_PLAIN, MIN_STRUCTURAL
from compressor.text.terms import sums

When = Literal["asked", "any"]
WEIGHT: Final = 0.45
"""Least weight of a question (`Relevance.weight`)."""
MATCHED: Final = 0.5
"""Least share of a question's words that occur in the passages: in another language few do."""
_MATCHED_MIN: Final = 2
"""At least so many of them, unless the question has fewer."""
SPREAD: Final = 0.25
"""A word in more than this share of the passages singles none out."""
_SPREAD_MIN: Final = 2
"""A word in so few passages does, however few there are."""
LARGEST: Final = 0.6
"""Largest share of the text that one section may have; half of it if others are far smaller."""
_TIMES: Final = 6
COHESION: Final = 0.12
"""From this share of words that most passages have on, they are one document's clauses: licences
and contracts have .15 to .35, retrieved passages under .08."""
_COHESIVE_MIN: Final = 5
"""Fewer passages share words by chance."""
_DENSE: Final = 1 << 20
"""Most cells of a table of sections and words; beyond, pairs are sorted."""
Fault = tuple[Reason, str]


def task_refused(plan: ExtractPlan, when: When) -> Fault | None:
    """Why the task needs its whole text; None if it can do with less."""
    if fault := _examples(plan.layout):
        return fault
    if when == "any":
        return None
    layout = plan.layout
    users = {slot.turn for slot in layout.texts if slot.role == "user" and slot.text.strip()}
    if len(users) != 1:
        return "not_retrieval", f"a conversation of {len(users)} user turns"
    return _unmarked(plan) or _unasked(plan) or _foreign(plan) or _broad(plan)


def _examples(layout: Layout) -> Fault | None:
    parts, text = layout.parts, layout.ground.chars.text
    for index, slot in enumerate(layout.texts):
        own = np.flatnonzero((layout.slots == index) & ~parts.furniture)
        if slot.role == "user" and shows_examples(text, parts.spans, own):
            return "few_shot", "the last line has the prefix of earlier ones: examples"
    return None


def _unmarked(plan: ExtractPlan) -> Fault | None:
    parts = plan.layout.parts
    if any(slot.role in TOOL_ROLES for slot in plan.layout.texts):
        return None
    if parts.plain_marks < MIN_PLAIN and parts.structural_marks < MIN_STRUCTURAL:
        return "not_retrieval", "no headers separate passages"
    if _uneven(plan):
        return "not_retrieval", "most of the text is between two headers"
    if parts.plain_marks >= MIN_PLAIN:
        return None
    share, sections = _cohesion(plan)
    if sections >= _COHESIVE_MIN and share >= COHESION:
        return "not_retrieval", f"one document: its sections share {share:.0%} of their words"
    return None


def _uneven(plan: ExtractPlan) -> bool:
    """Whether most text is in one section: headers that are footnotes leave it there."""
    sizes = sums(plan.layout.parts.section, plan.costs.unit.astype(np.float64), _sections(plan))
    sizes = sizes[sizes > 0]
    largest = sizes.max(initial=0) / max(sizes.sum(), 1)
    return bool(
        largest > LARGEST
        or (largest > LARGEST / 2 and sizes.max(initial=0) > _TIMES * np.median(sizes))
    )


def _cohesion(plan: ExtractPlan) -> tuple[float, int]:
    """Share of the words that half of the sections have; sections. Words of letters only."""
    terms, spread, sections = plan.terms, _section_spread(plan), _sections(plan)
    if (plan.layout.ground.chars.classes & RUN).any():
        # Pairs of characters repeat in any text of such scripts.
        return 0.0, sections
    counts = sums(terms.term, terms.count, len(terms.spread))
    common = spread >= max(MIN_STRUCTURAL, sections / 2)
    return float(counts[common].sum() / max(counts.sum(), 1)), sections


def _unasked(plan: ExtractPlan) -> Fault | None:
    spans, asking = plan.layout.parts.spans, plan.asking
    if not len(asking) and _apart(plan.layout):
        return None
    if not len(asking):
        return "no_question", "no sentence outside the passages asks"
    hashes = plan.layout.ground.chars.hashes(spans.starts[asking], spans.ends[asking])
    if (different := len(np.unique(hashes))) > 1:
        return "several_questions", f"{different} sentences ask"
    return None


def _apart(layout: Layout) -> bool:
    """Whether the passages are tools' results, so that the user's short text is the question."""
    own = [slot.text for slot in layout.texts if slot.role == "user"]
    return len(own) == 1 and len(own[0]) <= SHORT_BYTES and len(layout.texts) > 1


def _foreign(plan: ExtractPlan) -> Fault | None:
    """Refuse where few of the question's words occur: another script, language or subject."""
    words, found = len(plan.question.terms), len(plan.relevance.matched)
    if words and found < max(MATCHED * words, min(_MATCHED_MIN, words)):
        return "cross_lingual", f"{found} of the question's {words} words occur in the passages"
    return None


def _broad(plan: ExtractPlan) -> Fault | None:
    weight = plan.relevance.weight
    if weight < WEIGHT:
        return "no_question", f"the question weighs {weight:.2f}, {WEIGHT:g} is needed"
    sections = _sections(plan)
    spread = _section_spread(plan)[plan.relevance.matched]
    if spread.min(initial=sections) > max(_SPREAD_MIN, SPREAD * sections):
        return "broad_question", "all of the question's words occur in most passages"
    return None


def _sections(plan: ExtractPlan) -> int:
    return int(plan.layout.parts.section[-1]) + 1


def _section_spread(plan: ExtractPlan) -> Ints:
    """Sections that have each term, the question's own units left out."""
    terms = plan.terms
    asking = np.zeros(terms.units, np.bool_)
    asking[plan.question.units] = True
    rows = np.flatnonzero(~asking[terms.unit])
    width = len(terms.spread)
    pairs = plan.layout.parts.section[terms.unit[rows]] * width + terms.term[rows]
    if width * _sections(plan) > _DENSE:
        return np.bincount(np.unique(pairs) % width, minlength=width)
    held = np.bincount(pairs, minlength=width * _sections(plan)).reshape(-1, width)
    spread: Ints = np.count_nonzero(held, axis=0)
    return spread
