"""Another model answers where the asked one cannot, before a byte was sent.

Never for a limit of the tenant's own: who is over it shall wait, not move. A stored response is
continued by its own model only, and no other model stands in for a LoRA adapter.
"""

from collections.abc import Mapping
from typing import Final, NamedTuple

from gateway.errors import Refusal
from gateway.fleet.model_runtime import ModelRuntime
from gateway.pipeline import authenticate, estimate
from gateway.pipeline.request_progress import RequestProgress
from gateway.records.request import BodyFacts, Principal
from gateway.routing.split_alias import SplitAlias, conversation_key

FALLING: Final = frozenset(
    {
        *("no_worker_ready", "queue_timeout", "priority", "engine_busy"),
        *("engine_error", "engine_connection_broken", "engine_timeout"),
    }
)
"""Reasons of refusals after which another model is asked."""


class Instead(NamedTuple):
    """A request that other models may answer, the first of `models` next."""

    facts: BodyFacts
    models: tuple[str, ...]
    turn: int
    """Which fallback this is, from 1."""


def following(
    progress: RequestProgress, refusal: Refusal, now: Instead | None, now_unix_s: float
) -> Instead | None:
    """What to try after a refusal; None to tell the client. Models closed to the key are left."""
    served, facts, key_principal = progress.served, progress.facts, progress.key
    if served is None or facts is None or key_principal is None:
        return None
    names = served.fallbacks if now is None else now.models[1:]
    if not names or refusal.reason not in FALLING or facts.previous_response_id is not None:
        return None
    if facts.adapter:
        return None
    usable = tuple(name for name in names if _opens(key_principal, name, now_unix_s))
    return Instead(facts, usable, 1 if now is None else now.turn + 1) if usable else None


def _opens(principal: Principal, model: str, now_unix_s: float) -> bool:
    try:
        authenticate.entitled(principal, model, now_unix_s)
    except Refusal:
        return False
    return True


def model_of(
    models: Mapping[str, ModelRuntime],
    splits: Mapping[str, SplitAlias],
    facts: BodyFacts,
    principal: Principal,
) -> ModelRuntime:
    """The model that a request names; of a split alias, its conversation's. Raises NotFound."""
    split = splits.get(facts.model)
    if split is None:
        return estimate.find_model(models, facts.model)
    for name in split.models:
        if facts.previous_response_id is None:
            break
        if models[name].fleet.response_affinity.find(facts.previous_response_id) is not None:
            return models[name]
    open_to = [name for name in split.models if principal.opens(name)] or split.models
    chosen = split.choose(open_to, principal.tenant, conversation_key(facts.members))
    return models[chosen]
