"""Which pool should serve a request: Algorithm 1 of token-budget pool routing, for N pools.

Rules (token-budget paper, section 2.2; pipeline.md, "What is counted"):

- A pool *can* serve a request when prompt + the client's own cap fits its window; the
  engine refuses otherwise. An absent cap needs room for one token only.
- The pool that *should* serve it is the first whose boundary holds the expected total
  L_fit = L_in + L_out; the last pool has no boundary.
- Spillover goes to the alternates in the order given here: larger windows first, then
  smaller ones that can hold it.
- A request is refused without an engine only when even the lowest plausible prompt count
  cannot fit the largest window; a doubtful one goes long and the engine decides.
"""

from functools import lru_cache

from gateway.errors import ContextLengthExceeded
from gateway.policy.pools.routing_table import Routing
from gateway.records.estimate import LengthEstimate, Plan


def can_serve(estimate: LengthEstimate, window_tokens: int) -> bool:
    """Whether an engine of this window accepts the request, by the conservative count."""
    cap = estimate.cap_tokens
    return estimate.input_tokens + (1 if cap is None else cap) <= window_tokens


def plan_pool(routing: Routing, estimate: LengthEstimate, param: str = "messages") -> Plan:
    """Primary pool and alternates for a request.

    Raises ContextLengthExceeded when the request cannot fit the largest window whatever
    the tokenizer. With `routing.observe` the plan is the boundary's all the same: the
    caller decides what to apply.
    """
    pools = routing.pools
    last = len(pools) - 1
    needed = estimate.input_tokens + (1 if estimate.cap_tokens is None else estimate.cap_tokens)
    # Windows ascend: what fits one pool fits every larger one.
    smallest = 0
    while smallest <= last and needed > pools[smallest].window_tokens:
        smallest += 1
    if smallest > last:
        _refuse_impossible(estimate, pools[last].window_tokens, param)
        # Doubtful, not impossible: the largest engine counts exactly and answers.
        return Plan(pool=last, alternates=(), reason="largest_window_doubtful")
    pool = smallest
    while pool < last:
        boundary = pools[pool].boundary_tokens
        if boundary is None or estimate.fit_tokens <= boundary:
            break
        pool += 1
    return _plan(smallest, pool, last)


@lru_cache(maxsize=4096)
def _plan(smallest: int, pool: int, last: int) -> Plan:
    """The plan of every request that these three pools describe: it needs no record of its own."""
    if last == 0:
        reason = "only_pool"
    elif pool < last:
        reason = "within_boundary"
    else:
        reason = "over_boundary" if smallest == 0 else "over_window"
    larger, smaller = range(pool + 1, last + 1), range(pool - 1, smallest - 1, -1)
    return Plan(pool=pool, alternates=(*larger, *smaller), reason=reason)


def larger_pools(routing: Routing, pool: int) -> range:
    """Pools with larger windows, for overflow rescue."""
    return range(pool + 1, len(routing.pools))


def _refuse_impossible(estimate: LengthEstimate, window_tokens: int, param: str) -> None:
    needed = estimate.input_tokens_lowest + (estimate.cap_tokens or 0)
    if needed <= window_tokens:
        return
    asked = (
        f"at least {estimate.input_tokens_lowest} in the prompt"
        if estimate.cap_tokens is None
        else f"at least {estimate.input_tokens_lowest} in the prompt, "
        f"{estimate.cap_tokens} for the completion"
    )
    raise ContextLengthExceeded(
        f"This model's maximum context length is {window_tokens} tokens. However, you requested "
        f"at least {needed} tokens ({asked}). Please reduce the length of the prompt or of the "
        "completion.",
        param=param,
    )


def defaulted_cap(routing: Routing, estimate: LengthEstimate, pool: int) -> int | None:
    """The limit to send when the client set none: the configured default, shrunk to what fits.

    None when the client set its own or no default is configured.
    """
    if routing.default_max_tokens is None or estimate.cap_tokens is not None:
        return None
    room = routing.pools[pool].window_tokens - estimate.input_tokens
    return max(1, min(routing.default_max_tokens, room))
