"""The tree of refusals: one exception type per HTTP status, each with a machine-readable reason.

Every refusal that a client sees is a `Refusal`. Adapters translate foreign errors once, to
`UpstreamFailure` or `StateFailure`. `gateway.http.problems` renders refusals; this module only
defines them.
"""

from typing import Literal, NamedTuple


class SluiceError(Exception):
    """Base of all exceptions that Sluice raises on purpose."""


class Refusal(SluiceError):
    """A request refused with a status, an OpenAI error type and code, and a reason.

    x-sluice-reason and the metrics carry `reason`, and so does `code` unless it is given (None:
    null). `retry_after_s` becomes Retry-After and retry-after-ms; `should_retry` becomes
    x-should-retry unless it is None.
    """

    status = 400
    type = "invalid_request_error"
    coded = True
    """Whether the reason is the error's code where no other is given."""

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
        self.figures = ""
        """Limit, used and requested of what admission refused for, as the message tells them."""
        self.headers = headers
        """Further response headers (x-ratelimit-*)."""
        self.message = message
        self.reason = reason
        self.code = code if code != "" else reason if self.coded else None
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

    coded = False


class ContextLengthExceeded(BadRequest):
    """400: the prompt and its output limit exceed even the largest context window."""

    def __init__(
        self, message: str, *, prompt_tokens: int, window_tokens: int, param: str = "messages"
    ) -> None:
        super().__init__(
            message, reason="context_length_exceeded", code="context_length_exceeded", param=param
        )
        self.prompt_tokens = prompt_tokens
        self.window_tokens = window_tokens


class Unauthorized(Refusal):
    """401: no key, or an unknown one."""

    status = 401


class Forbidden(Refusal):
    """403: the key is known but lacks the permission."""

    status = 403
    type = "permission_denied"


class NotFound(Refusal):
    """404: unknown model or route."""

    status = 404


class MethodNotAllowed(Refusal):
    """405: the route does not support this method."""

    status = 405


class RequestTimeout(Refusal):
    """408: the request takes too long to arrive."""

    status = 408


class Conflict(Refusal):
    """409: an admin's change conflicts with the present state."""

    status = 409


class PreconditionFailed(Refusal):
    """412: the entitlement is no longer at the version that the client named (If-Match)."""

    status = 412


class TooLarge(Refusal):
    """413: the body is over max_body_bytes."""

    status = 413

    def __init__(self, message: str) -> None:
        super().__init__(message, reason="request_too_large")


class UnsupportedMedia(Refusal):
    """415: a content type or encoding the gateway does not read."""

    status = 415


class RateLimited(Refusal):
    """429: a limit on requests (concurrency, KV, priority, queue) was reached."""

    status = 429
    type = "requests"


class TokensLimited(RateLimited):
    """429: the entitlement exceeded its token rate."""

    type = "tokens"


class QuotaExceeded(RateLimited):
    """429: a budget is used up; no retry helps before it resets."""

    type = "insufficient_quota"


class Unavailable(Refusal):
    """503: no worker or service that the request needs is ready now."""

    status = 503
    type = "server_error"


class KeysAwaited(Unavailable):
    """503: the keys of a token's issuer are being read, or could not be."""


class EngineRefusal(Refusal):
    """4xx: the engine refused; rendered in the endpoint's error shape if it was in another."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message, reason="engine_refused", code=None)
        self.status = status


class InternalError(Refusal):
    """500: a bug in the gateway."""

    status = 500
    type = "server_error"


class UpstreamBroken(Refusal):
    """502: every engine tried failed before a byte reached the client."""

    status = 502
    type = "server_error"


class UpstreamTimeout(Refusal):
    """504: an engine did not answer in time."""

    status = 504
    type = "server_error"


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
