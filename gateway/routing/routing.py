"""Choose the pool for a request: Algorithm 1 of token-budget pool routing, for N pools.

Rules (token-budget paper, section 2.2; docs/concepts/pipeline.md, "What is counted"):

- A pool *can* serve a request if prompt + the client's own cap fits its window; the
  engine refuses otherwise. Without a cap, room for one token is enough.
- The pool that *should* serve it is the first whose boundary holds the expected total
  L_fit = L_in + L_out; the last pool has no boundary.
- Spillover goes to the alternates in order: larger windows first, then smaller ones that can
  serve the request.
- The gateway refuses a request itself only if even the lowest plausible prompt count exceeds
  the largest window. Doubtful requests go to that window, and the engine decides.

A conversation that grew past its pool's boundary may stay with its cached prefix:

- Only pools smaller than the planned one are considered: a conversation leaves its pool by
  growing. A request spilled into a larger pool returns when its own has room; if it stayed, a
  system prompt cached only in the larger pool would draw every request there.
- The request must fit: prompt and the client's cap within the pool's window.
- Moving costs the prefill in the planned pool. Staying costs the prefill in the smaller pool
  plus the tokens past its boundary, for which its capacity was not sized:

      stay if  L_in - hit(planned)  >  L_in - hit(smaller) + max(0, L_fit - boundary).

- So a request that shares only a system prompt moves, unless that is most of the request.

The compression window above a boundary B (FleetOpt, section 5) says which requests may be
compressed into the smaller pool, and to what size:

- Only totals in (B, gamma B] of one boundary, of a text category, with one prompt.
- T_c = min(B - L_out, window - cap) keeps the boundary and the engine's own limit.
- Not if the client or its entitlement refuses, and not if an earlier turn of the conversation
  was served unchanged: the engine has cached that prefix, and compressed bytes would miss it.
- Not if the API's contract forbids it: the client gets its prompt back (`echo`), relies on each of
  its tokens (`prompt_logprobs`), or has the model continue it (`suffix`,
  `continue_final_message`), or a cache holds it (`cache_control`).
- Not if the model's rules forbid it: only requests that ask for it (`when: header`), and only while
  the larger pool has no room for another sequence (`only_when_busy`).
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, Literal, NamedTuple

import msgspec

from gateway.errors import ContextLengthExceeded
from gateway.fleet.fleet import PoolState, ready_slots
from gateway.records.endpoint import Endpoint
from gateway.records.estimate import LengthEstimate, Plan
from gateway.records.request import BodyFacts
from gateway.scheduling.scheduler import Points

MAX_CACHED_SHARE: Final = 0.3
"""Prompts with this expected cached share or more are not compressed: new bytes would miss."""
ENDPOINTS = frozenset({"chat", "completions", "responses", "messages"})
CATEGORIES = frozenset({"prose", "other-script", "cjk", "mixed"})
_PROMISES: Final = {
    "echo": "echo",
    "return_token_ids": "echo",
    "suffix": "suffix",
    "prompt_logprobs": "prompt_logprobs",
    "continue_final_message": "prefill",
    "cache_control": "cache_control",
}
"""Member of a body -> reason; in vLLM and SGLang `return_token_ids` gives the prompt's, too."""
_UNSET: Final = frozenset({b"null", b"false", b'""'})


@dataclass(frozen=True, kw_only=True)
class PoolShape:
    """A pool as routing sees it. Pools are ordered by `window_tokens`."""

    name: str
    window_tokens: int
    """max_model_len of its engines."""
    boundary_tokens: int | None
    """b_short of this pool: requests with expected totals up to it go here; None for the last."""
    tells_flow: bool = False
    """Whether requests tell an inference gateway before its engines whose they are."""


@dataclass(frozen=True, kw_only=True)
class Routing:
    """A model's routing table. `observe` computes the boundary and does not apply it."""

    pools: tuple[PoolShape, ...]
    default_max_tokens: int | None = None
    observe: bool = False


@dataclass(frozen=True, kw_only=True)
class CompressionRules:
    """A model's settings for compression above a boundary."""

    gamma: float = 1.5
    max_cut: float = 0.5
    tokenizer: str | None = None
    """Path of the model's tokenizer.json, which makes counts exact."""
    when: Literal["asked", "any", "header"] = "asked"
    """Which tasks: questions over retrieved passages, all, or all of requests that ask for it."""
    mark: bool = True
    """Whether cuts are marked in the text."""
    only_when_busy: bool = False
    """Whether to compress only while the larger pool has no room."""


@dataclass(frozen=True, kw_only=True)
class CompressionWindow:
    """Target of a request in a compression window: the smaller pool, and T_c in tokens."""

    pool: int
    budget_tokens: int


def can_serve(estimate: LengthEstimate, window_tokens: int) -> bool:
    """Whether an engine of this window accepts the request, by the conservative count."""
    cap = estimate.cap_tokens
    return estimate.input_tokens + (1 if cap is None else cap) <= window_tokens


def plan_pool(routing: Routing, estimate: LengthEstimate, param: str = "messages") -> Plan:
    """Primary pool and alternates for a request.

    Raises ContextLengthExceeded if the request cannot fit the largest window with any
    tokenizer. `routing.observe` does not change the plan: the caller decides what to apply.
    """
    pools = routing.pools
    last = len(pools) - 1
    needed = estimate.input_tokens + (1 if estimate.cap_tokens is None else estimate.cap_tokens)
    # Windows ascend: what fits one pool fits every larger one.
    smallest = 0
    while smallest <= last and needed > pools[smallest].window_tokens:
        smallest += 1
    if smallest > last:
        least, window_tokens = estimate.input_tokens_lowest, pools[last].window_tokens
        needed = least + (estimate.cap_tokens or 0)
        if needed <= window_tokens:
            # Doubtful, not impossible: the engine counts exactly and accepts or refuses.
            return Plan(pool=last, alternates=(), reason="largest_window_doubtful")
        answer = f", {estimate.cap_tokens} for the completion"
        asked = f"at least {least} in the prompt{'' if estimate.cap_tokens is None else answer}"
        raise ContextLengthExceeded(
            f"This model's maximum context length is {window_tokens} tokens. However, you "
            f"requested at least {needed} tokens ({asked}). Please reduce the length of the "
            "prompt or of the completion.",
            prompt_tokens=max(least, window_tokens + 1),
            window_tokens=window_tokens,
            param=param,
        )
    pool = smallest
    while pool < last:
        boundary = pools[pool].boundary_tokens
        if boundary is None or estimate.fit_tokens <= boundary:
            break
        pool += 1
    return _plan(smallest, pool, last)


@lru_cache(maxsize=4096)
def _plan(smallest: int, pool: int, last: int) -> Plan:
    """The plan for these three pool indices; cached, because requests with the same share it."""
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


def defaulted_cap(routing: Routing, estimate: LengthEstimate, pool: int) -> int | None:
    """The output limit to send if the client set none: the default, shrunk to what fits.

    None if the client set its own or no default is configured.
    """
    if routing.default_max_tokens is None or estimate.cap_tokens is not None:
        return None
    room = routing.pools[pool].window_tokens - estimate.input_tokens
    return max(1, min(routing.default_max_tokens, room))


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


def promised(members: Mapping[str, msgspec.Raw]) -> str:
    """The promise of the API that a shorter prompt would break; "" if there is none."""
    for name, reason in _PROMISES.items():
        value = members.get(name)
        if value is not None and bytes(value) not in _UNSET:
            return reason
    return ""


def requested(rules: CompressionRules, *, header: bool | None) -> bool:
    """Whether the request may be compressed; `header`: its x-sluice-compress, None if absent."""
    return header is not False and (rules.when != "header" or header is True)


def has_room(pool: PoolState, now_s: float) -> bool:
    """Whether one more sequence would run at once in the pool.

    Engines' own figures count where they are read, because other gateways' requests are in them.
    """
    reported = 0.0
    for worker in pool.view.samples:
        if (sample := pool.view.fresh(worker, now_s)) is not None:
            reported += (sample.running or 0.0) + (sample.waiting or 0.0)
    return max(float(pool.inflight), reported) < ready_slots(pool, now_s)


def compression_window_of(
    routing: Routing,
    rules: CompressionRules,
    endpoint: Endpoint,
    facts: BodyFacts,
    estimate: LengthEstimate,
    planned: Plan,
) -> CompressionWindow | str:
    """The compression target, or why there is none ("": total in no compression window)."""
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
        return "tools"  # their definitions are in the prompt, but the compressor cannot cut them
    cap = estimate.output_tokens if estimate.cap_tokens is None else estimate.cap_tokens
    budget = min(boundary - estimate.output_tokens, shape.window_tokens - cap)
    if budget <= fixed_tokens(facts, estimate):
        return "no_budget"
    return CompressionWindow(pool=pool, budget_tokens=budget)


def fixed_tokens(facts: BodyFacts, estimate: LengthEstimate) -> int:
    """Prompt tokens that a compressor cannot cut: template, media, text of unknown members."""
    unknown = int(facts.unknown_bytes / estimate.ratio_conservative)
    return estimate.template_tokens + facts.measure.media_tokens + unknown


def window_plan(planned: Plan, window: CompressionWindow) -> Plan:
    """The plan of a request to compress; the planned pool is the first alternate."""
    return Plan(
        pool=window.pool,
        alternates=(planned.pool, *(p for p in planned.alternates if p > planned.pool)),
        reason="within_gamma",
        compress=True,
    )


def lowered(
    estimate: LengthEstimate, facts: BodyFacts, text_bytes: int, tokens: int | None, most: int
) -> LengthEstimate:
    """The estimate of the compressed prompt of `text_bytes`; at most `most` tokens.

    `tokens` is the count of the whole prompt; None: estimate it by the conservative ratio.
    """
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


RETAINED: Final = 20_000


class Conversations:
    """Prompts of one model that were sent to engines unchanged.

    Each turn's messages begin with the previous turn's, so the next turn has a point where this
    prompt ended (`gateway.scheduling.prefix_index`), and no texts are compared. Memory is
    bounded: the latest `capacity` / 2 to `capacity` prompts are remembered.
    """

    def __init__(self, capacity: int = RETAINED) -> None:
        """At most `capacity` (>= 2) prompts."""
        self._half = capacity // 2
        self._recent: set[int] = set()
        self._before: set[int] = set()

    def __len__(self) -> int:
        return len(self._recent | self._before)

    def remember(self, tenant: str, points: Points) -> None:
        """Note a prompt that was served unchanged, by its points."""
        if not points:
            return
        self._recent.add(hash((tenant, points[-1][1])))
        if len(self._recent) >= self._half:
            self._before, self._recent = self._recent, set()

    def continues(self, tenant: str, points: Points) -> bool:
        """Whether this prompt or an earlier turn of its conversation was served unchanged."""
        keys = [hash((tenant, digest)) for _, digest in points]
        return not (self._recent.isdisjoint(keys) and self._before.isdisjoint(keys))


MAX_RESPONSES = 10_000


class ResponseLocation(NamedTuple):
    """Where one stored response is, and whose it is."""

    pool: str
    worker: int
    tenant: str = ""
    tokens: int = 0
    """Tokens of its prompt and answer, with which the next turn begins."""


class ResponseAffinity:
    """Response affinity: response id -> ResponseLocation, at most `MAX_RESPONSES`.

    A request with a `previous_response_id` goes to the worker that stored that response, whose
    tokens count as prompt. Only its own tenant may continue it. If the gateway forgot it, the
    request is bound like any other. When full, the tenant with the most responses loses its oldest.
    """

    def __init__(self) -> None:
        self._locations: dict[str, ResponseLocation] = {}
        self._of: dict[str, dict[str, None]] = {}
        """Each tenant's ids, the oldest first."""
        self.on_remember: Callable[[str, ResponseLocation], None] | None = None
        """Called with each remembered response, to publish it to other replicas."""

    def __len__(self) -> int:
        return len(self._locations)

    def remember(self, response_id: str, location: ResponseLocation) -> None:
        """Note a response that an engine made. An id stays with its first tenant."""
        self.learn(response_id, location)
        if self.on_remember is not None:
            self.on_remember(response_id, location)

    def learn(self, response_id: str, location: ResponseLocation) -> None:
        """Note a response that another replica published."""
        before = self._locations.get(response_id)
        if before is not None and before.tenant != location.tenant:
            return
        if before is not None:
            self._forget(response_id)
        elif len(self._locations) >= MAX_RESPONSES:
            most = max(self._of.values(), key=len)
            self._forget(next(iter(most)))
        self._locations[response_id] = location
        self._of.setdefault(location.tenant, {})[response_id] = None

    def find(self, response_id: str | None) -> ResponseLocation | None:
        """Where the response is; None if unknown."""
        return None if response_id is None else self._locations.get(response_id)

    def left(self, pool: str, workers: Collection[int]) -> None:
        """Forget what workers store: their engines are gone. Takes one pass over all responses."""
        gone = [
            response_id
            for response_id, location in self._locations.items()
            if location.pool == pool and location.worker in workers
        ]
        for response_id in gone:
            self._forget(response_id)

    def _forget(self, response_id: str) -> None:
        tenant = self._locations.pop(response_id).tenant
        held = self._of[tenant]
        del held[response_id]
        if not held:
            del self._of[tenant]
