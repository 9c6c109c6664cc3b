"""The band above a boundary: which requests may be made to fit the smaller pool, and to what size.

Rules (FleetOpt, section 5):

- Only totals in (B, gamma B] of one boundary, of a category that is text, with one prompt.
- T_c = min(B - L_out, window - cap): neither the boundary nor the engine's own limit is passed.
- Not when the client or its entitlement refuses, and not when an earlier turn of the
  conversation was served as it was: the engine holds that prefix, and other bytes would miss it.
"""

import msgspec

from gateway.policy.pools.compression_rules import Band, CompressionRules
from gateway.policy.pools.routing_table import Routing
from gateway.records.endpoint import Endpoint
from gateway.records.estimate import LengthEstimate, Plan
from gateway.records.request import BodyFacts

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
