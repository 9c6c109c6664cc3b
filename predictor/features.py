"""The predictor's input: features of a request and of a worker, as the router sees them.

Source: QUARTZ paper, table 2, without decoding parameters and request class, which do not
affect a prefill. The expected output and the cap represent the budget m_r.
"""

from typing import Final

FEATURES: Final = (
    "prompt_tokens",
    "uncached_tokens",
    "backlog_tokens",
    "active",
    "kv_usage",
    "hit_tokens",
    "locality_share",
    "locality_class",
    "cap_tokens",
    "output_tokens",
    "stream",
)
"""The order of x. An artifact with other features or another order is refused."""

PROMPT, UNCACHED, BACKLOG, ACTIVE, KV, HIT, SHARE, LOCALITY = range(8)
"""Indexes in x of the features that are read by name."""

NONE, PARTIAL, HIGH = range(3)
"""Locality classes by the share of the prompt expected in the cache: < 10 %, < 60 %, more."""
PARTIAL_SHARE: Final = 0.1
HIGH_SHARE: Final = 0.6
NO_CAP: Final = -1
"""`cap_tokens` of a request without an output limit."""


def features(
    prompt_tokens: int,
    hit_tokens: int,
    cap_tokens: int | None,
    output_tokens: int,
    active: int,
    backlog_tokens: int,
    kv_usage: float,
    stream: bool,  # noqa: FBT001 - a feature like the others, and by position far cheaper
) -> tuple[float, ...]:
    """One request on one worker, as x, in the order of FEATURES.

    `hit_tokens`: prefix expected in that worker's cache; `backlog_tokens`: uncached prefill
    ahead of the request there (sent without a first token yet, or waiting); `active`: the
    worker's sequences in flight; `kv_usage`: share of its KV cache in use, 0..1. A hit leaves at
    least one token to compute, as in engines.
    """
    if hit_tokens >= prompt_tokens:
        hit_tokens = prompt_tokens - 1 if prompt_tokens > 1 else 0
    share = hit_tokens / prompt_tokens if hit_tokens > 0 else 0.0
    return (
        prompt_tokens,
        prompt_tokens - hit_tokens,
        backlog_tokens,
        active,
        kv_usage,
        hit_tokens,
        share,
        NONE if share < PARTIAL_SHARE else PARTIAL if share < HIGH_SHARE else HIGH,
        NO_CAP if cap_tokens is None else cap_tokens,
        output_tokens,
        1.0 if stream else 0.0,
    )
