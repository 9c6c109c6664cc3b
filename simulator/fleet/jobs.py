"""Requests inside a running simulation: their needs in, their times out, by index.

Times are columns of doubles rather than records: a million requests take 24 MB, nothing for
the garbage collector to walk, and statistics read them without a copy.
"""

from array import array
from math import nan

import numpy as np

from simulator.engine.profiles import EngineProfile
from simulator.fleet.traffic import Ints


class Times:
    """Seconds by request; NaN for what did not happen."""

    __slots__ = ("end", "first", "start")

    def __init__(self, count: int) -> None:
        self.start = array("d", [nan]) * count
        """When the first iteration that served it began."""
        self.first = array("d", [nan]) * count
        """When its first token came."""
        self.end = array("d", [nan]) * count
        """When its last token came."""

    def forget(self, index: int) -> None:
        """A request starts anew."""
        self.start[index] = self.first[index] = self.end[index] = nan


class Needs:
    """What each request takes of an engine of one profile; whole numbers by index."""

    __slots__ = ("blocks", "chunks", "iterations", "outputs", "prompts", "tokens")

    def __init__(self, profile: EngineProfile, prompts: Ints, outputs: Ints) -> None:
        final = np.minimum(prompts + outputs, profile.max_model_len)
        chunks = -(-prompts // profile.chunk_tokens)
        self.prompts: list[int] = prompts.tolist()
        self.outputs: list[int] = outputs.tolist()
        self.tokens: list[int] = final.tolist()
        """Its final length, cut by the window."""
        self.blocks: list[int] = (-(-final // profile.block_tokens)).tolist()
        self.chunks: list[int] = chunks.tolist()
        """Iterations to the first token, when every prompt has a chunk of its own."""
        self.iterations: list[int] = (chunks + final - prompts - 1).tolist()
        """Iterations to the last token."""
