"""Prepare a prompt's texts for selection: units, costs, tiers, scores.

Kept before any score: the question, the first unit of each message, the first HEAD_UNITS and
the last TAIL_UNITS of all (FleetOpt, section 5.2: primacy and recency). System prompts are not
planned: they stay whole.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from compressor.extraction.select import Costs, costs_of
from compressor.messages import Slot
from compressor.result import TIERS, Reason
from compressor.scoring.bm25 import Relevance, relevance
from compressor.scoring.question import (
    NEAR,
    SHORT_BYTES,
    QuestionTerms,
    asked,
    asking_units,
    sentences_asked,
)
from compressor.scoring.score import Profile, scores
from compressor.text.chars import Ints, chars_of
from compressor.text.content import unfit
from compressor.text.passages import Passages, passages
from compressor.text.protect import Block, blocks
from compressor.text.segment import Ground, distinct, ground_of, segment
from compressor.text.terms import Floats, TermMatrix, terms_of

HEAD_UNITS, TAIL_UNITS = 3, 2
EDGE_SHARE: Final = 0.10
"""A unit above this share of the budget is not kept as an edge: its score decides."""
_JOIN: Final = "\n\n"
_QUESTION, _EDGE, SCORED, FURNITURE = (
    TIERS.index(name) for name in ("question", "edge", "scored", "furniture")
)
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Layout:
    """The joined texts, their units, and the text of each unit."""

    texts: tuple[Slot, ...]
    starts: Ints
    """Where each text begins in the joined one."""
    ends: Ints
    ground: Ground
    blocks: list[Block]
    parts: Passages
    slots: Ints
    """Index of each unit's text."""
    firsts: Flags
    """Units that begin a text."""


@dataclass(frozen=True, slots=True)
class ExtractPlan:
    """A layout with the cost and value of each unit; several budgets can be tried on it."""

    layout: Layout
    costs: Costs
    section: Ints
    tiers: npt.NDArray[np.int8]
    scores: Floats
    question: QuestionTerms
    asking: Ints
    """Units that ask explicitly (`sentences_asked`); no more than the question's."""
    terms: TermMatrix
    relevance: Relevance
    margin_bytes: int
    """White space at the ends of texts, which stays."""

    @property
    def required_bytes(self) -> int:
        """Cost of the tiers that are kept before scores, their sections' furniture included."""
        early = self.tiers < SCORED
        sections = np.unique(self.section[early])
        return int(self.costs.unit[early].sum() + self.costs.section[sections].sum())


def planned(
    texts: Sequence[Slot], budget_bytes: int, profile: Profile
) -> ExtractPlan | tuple[Reason, str]:
    """Plan the texts, or return why they must not be extracted from."""
    starts, ends, joined = _joined(texts)
    ground = ground_of(chars_of(joined))
    whole = blocks(ground, starts.tolist(), ends.tolist())
    if reason := unfit(ground, whole):
        return reason
    parts = passages(ground, segment(ground, starts, whole), starts, whole)
    slots = np.searchsorted(starts, parts.spans.starts, "right") - 1
    firsts = np.append(np.ones(1, np.bool_), np.diff(slots) > 0)[: len(slots)]
    layout = Layout(tuple(texts), starts, ends, ground, whole, parts, slots, firsts)
    terms = terms_of(ground, parts.spans)
    explicit = _asking(layout)
    question = _question(layout, terms, explicit)
    asking = np.zeros(terms.units, np.bool_)
    asking[question.units] = True
    found = relevance(terms, question.terms, parts.passage, asking)
    costs = costs_of(ground.chars, parts, firsts)
    return ExtractPlan(
        layout=layout,
        costs=costs,
        section=_detached(layout, question.units),
        tiers=_tiers(layout, question.units, costs, budget_bytes),
        scores=scores(ground, terms, parts, found, _ages(layout), profile),
        question=question,
        asking=explicit,
        terms=terms,
        relevance=found,
        margin_bytes=_margin_bytes(layout),
    )


def _joined(texts: Sequence[Slot]) -> tuple[Ints, Ints, str]:
    sizes = np.array([len(slot.text) for slot in texts], np.int64)
    starts = np.append(0, np.cumsum(sizes[:-1] + len(_JOIN))).astype(np.int64)
    return starts, starts + sizes, _JOIN.join([slot.text for slot in texts])


def _asking(layout: Layout) -> Ints:
    """Units of user messages that ask explicitly; texts without headers stand apart if short."""
    text, parts = layout.ground.chars.text, layout.parts
    found: list[int] = []
    for index, slot in enumerate(layout.texts):
        if slot.role == "user":
            own = np.flatnonzero(layout.slots == index)
            apart = len(slot.text) <= SHORT_BYTES and not parts.furniture[own].any()
            found += sentences_asked(text, parts.spans, own, parts.furniture, apart=apart)
    return np.array(found, np.int64)


def _question(layout: Layout, terms: TermMatrix, explicit: Ints) -> QuestionTerms:
    """The last user message's question; the texts of one turn are one message."""
    roles = [slot.role == "user" and bool(slot.text.strip()) for slot in layout.texts]
    users = [index for index, user in enumerate(roles) if user]
    if not users:
        return QuestionTerms(np.zeros(0, np.int64), np.zeros(0, np.int64))
    plain = ~layout.parts.furniture
    if layout.blocks:
        begins = np.array([start for start, _ in layout.blocks], np.int64)
        plain &= ~np.isin(layout.parts.spans.starts, begins)
    turn = layout.texts[users[-1]].turn
    last = [index for index in users if layout.texts[index].turn == turn]
    own = np.flatnonzero(np.isin(layout.slots, last))
    units = asking_units(layout.ground.chars.text, layout.parts.spans, own, plain)
    if len(explicit):
        units = distinct(np.concatenate((units, explicit[np.isin(explicit, own)])))
    sizes = layout.ends - layout.starts
    earlier = [
        np.flatnonzero(layout.slots == index)
        for index in reversed(users)
        if index not in last and sizes[index] <= SHORT_BYTES
    ]
    return asked(terms, units, earlier)


def _ages(layout: Layout) -> Floats:
    """0 for units of the current turn, up to 1 for the first."""
    turns = np.array([slot.turn for slot in layout.texts], np.float64)
    ages = 1 - turns / turns.max() if turns.max() > 0 else np.zeros(len(turns))
    found: Floats = ages[layout.slots]
    return found


def _tiers(layout: Layout, question: Ints, costs: Costs, budget_bytes: int) -> npt.NDArray[np.int8]:
    furniture = layout.parts.furniture
    tiers = np.where(furniture, FURNITURE, SCORED).astype(np.int8)
    plain = np.flatnonzero(~furniture)
    edges = [plain[:HEAD_UNITS], plain[len(plain) - TAIL_UNITS :]]
    # Keep the first unit of each text that is not furniture, so that no message is empty.
    own = layout.slots[plain]
    edges.append(plain[np.append(np.ones(1, np.bool_), np.diff(own) > 0)[: len(plain)]])
    edge = np.concatenate(edges)
    tiers[edge[costs.unit[edge] <= EDGE_SHARE * budget_bytes]] = _EDGE
    tiers[question] = _QUESTION
    return tiers


def _detached(layout: Layout, question: Ints) -> Ints:
    """Sections, except that a question ending its text is not part of the last passage."""
    section = layout.parts.section.copy()
    if len(question):
        last = int(question[-1])
        end = int(np.searchsorted(layout.slots, layout.slots[last], "right"))
        tail = question[question >= end - 2 * NEAR]
        if len(tail) and not layout.parts.furniture[int(tail[0]) : end].any():
            section[int(tail[0]) : end] = section.max() + 1
    return section


def _margin_bytes(layout: Layout) -> int:
    spans, firsts = layout.parts.spans, np.flatnonzero(layout.firsts)
    chars = layout.ground.chars
    total = int(chars.bytes_between(layout.starts, layout.ends).sum())
    if not len(firsts):
        return total
    lasts = np.append(firsts[1:] - 1, len(spans.starts) - 1)
    return total - int(chars.bytes_between(spans.starts[firsts], spans.ends[lasts]).sum())
