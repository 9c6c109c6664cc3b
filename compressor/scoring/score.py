"""Scores of units: a weighted sum of components in [0, 1]; profiles name the weights.

`paper` has the weights of FleetOpt (section 5.2): TextRank .20, position .40, TF-IDF .35,
novelty .05. `default` weighs relevance to the question most.
"""

from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from compressor.scoring.bm25 import Relevance
from compressor.scoring.copies import copies
from compressor.scoring.novelty import novelty
from compressor.scoring.position import lead, position
from compressor.scoring.textrank import textrank
from compressor.scoring.tfidf import tfidf
from compressor.text.passages import Passages
from compressor.text.segment import Ground
from compressor.text.terms import Floats, TermMatrix

Profile = Literal["default", "paper"]


@dataclass(frozen=True, slots=True)
class Weights:
    """Weight of each component; their sum is the highest score."""

    textrank: float
    position: float
    tfidf: float
    novelty: float
    sentence: float = 0.0
    passage: float = 0.0
    lead: float = 0.0


PROFILES: Final[dict[Profile, Weights]] = {
    "default": Weights(
        textrank=0.10,
        position=0.05,
        tfidf=0.10,
        novelty=0.05,
        sentence=0.35,
        passage=0.35,
        lead=0.05,
    ),
    "paper": Weights(textrank=0.20, position=0.40, tfidf=0.35, novelty=0.05),
}
DUPLICATE: Final = 10.0
"""Subtracted from a copy in a run of copied units (`compressor.scoring.copies`)."""
AGE: Final = 0.30
"""Subtracted from the oldest turn, less from later ones: older turns are dropped first."""


def scores(
    ground: Ground,
    terms: TermMatrix,
    parts: Passages,
    found: Relevance,
    ages: Floats,
    profile: Profile,
) -> Floats:
    """Score of each unit; `ages` is 0 for the current turn up to 1 for the oldest."""
    weights = PROFILES[profile]
    trust = 1.0
    total = np.zeros(terms.units)
    if weights.sentence or weights.passage:
        total += weights.sentence * found.sentence + weights.passage * found.passage
        # Without a usable question, the middle must not be dropped first.
        trust = found.weight
    total += (
        weights.textrank * textrank(terms)
        + trust * weights.position * position(terms.units)
        + weights.tfidf * tfidf(terms)
        + weights.novelty * novelty(terms)
        + weights.lead * lead(parts.rank.astype(np.float64))
    )
    scored: Floats = total - DUPLICATE * copies(ground, parts) - AGE * ages
    return scored
