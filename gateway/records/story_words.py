"""Words for the codes of a decision record; `gateway.records.story` puts them into sentences."""

from typing import Final

PLANS: Final = {
    "only_pool": "the model's only one",
    "within_boundary": "because the total is within its boundary",
    "over_boundary": "because the total is over the smaller pool's boundary",
    "over_window": "because prompt and limit exceed the smaller pool's window",
    "largest_window_doubtful": "the largest, although the request may exceed even its window",
    "prefix_held": "because its workers have cached the beginning of this conversation",
    "within_gamma": "over the boundary by so little that compression may fit the smaller pool",
    "observed": "the one with most room, because the boundary is only observed",
    "would_refuse": "although enforced, the gateway would have refused the request as too long",
}
"""By `plan.reason`."""

REFUSALS: Final = {
    "keys_not_read": "its state store was away since the start, so revoked keys were unknown",
    "key_expired": "its API key has expired",
    "key_suspended": "its API key is suspended",
    "tenant_suspended": "its tenant is suspended",
    "missing_api_key": "it came without an API key",
    "invalid_api_key": "its API key is unknown",
    "entitlement_expired": "its entitlement has expired",
    "entitlement_suspended": "its entitlement is suspended",
    "entitlement_unknown": "its entitlement is unknown to the token pool",
    "entitlement_pending": "the pool cannot hold this entitlement's reserve yet",
    "entitlement_degraded": "the pool lost capacity and serves only reserved work",
    "model_not_entitled": "its key is for another model",
    "model_not_found": "no model has that name",
    "exceeds_entitlement": "it is larger than its limits allow, so waiting does not help",
    "tokens": "the entitlement's token rate is used up",
    "key_requests": "its key has made as many requests in the last minute as it may",
    "key_concurrency": "its key has as many sequences in flight as it may",
    "budget": "a budget of its tenant, entitlement or key is spent",
    "budget_reserved": "requests in flight hold the rest of a budget",
    "concurrency": "the entitlement has as many sequences in flight as it may",
    "kv": "the bytes of KV cache of the entitlement or of the pool are taken",
    "priority": "the pool is full of work of at least this priority",
    "evicted": "it gave way to a request with a reserved place",
    "context_length_exceeded": "it is too long for the largest window",
    "no_worker_ready": "no worker was in the rotation",
    "engine_busy": "the queue of every engine was full",
    "queue_full": "too many requests already waited in the gateway",
    "queue_timeout": "no worker became free within the time that a request may wait",
    "engine_error": "every attempt failed before the first byte",
    "engine_connection_broken": "every attempt failed before the first byte",
    "engine_timeout": "every attempt timed out before the first byte",
    "engines_ended": "two engines failed on the very same request a moment before",
    "state_unavailable": "the state store was away, and the gateway is told to refuse then",
    "gateway_exhausted": "the gateway's machine ran out of connections or memory",
    "too_many_leases": "another proxy holds too many leases without reporting their use",
}
"""By `reason` or `admission.would_deny`."""

COMPRESSION: Final = {
    "not_text": "it has no single text to cut",
    "category": "its kind of text is not compressed",
    "tools": "it defines tools",
    "several_prompts": "the request has several prompts",
    "not_busy": "the larger pool had room for it as it was",
    "not_requested": "the client did not ask for it",
    "not_retrieval": "it is no question over retrieved passages",
    "no_question": "it asks nothing that a passage could answer",
    "several_questions": "it asks several questions",
    "cross_lingual": "its question shares no words with the passages",
    "broad_question": "its question concerns most of the passages",
    "few_shot": "it shows examples, which the task needs",
    "echo": "the answer repeats the prompt",
    "suffix": "the answer goes into the middle of a text",
    "prompt_logprobs": "the answer rates each token of the prompt",
    "no_budget": "the answer leaves no room for it in the smaller pool",
    "refused_by_client": "the client refuses compression",
    "refused_by_entitlement": "the entitlement refuses compression",
    "cached_conversation": "an engine has cached this conversation as it came",
    "cached_prefix": "an engine has cached its beginning",
    "spilled": "the request spilled to another pool",
    "other_pool": "admission put it into the larger pool",
    "observed": "compression is only observed",
    "queue_full": "too many prompts already waited for the compressor",
    "timeout": "the compressor exceeded its time limit",
    "failed": "the compressor failed",
}
"""By `compression.not_compressed`; the compressor's own reasons are shown as they are."""

FAULTS: Final = {
    "connect": "refused the connection",
    "frozen": "was frozen",
    "reset": "broke the connection",
    "timeout": "timed out",
    "protocol": "answered with broken HTTP",
    "server_error": "answered with a server error",
    "out_of_memory": "ran out of memory",
    "busy": "was busy",
    "not_served": "did not serve the model",
    "overflow": "found the prompt too long",
    "empty": "answered nothing",
    "local": "could not be called from here",
}
"""By the `result` of an attempt."""

OUTCOMES: Final = {
    "ok": "The request was served",
    "error": "The engine refused the request",
    "refused": "The request ended there",
    "fell_back": "The gateway asked another model instead",
    "evicted": "The request gave way to a request with a reserved place",
    "disconnected": "The client left before the end",
    "upstream_error": "The engines failed",
    "internal_error": "The gateway failed",
    "expired": "Another proxy never reported its use",
}
"""By `outcome`."""


ENDINGS: Final = {
    "refused": "The gateway refused the request with",
    "fell_back": "This model could not serve the request and would have answered",
    "evicted": "The gateway ended the request with",
    "upstream_error": "The client got",
    "error": "The client got the engine's refusal, with",
}
"""By `outcome`, of requests that ended with a reason; the status follows."""


def grouped(number: float | str) -> str:
    """A whole number with thousands apart; other text as it is."""
    text = str(number)
    return f"{int(text):,}" if text.isdecimal() else text
