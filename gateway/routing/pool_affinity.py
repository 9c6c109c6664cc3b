"""Decide whether a conversation that grew past its pool's boundary stays with its cached prefix.

Rules:

- Only pools smaller than the planned one are considered: a conversation leaves its pool by
  growing. A request spilled into a larger pool returns when its own has room; if it stayed, a
  system prompt cached only in the larger pool would draw every request there.
- The request must fit: prompt and the client's cap within the pool's window.
- Moving costs the prefill in the planned pool. Staying costs the prefill in the smaller pool
  plus the tokens past its boundary, for which its capacity was not sized:

      stay if  L_in - hit(planned)  >  L_in - hit(smaller) + max(0, L_fit - boundary).

- So a request that shares only a system prompt moves, unless that is most of the request.
"""

from collections.abc import Sequence
from typing import Final

from gateway.records.estimate import LengthEstimate
from gateway.routing.routing import can_serve
from gateway.routing.routing_table import Routing

MAX_CACHED_SHARE: Final = 0.3
"""Prompts with this expected cached share or more are not compressed: new bytes would miss."""


def stay(
    planned_pool: int, routing: Routing, estimate: LengthEstimate, hits_by_pool: Sequence[int]
) -> int | None:
    """The index of a smaller pool in which the request costs less; None for the planned pool.

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


def mostly_new(input_tokens: int, hits_by_pool: Sequence[int]) -> bool:
    """Whether the prompt's expected cached share is small enough to compress it."""
    share = max(hits_by_pool, default=0) / input_tokens if input_tokens > 0 else 0.0
    return share < MAX_CACHED_SHARE
