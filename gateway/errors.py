"""Refusals: each has a machine-readable reason, and the table says what its client gets.

Every refusal that a client sees is a `Refusal`. Adapters translate foreign errors once, to
`UpstreamFailure` or `StateFailure`. `gateway.http.problems` renders refusals; this module only
defines them.
"""

from collections.abc import Mapping
from typing import Final, Literal, NamedTuple


class SluiceError(Exception):
    """Base of all exceptions that Sluice raises on purpose."""


REASONS: Final[Mapping[int, str]] = {
    400: """
        bad_configuration bad_request chunks_too_small context_length_exceeded duplicate_key
        empty_body exceeds_entitlement https_required invalid_cursor invalid_entitlement
        invalid_form invalid_http_request invalid_json invalid_tenant invalid_type invalid_utf8
        invalid_value missing_field too_complex too_deep too_many_members""",
    401: """
        invalid_admin_key invalid_api_key missing_api_key token_algorithm_refused
        token_audience_wrong token_claim_missing token_expired token_issuer_unknown
        token_key_unknown token_malformed token_not_yet_valid token_signature_wrong
        token_tenant_refused token_too_large""",
    403: """
        admin_closed entitlement_expired entitlement_not_of_key entitlement_suspended
        entitlement_unknown key_expired key_suspended model_not_entitled operator_cannot_change
        tenant_suspended token_tenant_unknown token_without_role token_without_tenant
        viewer_cannot_change""",
    404: """
        batch_not_found batches_off budget_not_found decision_not_found entitlement_not_found
        file_not_found key_not_found lease_not_found model_not_found no_ledger no_proof
        pool_not_found response_not_found tenant_not_found unknown_path worker_not_found""",
    405: "method_not_allowed",
    408: "request_timeout",
    409: """
        batch_ended entitlement_changed entitlement_exists entitlement_in_cluster
        entitlement_in_file entitlement_in_use file_in_use key_ambiguous key_exists key_in_file
        key_rotating proof_of_another_file tenant_changed tenant_exists tenant_in_file
        tenant_in_use too_many_keys too_many_tenants worker_discovered worker_exists""",
    412: "entitlement_changed tenant_changed",
    413: "request_too_large",
    415: "unsupported_content_encoding unsupported_content_type",
    416: "range_not_satisfiable",
    422: "cannot_promise",
    429: """
        budget budget_reserved concurrency evicted key_concurrency key_requests kv priority
        queue_full queue_timeout reader_busy tokens too_many_batches too_many_body_bytes
        too_many_files too_many_leases too_many_reports too_many_viewers""",
    431: "headers_too_large",
    500: "internal_error",
    502: "engine_connection_broken engine_error engine_stream_broken engines_ended",
    503: """
        engine_busy entitlement_degraded entitlement_pending gateway_exhausted keys_not_read
        ledger_unavailable no_worker_ready reader_busy replica_silent shutting_down
        state_unavailable token_keys_unavailable too_many_body_bytes too_many_connections
        too_many_leases too_much_unsent""",
    504: "engine_silent engine_timeout",
    507: "storage_full",
}
"""Every reason for which the gateway refuses a request, by status; docs/operate/errors.md says what
each means. An engine's own refusal has its status (`engine_refused`)."""
_STATUS: Final = {r: status for status, reasons in REASONS.items() for r in reasons.split()}
_CODES: Final = {
    reason: code
    for code, reasons in {
        None: """
            bad_request empty_body invalid_form invalid_http_request invalid_json invalid_utf8
            response_not_found too_complex too_deep too_many_members""",
        "insufficient_quota": "budget",
        "invalid_api_key": REASONS[401],
        "missing_required_parameter": "missing_field",
        "rate_limit_exceeded": """
            budget_reserved concurrency key_concurrency key_requests kv priority queue_full
            queue_timeout tokens""",
    }.items()
    for reason in reasons.split()
}
"""Codes of errors whose code is not the reason, as OpenAI's clients know them."""
_TYPES: Final = {"tokens": "tokens", "budget": "insufficient_quota"}


class Refusal(SluiceError):
    """A request refused with a status, an OpenAI error type and code, and a reason.

    `REASONS` gives the status where the class does not. x-sluice-reason and the metrics carry
    `reason`, and so does `code` unless the table or the caller says otherwise (None: null).
    `retry_after_s` becomes Retry-After and retry-after-ms; `should_retry` becomes x-should-retry
    unless it is None.
    """

    status = 0

    def __init__(
        self,
        message: str,
        *,
        reason: str,
        code: str | None = "",
        param: str | None = None,
        retry_after_s: float | None = None,
        should_retry: bool | None = None,
        headers: tuple[tuple[bytes, bytes], ...] = (),
    ) -> None:
        super().__init__(message)
        self.status = status = self.status or _STATUS.get(reason, 400)
        by_status = {403: "permission_denied", 429: "requests"}.get(status, "invalid_request_error")
        self.type = _TYPES.get(reason, "server_error" if status >= 500 else by_status)
        self.figures = ""
        """Limit, used and requested of what admission refused for, as the message tells them."""
        self.headers = headers
        """Further response headers (x-ratelimit-*)."""
        self.message = message
        self.reason = reason
        self.code = code if code != "" else _CODES.get(reason, reason)
        self.param = param
        self.retry_after_s = retry_after_s
        self.should_retry = should_retry


class Told(NamedTuple):
    """What a decision record keeps of a refusal; an exception would keep its frames alive."""

    reason: str
    retry_after_s: float | None
    figures: str


def told(refusal: Refusal) -> Told:
    """What the client of a refused request was told, for its record."""
    return Told(refusal.reason, refusal.retry_after_s, refusal.figures)


class BadRequest(Refusal):
    """400: the body or the headers are invalid or not supported."""

    status = 400


class ContextLengthExceeded(BadRequest):
    """400: the prompt and its output limit exceed even the largest context window."""

    def __init__(
        self, message: str, *, prompt_tokens: int, window_tokens: int, param: str = "messages"
    ) -> None:
        super().__init__(message, reason="context_length_exceeded", param=param)
        self.prompt_tokens = prompt_tokens
        self.window_tokens = window_tokens


class Unauthorized(Refusal):
    """401: no key, or an unknown one."""

    status = 401


class Forbidden(Refusal):
    """403: the key is known but lacks the permission."""

    status = 403


class NotFound(Refusal):
    """404: unknown model or route."""

    status = 404


class Conflict(Refusal):
    """409: an admin's change conflicts with the present state."""

    status = 409


class TooLarge(Refusal):
    """413: the body is over max_body_bytes."""

    status = 413

    def __init__(self, message: str) -> None:
        super().__init__(message, reason="request_too_large")


class RateLimited(Refusal):
    """429: a limit on requests (concurrency, KV, priority, queue) was reached."""

    status = 429


class Unavailable(Refusal):
    """503: no worker or service that the request needs is ready now."""

    status = 503


class KeysAwaited(Unavailable):
    """503: the keys of a token's issuer are being read, or could not be."""


class EngineRefusal(Refusal):
    """4xx: the engine refused; rendered in the endpoint's error shape if it was in another."""

    def __init__(self, status: int, message: str) -> None:
        self.status = status
        super().__init__(message, reason="engine_refused", code=None)
        self.type = "invalid_request_error"


FailureKind = Literal["local", "connect", "reset", "timeout", "protocol"]


class UpstreamFailure(SluiceError):
    """The exchange with one worker failed below HTTP; raised by the upstream adapters only.

    `kind`: local (the gateway's machine ran out of file descriptors, memory or ports; nothing was
    sent, and the worker is not to blame), connect (nothing was sent), reset (the connection
    broke), timeout (a phase took too long), protocol (not HTTP). `head_received` tells whether
    the response had begun.
    """

    def __init__(self, kind: FailureKind, message: str, *, head_received: bool = False) -> None:
        super().__init__(message)
        self.kind: FailureKind = kind
        self.head_received = head_received


class StateFailure(SluiceError):
    """A state store could not be read or written. Its adapters raise it, for the log."""

    sent = False
    """Whether the store may have done what it was asked nevertheless."""


class StorageFull(StateFailure):
    """The state or the storage of batches has no room left."""
