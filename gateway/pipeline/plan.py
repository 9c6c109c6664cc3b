"""Stages 2 to 4: body -> facts, model, the three output figures -> pools -> one lease.

In observe mode the boundary is computed and reported, and the request goes to the least loaded
pool that can hold it, as it would behind a bare relay. Admission is one atomic call, in which the
store decides on spillover, too. A model none of whose entitlements states a limit or a class is
not managed: there the store counts and spills over, and refuses nobody.
"""

import asyncio
from collections.abc import Mapping
from math import ceil
from typing import Final, NamedTuple

import msgspec

from gateway.admission.terms import AdmissionRequest, Denial
from gateway.errors import BadRequest, ContextLengthExceeded, Forbidden, NotFound, Unavailable
from gateway.fleet.model_runtime import NO_PREFIX, ModelRuntime, Prefix
from gateway.payload.body import TakesLong, is_heavy, read_body
from gateway.payload.counting import category_from_header
from gateway.payload.head import pairs_of
from gateway.payload.members import ADAPTER_FIELD, Members
from gateway.ports import LeaseStore
from gateway.records.endpoint import Endpoint, matches
from gateway.records.estimate import LengthEstimate, Plan
from gateway.records.lease import Lease
from gateway.records.request import OPEN, BodyFacts, Incoming, Principal, RequestHead
from gateway.records.usage import cost_nano
from gateway.routing.routing import (
    CompressionWindow,
    can_serve,
    compression_window_of,
    has_room,
    mostly_new,
    plan_pool,
    promised,
    requested,
    stay,
)
from gateway.routing.split_alias import SplitAlias, conversation_key
from gateway.scheduling.prefix_index import points_of
from gateway.scheduling.scheduler import Points

_LOOKS: Final = 4
_LOOK_EVERY_S: Final = 0.5
"""Another replica's response is known here after two exchanges, half a second each."""
_PARAMS: Final = {"completions": "prompt", "embeddings": "input", "responses": "input"}


class Asked(NamedTuple):
    """Who asks for what of which model, and how long it should be: stages 1 and 2."""

    incoming: Incoming
    principal: Principal
    facts: BodyFacts
    served: ModelRuntime
    estimate: LengthEstimate


# -- 2 classify and estimate


def read(
    endpoint: Endpoint, body: bytes, head: RequestHead, limit_us: float | None = None
) -> BodyFacts:
    """What the gateway reads of the body. Raises BadRequest with what to change.

    Raises TakesLong if that may take longer than `limit_us`.
    """
    if limit_us is not None and is_heavy(body, form=endpoint.multipart):
        raise TakesLong
    types = content_types(endpoint, head)
    return read_body(endpoint, body, content_types=types, limit_us=limit_us)


def content_types(endpoint: Endpoint, head: RequestHead) -> list[bytes]:
    """The headers that a form is read by; none for JSON."""
    if not endpoint.multipart:
        return []
    return [value for name, value in pairs_of(head.forwarded) if name == b"content-type"]


def find_model(models: Mapping[str, ModelRuntime], name: str) -> ModelRuntime:
    """The model by name, alias or LoRA adapter, else by the longest pattern. Raises NotFound."""
    served = models.get(name)
    if served is None:  # an adapter that its engines list
        served = next((each for each in models.values() if each.adapter(name)), None)
    if served is None:
        patterns = [known for known in models if "*" in known and matches(known, name)]
        served = models[max(patterns, key=len)] if patterns else None
    if served is None:
        raise _no_model(f"The model '{name}'", "model")
    return served


def model_of(
    models: Mapping[str, ModelRuntime],
    splits: Mapping[str, SplitAlias],
    facts: BodyFacts,
    principal: Principal,
) -> ModelRuntime:
    """The model that a request names; of a split alias, its conversation's. Raises NotFound."""
    split = splits.get(facts.model) if splits else None
    if split is None:
        return find_model(models, facts.model)
    if (response_id := facts.previous_response_id) is not None:
        for name in split.models:
            if models[name].fleet.response_affinity.find(response_id) is not None:
                return models[name]
    open_to = [name for name in split.models if principal.opens(name)] or split.models
    return models[split.choose(open_to, principal.tenant, conversation_key(facts.members))]


def adapter_of(served: ModelRuntime, facts: BodyFacts) -> str:
    """The LoRA adapter that a request is for; "" for the model itself. Raises NotFound.

    As in SGLang, an adapter's name as the model goes before the field that names one.
    """
    adapter = served.adapter(facts.model) or served.adapter(facts.lora)
    if facts.lora and not adapter:
        raise _no_model(f"The LoRA adapter '{facts.lora[:256]}'", ADAPTER_FIELD)
    return adapter


def _no_model(what: str, param: str) -> NotFound:
    return NotFound(
        f"{what} does not exist. GET /v1/models lists those that do.",
        reason="model_not_found",
        param=param,
    )


async def await_response_location(served: ModelRuntime, facts: BodyFacts) -> None:
    """Wait until the response that is continued is known here, if another replica may have it."""
    if served.fleet.response_affinity.on_remember is None:
        return
    for _ in range(_LOOKS):
        if served.fleet.response_affinity.find(facts.previous_response_id) is not None:
            return
        await asyncio.sleep(_LOOK_EVERY_S)


def continued(served: ModelRuntime, facts: BodyFacts, principal: Principal) -> BodyFacts:
    """The facts with what a stored response brings into the prompt. Raises NotFound.

    Another tenant's response is answered as an engine answers an id that it does not know, and so
    is one of which nobody knows whose it is, unless the gateway is open.
    """
    location = served.fleet.response_affinity.find(facts.previous_response_id)
    if location is None and principal is OPEN:
        return facts
    if location is None or location.tenant != principal.tenant:
        raise NotFound(
            f"Response with id '{facts.previous_response_id}' not found.",
            reason="response_not_found",
            param="response_id",
        )
    measure = facts.measure
    measure = msgspec.structs.replace(
        measure,
        exact_tokens=measure.exact_tokens + location.tokens,
        longest_exact_tokens=measure.longest_exact_tokens + location.tokens,
    )
    return msgspec.structs.replace(facts, measure=measure)


def estimate(
    served: ModelRuntime,
    endpoint: Endpoint,
    facts: BodyFacts,
    principal: Principal,
    category_name: str | None = None,
) -> LengthEstimate:
    """L_in, cap, q_out and what follows from them.

    A header may name the category to estimate by; it is learned by what the text looks like.
    What is only counted costs nothing, and is never too long.
    """
    category = None if category_name is None else category_from_header(category_name)
    default = served.routing.default_max_tokens
    lengths = served.estimator.estimate(endpoint, facts, principal.tenant, category, default)
    if endpoint.computes:
        return lengths
    return msgspec.structs.replace(
        lengths, input_tokens_lowest=0, cost_tokens=0, most_input_tokens=0, limit_tokens=0
    )


# -- 3 plan


def points(asked: Asked, members: Members) -> Points:
    """The beginnings of a body, by its members, as engines' caches tell them apart."""
    return points_of(
        asked.incoming.endpoint.name,
        members,
        asked.facts.measure.text_bytes,
        asked.principal.tenant,
        asked.facts.adapter,
        salted=asked.served.scheduling.salted,
    )


def look_up(asked: Asked, members: Members, tokens: int) -> Prefix:
    """The beginnings of a body of so many tokens, by its members, and where to ask for them.

    Nothing where no index of prefixes is kept.
    """
    served = asked.served
    if not served.scheduling.indexed or not asked.incoming.endpoint.generates:
        return NO_PREFIX
    begins = points(asked, members)
    if not begins:
        return NO_PREFIX
    return Prefix(begins, served.fleet.pools, tokens / begins[-1][0], served.fleet.phases)


def plan(
    served: ModelRuntime, endpoint: Endpoint, estimate: LengthEstimate, prefix: Prefix = NO_PREFIX
) -> Plan:
    """Where the boundary sends the request, or where its conversation is held already.

    Raises ContextLengthExceeded; in observe mode that, too, is only reported.
    """
    try:
        planned = plan_pool(served.routing, estimate, overflow_param(endpoint))
    except ContextLengthExceeded:
        if not served.routing.observe:
            raise
        return Plan(pool=len(served.routing.pools) - 1, alternates=(), reason="would_refuse")
    if not prefix.points or not planned.pool:
        return planned
    held = stay(planned.pool, served.routing, estimate, prefix.hits())
    if held is None:
        return planned
    return Plan(pool=held, alternates=(planned.pool, *planned.alternates), reason="prefix_held")


def compression_window(asked: Asked, planned: Plan, prefix: Prefix) -> CompressionWindow | str:
    """Whether the request should be compressed, or why not ("" when there is nothing to ask)."""
    incoming, principal, facts, served, estimate = asked
    compression, endpoint = served.compression, incoming.endpoint
    if compression is None:
        return ""
    rules, header = compression.rules, incoming.head.compress
    window = compression_window_of(served.routing, rules, endpoint, facts, estimate, planned)
    if isinstance(window, str):
        return window
    if not requested(rules, header=header):
        return "not_requested" if header is None else "refused_by_client"
    if not principal.compress:
        return "refused_by_entitlement"
    if promise := promised(facts.members):
        return promise
    if facts.previous_response_id is not None:
        return "cached_conversation"
    pool = served.fleet.pools[planned.pool]
    if rules.only_when_busy and has_room(pool, incoming.received_s):
        return "not_busy"
    begins = prefix.points or points(asked, facts.members)
    if compression.conversations.continues(principal.tenant, begins):
        return "cached_conversation"
    if not mostly_new(estimate.input_tokens, prefix.hits()):
        return "cached_prefix"
    return window


def overflow_param(endpoint: Endpoint) -> str:
    """The body's member that is too long, for the error's `param`."""
    return _PARAMS.get(endpoint.name, "messages")


def applied(served: ModelRuntime, estimate: LengthEstimate, decided: Plan) -> Plan:
    """The plan that is carried out: the one that was decided, or in observe mode a relay's."""
    if not served.routing.observe:
        return decided
    shapes, pools = served.routing.pools, served.fleet.pools
    able = [i for i, s in enumerate(shapes) if can_serve(estimate, s.window_tokens)]
    able = able or [len(shapes) - 1]

    def load(i: int) -> tuple[float, int]:
        slots = max(1, sum(pools[i].present) * pools[i].slots_per_worker)
        return pools[i].inflight / slots, -i

    pool = min(able, key=load)
    return Plan(pool=pool, alternates=tuple(i for i in able if i != pool), reason="observed")


# -- 4 admit


async def admit(
    store: LeaseStore,
    served: ModelRuntime,
    principal: Principal,
    lease_id: str,
    estimate: LengthEstimate,
    plan: Plan,
    *,
    demoted: bool = False,
) -> Lease:
    """Take the request's one lease. Raises Refusal.

    Reserved is the careful estimate, and of budgets all that the request may use at most: what was
    learned of a tenant never decides how far a tenant passes a hard limit. What would be refused
    for ever by the estimate alone is asked for once more by the lowest count that is plausible:
    its bucket pays what it turns out to use. `demoted`: it gets leftovers only.
    """
    ask = question(served, principal, lease_id, estimate, plan, demoted=demoted)
    try:
        return await store.admit(ask)
    except Forbidden as refusal:
        if not principal.of_cluster or refusal.reason == "entitlement_expired":
            raise
        # Other gateways heard first that it is withheld, or this one has not told the store yet.
        text = f"The entitlement '{principal.entitlement}' is just being changed. Try again."
        reason = "entitlement_pending"
        raise Unavailable(text, reason=reason, retry_after_s=1.0, should_retry=True) from None
    except BadRequest as refusal:
        lower = _by_lowest(served, ask, estimate)
        if refusal.reason != "exceeds_entitlement" or lower is None:
            raise
    return await store.admit(lower)


async def quote(
    store: LeaseStore,
    served: ModelRuntime,
    principal: Principal,
    estimate: LengthEstimate,
    plan: Plan,
) -> Lease | Denial:
    """What `admit` would come to; nothing is taken. Raises Refusal of the quote itself."""
    ask = question(served, principal, "", estimate, plan)
    counted = tuple([limit for limit in ask.limits if limit.unit == "requests"])
    quoted = await store.quote(ask, counted)
    if isinstance(quoted, Denial) and quoted.reason == "exceeds_entitlement":
        lower = _by_lowest(served, ask, estimate)
        if lower is not None:
            return await store.quote(lower, ())
    return quoted


def question(
    served: ModelRuntime,
    principal: Principal,
    lease_id: str,
    estimate: LengthEstimate,
    plan: Plan,
    *,
    demoted: bool = False,
) -> AdmissionRequest:
    """What admission is asked for a request, by the estimate of its cost."""
    cost_tokens = estimate.cost_tokens
    window_tokens = served.routing.pools[-1].window_tokens
    if estimate.sequences == 1 and cost_tokens > window_tokens:
        cost_tokens = window_tokens  # no engine can use more for one sequence
    limits, most_tokens, money, most_money = principal.limits, 0, 0, 0
    if limits:
        # At most its prompts' bytes and its limit, or whole windows; however many are the answer's.
        answer_tokens = most_tokens = estimate.sequences * window_tokens
        if estimate.limit_tokens is not None:
            answer_tokens = estimate.sequences * estimate.limit_tokens
            if estimate.most_input_tokens is not None:
                most_tokens = min(most_tokens, estimate.most_input_tokens + answer_tokens)
        if any(limit.unit == "money" for limit in limits):
            money, price = _cost(served, estimate, cost_tokens), served.price
            if price is not None:
                answer_tokens = min(answer_tokens, most_tokens)
                most_money = max(
                    cost_nano(price, most_tokens, 0),
                    cost_nano(price, most_tokens - answer_tokens, answer_tokens),
                )
    return AdmissionRequest(
        lease_id=lease_id,
        model=served.name,
        entitlement=principal.entitlement,
        pool=plan.pool,
        alternates=plan.alternates,
        pools=served.fleet.routed,
        estimate_tokens=cost_tokens,
        sequences=estimate.sequences,
        kv_bytes=cost_tokens * served.admission.kv_bytes_per_token,
        limits=limits,
        money=money,
        most_tokens=most_tokens,
        most_money=most_money,
        demoted=demoted,
    )


def _by_lowest(
    served: ModelRuntime, ask: AdmissionRequest, estimate: LengthEstimate
) -> AdmissionRequest | None:
    """The same by the lowest plausible count; None where that is no lower."""
    lowest = lowest_cost_tokens(estimate)
    if lowest >= ask.estimate_tokens:
        return None
    kv_bytes = lowest * served.admission.kv_bytes_per_token
    money = ask.money and _cost(served, estimate, lowest)
    return msgspec.structs.replace(ask, estimate_tokens=lowest, kv_bytes=kv_bytes, money=money)


def _cost(served: ModelRuntime, estimate: LengthEstimate, cost_tokens: int) -> int:
    """What so many tokens are expected to cost, none of them cached.

    Nobody knows what time at workers will cost; but it is not nothing, which always fits.
    """
    if served.price is None:
        return int(served.by_hour and cost_tokens > 0)
    prompt_tokens = min(estimate.input_tokens_total, cost_tokens)
    return cost_nano(served.price, prompt_tokens, cost_tokens - prompt_tokens)


def lowest_cost_tokens(estimate: LengthEstimate) -> int:
    """What the request may take at least: its prompts at their lowest plausible count."""
    longest = max(estimate.input_tokens, 1)
    doubt = 1 - min(estimate.input_tokens_lowest / longest, 1.0)
    return ceil(estimate.cost_tokens - estimate.input_tokens_total * doubt)
