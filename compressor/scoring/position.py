"""Scores by position: the ends of a text weigh more than its middle."""

import numpy as np

from compressor.text.terms import Floats


def position(units: int) -> Floats:
    """1 - sin(pi i / (n - 1)) / 2: 1 at both ends, .5 in the middle; shape (units,)."""
    at: Floats = np.arange(units) / max(units - 1, 1)
    return 1 - 0.5 * np.sin(np.pi * at)


def lead(ranks: Floats) -> Floats:
    """1 / (1 + k) for the k-th unit of its passage: definitions usually come first."""
    return 1 / (1 + ranks)
