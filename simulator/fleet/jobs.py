"""Requests of a running simulation, by index: their needs and their times.

Times are columns of doubles instead of records: a million requests take 24 MB, the garbage
collector has nothing to walk, and statistics read them without a copy.
"""

from array import array
from math import nan

import numpy as np

from simulator.engine.profiles import EngineProfile
from simulator.fleet.traffic import Ints


class Times:
    """Seconds by request; NaN for events that did not happen."""

    __slots__ = ("end", "first", "start")

    def __init__(self, count: int) -> None:
        self.start = array("d", [nan]) * count
        """Start of the first iteration that served it."""
        self.first = array("d", [nan]) * count
        """Time of its first token."""
        self.end = array("d", [nan]) * count
        """Time of its last token."""

    def forget(self, index: int) -> None:
        """Reset a request that starts anew."""
        self.start[index] = self.first[index] = self.end[index] = nan


class Needs:
    """Needs of each request on an engine of one profile; whole numbers by index."""

    __slots__ = ("blocks", "chunks", "iterations", "outputs", "prompts", "tokens")

    def __init__(self, profile: EngineProfile, prompts: Ints, outputs: Ints) -> None:
        final = np.minimum(prompts + outputs, profile.max_model_len)
        chunks = -(-prompts // profile.chunk_tokens)
        self.prompts: list[int] = prompts.tolist()
        self.outputs: list[int] = outputs.tolist()
        self.tokens: list[int] = final.tolist()
        """Final length, cut to the window."""
        self.blocks: list[int] = (-(-final // profile.block_tokens)).tolist()
        self.chunks: list[int] = chunks.tolist()
        """Iterations to the first token, if every prompt has a chunk of its own."""
        self.iterations: list[int] = (chunks + final - prompts - 1).tolist()
        """Iterations to the last token."""
