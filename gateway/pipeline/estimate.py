"""Stage 2, classify and estimate: body -> facts -> the three output figures."""

import asyncio
from collections.abc import Mapping
from typing import Final

import msgspec

from gateway.errors import NotFound
from gateway.fleet.model_runtime import ModelRuntime
from gateway.payload.body import TakesLong, is_heavy, read_body
from gateway.payload.category import category_from_header
from gateway.payload.head import pairs_of
from gateway.payload.members import ADAPTER_FIELD
from gateway.records.endpoint import Endpoint, matches
from gateway.records.estimate import LengthEstimate
from gateway.records.request import OPEN, BodyFacts, Principal, RequestHead

_LOOKS: Final = 4
_LOOK_EVERY_S: Final = 0.5
"""Another replica's response is known here after two exchanges, half a second each."""


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
        raise NotFound(
            f"The model '{name}' does not exist. GET /v1/models lists those that do.",
            reason="model_not_found",
            code="model_not_found",
            param="model",
        )
    return served


def adapter_of(served: ModelRuntime, facts: BodyFacts) -> str:
    """The LoRA adapter that a request is for; "" for the model itself. Raises NotFound.

    As in SGLang, an adapter's name as the model goes before the field that names one.
    """
    adapter = served.adapter(facts.model) or served.adapter(facts.lora)
    if facts.lora and not adapter:
        raise NotFound(
            f"The LoRA adapter '{facts.lora[:256]}' does not exist. "
            "GET /v1/models lists those that do.",
            reason="model_not_found",
            code="model_not_found",
            param=ADAPTER_FIELD,
        )
    return adapter


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
            code=None,
            param="response_id",
        )
    measure = facts.measure
    return msgspec.structs.replace(
        facts,
        measure=msgspec.structs.replace(
            measure,
            exact_tokens=measure.exact_tokens + location.tokens,
            longest_exact_tokens=measure.longest_exact_tokens + location.tokens,
        ),
    )


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
    found = served.estimator.estimate(endpoint, facts, principal.tenant, category, default)
    if endpoint.computes:
        return found
    return msgspec.structs.replace(
        found, input_tokens_lowest=0, cost_tokens=0, most_input_tokens=0, limit_tokens=0
    )
