"""The tree of refusals: one exception type per status class, each with a machine-readable reason.

Every refusal the client sees is a `Refusal`; foreign errors are translated once, at the
edge that meets them (adapters raise `UpstreamFailure`, the web layer renders). Shapes are
in `gateway.web.problems`; here is only what is meant.
"""

from typing import Literal


class SluiceError(Exception):
    """Base of everything Sluice raises on purpose."""


class Refusal(SluiceError):
    """A request refused with a status, an OpenAI error type and code, and a reason.

    `reason` is what x-sluice-reason and the metrics carry; `retry_after_s` becomes
    Retry-After and retry-after-ms; `should_retry` becomes x-should-retry when not None.
    """

    status = 400
    type = "invalid_request_error"

    def __init__(
        self,
        message: str,
        *,
        reason: str,
        code: str | None = None,
        param: str | None = None,
        retry_after_s: float | None = None,
        should_retry: bool | None = None,
        headers: tuple[tuple[bytes, bytes], ...] = (),
    ) -> None:
        super().__init__(message)
        self.headers = headers
        """Further response headers (x-ratelimit-*)."""
        self.message = message
        self.reason = reason
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s
        self.should_retry = should_retry


class BadRequest(Refusal):
    """400: the body or its headers cannot be served as sent."""


class ContextLengthExceeded(BadRequest):
    """400: not even the largest window can hold the prompt and its own output limit."""

    def __init__(self, message: str, *, param: str = "messages") -> None:
        super().__init__(
            message, reason="context_length_exceeded", code="context_length_exceeded", param=param
        )


class Unauthorized(Refusal):
    """401: no key, or an unknown one."""

    status = 401


class Forbidden(Refusal):
    """403: a known key that may not do this."""

    status = 403
    type = "permission_denied"


class NotFound(Refusal):
    """404: unknown model or route."""

    status = 404


class MethodNotAllowed(Refusal):
    """405: a known route, the wrong method."""

    status = 405


class Conflict(Refusal):
    """409: not as things stand now (an admin's change)."""

    status = 409


class PreconditionFailed(Refusal):
    """412: not as the client last saw it (If-Match)."""

    status = 412


class TooLarge(Refusal):
    """413: the body is over max_body_bytes."""

    status = 413

    def __init__(self, message: str) -> None:
        super().__init__(message, reason="request_too_large", code="request_too_large")


class UnsupportedMedia(Refusal):
    """415: a content type or encoding the gateway does not read."""

    status = 415


class RateLimited(Refusal):
    """429: `requests` (concurrency, KV, priority, queue) or `tokens`."""

    status = 429
    type = "requests"


class TokensLimited(RateLimited):
    """429: the entitlement's token rate."""

    type = "tokens"


class Unavailable(Refusal):
    """503: nothing ready can serve the request now."""

    status = 503
    type = "server_error"


class EngineRefusal(Refusal):
    """4xx: the engine's own refusal, told in the endpoint's shape when it was not in it."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message, reason="engine_refused")
        self.status = status


class InternalError(Refusal):
    """500: a bug of the gateway's own."""

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

    `kind`: local (the gateway's own machine had no open file, memory or port left: nothing was
    sent, and it says nothing of the worker), connect (nothing was sent), reset (the connection
    broke), timeout (a phase took too long), protocol (not HTTP). `head_received` says whether a
    response had begun.
    """

    def __init__(self, kind: FailureKind, message: str, *, head_received: bool = False) -> None:
        super().__init__(message)
        self.kind: FailureKind = kind
        self.head_received = head_received


class StateFailure(SluiceError):
    """The state store could not be read or written; raised by its adapters, for the log."""
