"""Whether a conversation stays in the pool that holds its prefix, past that pool's boundary.

Rules:

- Only smaller pools than the planned one: a conversation grows, so it is by growing that it
  leaves its pool. What was spilled into a larger pool returns when its own has room; were it
  kept there, a system prompt cached in that pool alone would draw every request to it.
- It must fit: prompt and the client's cap within the pool's window.
- Moving costs what the planned pool must prefill anew, staying what the smaller pool must,
  and the tokens past its boundary, for which its capacity was not sized:

      stay if  L_in - hit(planned)  >  L_in - hit(smaller) + max(0, L_fit - boundary).

- So a request that shares only a system prompt moves, unless that is most of it.
"""

from collections.abc import Sequence
from typing import Final

from gateway.policy.pools.routing import can_serve
from gateway.policy.pools.routing_table import Routing
from gateway.records.estimate import LengthEstimate

MOST_CACHED_SHARE: Final = 0.3
"""From this share of a prompt expected in a cache it is not compressed: other bytes would miss."""


def stay(
    planned_pool: int, routing: Routing, estimate: LengthEstimate, hits_by_pool: Sequence[int]
) -> int | None:
    """The smaller pool in which it costs less; None to go where it was planned.

    `hits_by_pool` are the longest expected prefix hits of each pool's workers, in tokens.
    """
    prompt = estimate.input_tokens
    least = prompt - min(prompt, hits_by_pool[planned_pool])
    best: int | None = None
    for pool in range(planned_pool - 1, -1, -1):
        shape = routing.pools[pool]
        if not can_serve(estimate, shape.window_tokens):
            break  # windows ascend: no smaller one fits either
        past = max(0, estimate.fit_tokens - (shape.boundary_tokens or shape.window_tokens))
        cost = prompt - min(prompt, hits_by_pool[pool]) + past
        if cost < least:
            best, least = pool, cost
    return best


def cached_share(input_tokens: int, hits_by_pool: Sequence[int]) -> float:
    """Largest share of a prompt that some pool is expected to hold, 0 to 1."""
    if input_tokens <= 0:
        return 0.0
    return min(1.0, max(hits_by_pool, default=0) / input_tokens)


def mostly_new(input_tokens: int, hits_by_pool: Sequence[int]) -> bool:
    """Whether so little of a prompt is expected in a cache that it may be compressed."""
    return cached_share(input_tokens, hits_by_pool) < MOST_CACHED_SHARE
