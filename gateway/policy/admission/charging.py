"""Which reported usage is believed, and what usage costs."""

from typing import Final

import msgspec

from gateway.policy.entitlements.entitlement import AdmissionProfile
from gateway.records.attempt import Usage
from gateway.records.estimate import LengthEstimate

_MAX_RATIO: Final = 2.0
"""More tokens than the pool's window, as configured, are believed up to this many times the
estimate: the engine served them, so the configured window may be wrong, but not everything is."""


def believed(usage: Usage, estimate: LengthEstimate, window_tokens: int) -> Usage:
    """The engine's report where it can be true of the request, else what the gateway counted.

    A report cannot be true without prompt tokens, with more cached tokens than prompt tokens, with
    more completion tokens than the client's own limit allows, or with more tokens in all than the
    window holds. An engine that served more than `window_tokens` is believed, up to twice the
    estimate: then the configured window is wrong (`beyond_window`).
    """
    if usage.source != "engine":
        return usage
    sequences = estimate.sequences
    window = window_tokens * sequences
    most = max(window, int(_MAX_RATIO * estimate.cost_tokens))
    most_completion = most if estimate.cap_tokens is None else estimate.cap_tokens * sequences
    possible = (
        usage.prompt_tokens > 0
        and usage.cached_tokens <= usage.prompt_tokens
        and usage.completion_tokens <= most_completion
        and usage.prompt_tokens + usage.completion_tokens <= most
    )
    if possible:
        return usage
    room = max(0, window - estimate.input_tokens_total)
    return msgspec.structs.replace(
        usage,
        prompt_tokens=estimate.input_tokens_total,
        completion_tokens=min(usage.completion_tokens, most_completion, room),
        cached_tokens=0,
        cached_told=False,
        source="counted",
    )


def beyond_window(usage: Usage, sequences: int, window_tokens: int) -> bool:
    """Whether an engine served one sequence with more tokens than its configured window."""
    used = usage.prompt_tokens + usage.completion_tokens
    return usage.source == "engine" and sequences == 1 and used > window_tokens


def charge_tokens(
    profile: AdmissionProfile, prompt_tokens: int, completion_tokens: int, cached_tokens: int
) -> int:
    """What usage costs an entitlement, in whole tokens, rounded up."""
    if not cached_tokens:
        return prompt_tokens + completion_tokens
    cached = min(cached_tokens, prompt_tokens)
    saved = cached - cached * profile.cached_input_charge
    return prompt_tokens + completion_tokens - int(saved)
