"""Requests to an engine, and the tokens that it emits."""

from typing import Literal

import msgspec


class EngineRequest(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """One sequence to serve."""

    id: str
    prompt_tokens: int
    """>= 1 and below the profile's max_model_len."""
    output_tokens: int
    """Output length at which the sequence stops unless the window cuts it first; >= 1."""
    block_hashes: tuple[int, ...] = ()
    """Hash of each full prompt block, chained: equal hashes mean equal prefixes."""
    priority: int = 0
    """Lower values are served sooner if the profile schedules by priority."""
    remote: bool = False
    """Whether the KV of its prompt has come from another engine and is not computed."""
    hold: bool = False
    """Whether its blocks stay in use after its end, for another engine, until `Engine.release`."""


class Emission(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """One output token, at the end of the iteration that made it."""

    id: str
    index: int
    """1 for the first output token of the request."""
    finished: bool
    reason: Literal["stop", "length"] | None
    """None while not finished; `length` when max_model_len cut the output."""
    cached_tokens: int = 0
    """Prompt tokens not computed since the last admission: of the prefix cache, or remote."""
    queue_s: float = 0.0
    """From submission to the start of the first iteration that served the request."""


class Iteration(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """One step of the engine, as scheduled."""

    start_s: float
    end_s: float
    prefill_tokens: int
    decode_sequences: int
