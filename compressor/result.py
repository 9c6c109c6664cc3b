"""Results of a compression: an extract or a refusal, each with its explanation."""

from dataclasses import dataclass
from typing import Any, Final, Generic, Literal, TypeVar

import numpy as np
import numpy.typing as npt

Reason = Literal[
    "no_budget",
    "no_text",
    "token_ids",
    "malformed",
    "prefill",
    "cache_control",
    "tool_results",
    "not_retrieval",
    "few_shot",
    "no_question",
    "several_questions",
    "broad_question",
    "cross_lingual",
    "code",
    "json",
    "tables",
    "digits",
    "encoded",
    "cut_too_deep",
    "protected_too_large",
    "block_too_large",
    "too_coarse",
    "over_budget",
]
Tier = Literal["question", "edge", "scored", "furniture"]
TIERS: Final[tuple[Tier, ...]] = ("question", "edge", "scored", "furniture")
"""The order in which units are taken; `furniture` (passage headers) comes with its passage."""

Body = TypeVar("Body")


@dataclass(frozen=True, slots=True)
class Unit:
    """One sentence or block: its place, and why it was kept or dropped."""

    slot: int
    """Index of its text: message contents and text parts in order."""
    passage: int
    text: str
    tier: Tier
    score: float
    """Higher is kept first within a tier; copies in a run of copied units are 10 lower."""
    kept: bool
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Trace:
    """All units as arrays, one entry each, in the prompt's order."""

    text: str
    starts: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64]
    slots: npt.NDArray[np.int64]
    passages: npt.NDArray[np.int64]
    tiers: npt.NDArray[np.int8]
    scores: npt.NDArray[np.float64]
    kept: npt.NDArray[np.bool_]

    def units(self) -> tuple[Unit, ...]:
        """Every unit as a record."""
        rows = zip(
            self.starts.tolist(),
            self.ends.tolist(),
            self.slots.tolist(),
            self.passages.tolist(),
            self.tiers.tolist(),
            self.scores.tolist(),
            self.kept.tolist(),
            strict=True,
        )
        return tuple(
            Unit(
                slot=slot,
                passage=passage,
                text=self.text[start:end],
                tier=TIERS[tier],
                score=score,
                kept=kept,
                size_bytes=len(self.text[start:end].encode("utf-8", "surrogatepass")),
            )
            for start, end, slot, passage, tier, score, kept in rows
        )


@dataclass(frozen=True, slots=True)
class Compressed(Generic[Body]):
    """An extract that fits. `body` has the structure of the input; only texts differ."""

    body: Body
    profile: str
    bytes_before: int
    """UTF-8 bytes of all text the engine sees: contents, calls, instructions."""
    bytes_after: int
    budget_bytes: int
    """The limit of `bytes_after`, with the safety margin already subtracted."""
    tokens_after: int | None
    """Exact token count of the extract's texts; None without a counter."""
    question: str
    """The units taken as the question, one per line."""
    trace: Trace | None
    """None if nothing had to be removed."""

    def __bool__(self) -> Literal[True]:
        """Always True, even for an empty extract."""
        return True

    @property
    def messages(self) -> Body:
        """`body`, as chat callers call it."""
        return self.body

    @property
    def changed(self) -> bool:
        """Whether anything was removed."""
        return self.bytes_after < self.bytes_before

    @property
    def cut(self) -> float:
        """Share of the bytes removed, 0 to 1."""
        return 1 - self.bytes_after / self.bytes_before if self.bytes_before else 0.0

    @property
    def units(self) -> tuple[Unit, ...]:
        """Every unit with its tier and score, kept or not; empty if nothing had to be removed."""
        return self.trace.units() if self.trace else ()


@dataclass(frozen=True, slots=True)
class Refused:
    """No extract: send the prompt unchanged."""

    reason: Reason
    detail: str
    """One sentence with the figures."""
    bytes_before: int
    budget_bytes: int
    protected_bytes: int = 0
    """Bytes kept regardless of score; 0 if the refusal came earlier."""

    def __bool__(self) -> Literal[False]:
        """Always False, so that `if result:` asks whether there is an extract."""
        return False


Result = Compressed[Any] | Refused
