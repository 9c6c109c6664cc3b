"""What a compression gives: an extract, or a refusal; both explain themselves."""

from dataclasses import dataclass
from typing import Any, Final, Generic, Literal, TypeVar

import numpy as np
import numpy.typing as npt

Reason = Literal[
    "no_budget",
    "no_text",
    "token_ids",
    "malformed",
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
"""In the order in which units are taken. `furniture` (passage headers) comes with its passage."""

Body = TypeVar("Body")


@dataclass(frozen=True, slots=True)
class Unit:
    """One sentence or block: where it stands, why it was kept or not."""

    slot: int
    """Index of the text it is in: message contents and text parts in order."""
    passage: int
    text: str
    tier: Tier
    score: float
    """Higher is kept first within a tier; exact duplicates are 10 lower."""
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
    """An extract that fits. `body` has the structure that was given; only texts differ."""

    body: Body
    profile: str
    bytes_before: int
    """UTF-8 bytes of all text the engine sees: contents, calls, instructions."""
    bytes_after: int
    budget_bytes: int
    """What `bytes_after` had to fit in; margin already taken off."""
    tokens_after: int | None
    """Exact count of the extract's texts; None without a counter."""
    question: str
    """The units that were taken as the question, a line each."""
    trace: Trace | None
    """None when nothing had to go."""

    def __bool__(self) -> Literal[True]:
        """True, whatever is in it."""
        return True

    @property
    def messages(self) -> Body:
        """`body`, as chat callers call it."""
        return self.body

    @property
    def changed(self) -> bool:
        """Whether anything went."""
        return self.bytes_after < self.bytes_before

    @property
    def cut(self) -> float:
        """Share of the bytes that went, 0 to 1."""
        return 1 - self.bytes_after / self.bytes_before if self.bytes_before else 0.0

    @property
    def units(self) -> tuple[Unit, ...]:
        """Every unit with its tier and score, kept or not; empty when nothing had to go."""
        return self.trace.units() if self.trace else ()


@dataclass(frozen=True, slots=True)
class Refused:
    """No extract: send the prompt as it is."""

    reason: Reason
    detail: str
    """One sentence with the figures."""
    bytes_before: int
    budget_bytes: int
    protected_bytes: int = 0
    """What would have been kept whatever the score; 0 where it was not reached."""

    def __bool__(self) -> Literal[False]:
        """False, so that `if result:` reads as whether there is an extract."""
        return False


Result = Compressed[Any] | Refused
