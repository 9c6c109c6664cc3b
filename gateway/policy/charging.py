"""What usage costs."""

from gateway.policy.entitlements import AdmissionProfile


def charge_tokens(
    profile: AdmissionProfile, prompt_tokens: int, completion_tokens: int, cached_tokens: int
) -> int:
    """What usage costs an entitlement, in whole tokens, rounded up."""
    if not cached_tokens:
        return prompt_tokens + completion_tokens
    cached = min(cached_tokens, prompt_tokens)
    saved = cached - cached * profile.cached_input_charge
    return prompt_tokens + completion_tokens - int(saved)
