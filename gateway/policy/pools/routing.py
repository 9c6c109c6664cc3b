"""Which pool should serve a request: Algorithm 1 of token-budget pool routing, for N pools.

Rules (token-budget paper, section 2.2; docs/concepts/pipeline.md, "What is counted"):

- A pool *can* serve a request when prompt + the client's own cap fits its window; the
  engine refuses otherwise. An absent cap needs room for one token only.
- The pool that *should* serve it is the first whose boundary holds the expected total
  L_fit = L_in + L_out; the last pool has no boundary.
- Spillover goes to the alternates in the order given here: larger windows first, then
  smaller ones that can hold it.
- A request is refused without an engine only when even the lowest plausible prompt count
  cannot fit the largest window; a doubtful one goes long and the engine decides.

The compression window above a boundary B (FleetOpt, section 5): which requests may be made to fit
the smaller pool, and to what size.

- Only totals in (B, gamma B] of one boundary, of a category that is text, with one prompt.
- T_c = min(B - L_out, window - cap): neither the boundary nor the engine's own limit is passed.
- Not when the client or its entitlement refuses, and not when an earlier turn of the
  conversation was served as it was: the engine holds that prefix, and other bytes would miss it.
"""

from functools import lru_cache

import msgspec

from gateway.errors import ContextLengthExceeded
from gateway.policy.pools.routing_table import Band, CompressionRules, Routing
from gateway.records.endpoint import Endpoint
from gateway.records.estimate import LengthEstimate, Plan
from gateway.records.request import BodyFacts


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


ENDPOINTS = frozenset({"chat", "completions", "responses", "messages"})
CATEGORIES = frozenset({"prose", "other-script", "cjk", "mixed"})


def band_of(
    routing: Routing,
    rules: CompressionRules,
    endpoint: Endpoint,
    facts: BodyFacts,
    estimate: LengthEstimate,
    planned: Plan,
) -> Band | str:
    """The band a planned request lies in, or why it may not be compressed ("" outside a band)."""
    pool = planned.pool - 1
    if pool < 0:
        return ""
    shape = routing.pools[pool]
    boundary = shape.boundary_tokens
    if boundary is None or not boundary < estimate.fit_tokens <= rules.gamma * boundary:
        return ""
    if endpoint.name not in ENDPOINTS or facts.measure.prompts != 1 or facts.measure.exact_tokens:
        return "not_text"
    if estimate.category not in CATEGORIES:
        return "category"
    if facts.measure.tools:
        return "tools"  # their definitions are part of the prompt and not of what can be cut
    cap = estimate.output_tokens if estimate.cap_tokens is None else estimate.cap_tokens
    budget = min(boundary - estimate.output_tokens, shape.window_tokens - cap)
    if budget <= fixed_tokens(facts, estimate):
        return "no_budget"
    return Band(pool=pool, budget_tokens=budget)


def fixed_tokens(facts: BodyFacts, estimate: LengthEstimate) -> int:
    """Tokens of the prompt that are not its text, or of text that a compressor does not know."""
    unknown = int(facts.unknown_bytes / estimate.ratio_conservative)
    return estimate.template_tokens + facts.measure.media_tokens + unknown


def band_plan(planned: Plan, band: Band) -> Plan:
    """The plan of a request that is to be compressed; without room there it goes where it would."""
    return Plan(
        pool=band.pool,
        alternates=(planned.pool, *(p for p in planned.alternates if p > planned.pool)),
        reason="within_gamma",
        compress=True,
    )


def lowered(
    estimate: LengthEstimate, facts: BodyFacts, text_bytes: int, tokens: int | None, most: int
) -> LengthEstimate:
    """The estimate of the compressed prompt: `tokens` of all of it, else by the careful ratio."""
    by_bytes = int(text_bytes / estimate.ratio_conservative) + 1 + fixed_tokens(facts, estimate)
    now = min(most, by_bytes if tokens is None else tokens)
    outputs = estimate.cost_tokens - estimate.input_tokens_total
    return msgspec.structs.replace(
        estimate,
        text_bytes=text_bytes,
        input_tokens=now,
        input_tokens_total=now,
        input_tokens_lowest=min(now, estimate.input_tokens_lowest),
        fit_tokens=now + estimate.output_tokens,
        cost_tokens=now + outputs,
    )
