"""Decides whether an engine's usage report is plausible, and converts usage to a charge."""

from typing import Final

import msgspec

from gateway.policy.entitlements.entitlement import AdmissionProfile
from gateway.records.attempt import Usage
from gateway.records.estimate import LengthEstimate
from gateway.records.limit import Spent

_MAX_RATIO: Final = 2.0
"""Reports beyond the pool's configured window are believed up to this multiple of the estimate:
the configured window may be too small, but a report is not trusted without bound."""


def believed(usage: Usage, estimate: LengthEstimate, window_tokens: int) -> Usage:
    """The engine's report if it is plausible, else the gateway's own count.

    A report is implausible if it has no prompt tokens, more cached than prompt tokens, more
    completion tokens than the client's limit, or more tokens in all than both the window and
    twice the estimate. A report above the window but within twice the estimate is believed: the
    configured window is then wrong (`beyond_window`).
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
        cached_reported=False,
        source="counted",
    )


def beyond_window(usage: Usage, sequences: int, window_tokens: int) -> bool:
    """Whether an engine served one sequence with more tokens than its configured window."""
    used = usage.prompt_tokens + usage.completion_tokens
    return usage.source == "engine" and sequences == 1 and used > window_tokens


def spent_by(usage: Usage | None, money: int, *, dispatched: bool) -> Spent | None:
    """What limits count of a request; None gives all of it back."""
    if usage is None:
        return Spent(0) if dispatched else None
    return Spent(usage.prompt_tokens + usage.completion_tokens, money)


def charge_tokens(
    profile: AdmissionProfile, prompt_tokens: int, completion_tokens: int, cached_tokens: int
) -> int:
    """The charge for usage, in whole tokens, rounded up; cached prompt tokens cost less."""
    if not cached_tokens:
        return prompt_tokens + completion_tokens
    cached = min(cached_tokens, prompt_tokens)
    saved = cached - cached * profile.cached_input_charge
    return prompt_tokens + completion_tokens - int(saved)
