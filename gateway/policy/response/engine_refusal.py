"""The error that a client gets after the last attempt at an engine failed."""

from typing import Final

from gateway.errors import Refusal, Unavailable, UpstreamBroken, UpstreamTimeout
from gateway.policy.pools.retry import Fault
from gateway.policy.pools.suspects import MEMORY_S, Harm
from gateway.policy.response.overflow import engine_message


def suspected(harm: Harm, told: Refusal | None = None) -> Refusal:
    """The refusal of a body on which two engines failed: no client shall repeat it.

    `told`: what the client would be told of the last attempt, if it was made just now.
    """
    if told is None:
        told = UpstreamBroken("The request was not sent.", reason="engine_error")
        if harm == "ended":  # no other model's turn either
            told = UpstreamBroken("The request was not sent.", reason="engines_ended")
        told.code = told.reason
    what = "ended at" if harm == "ended" else "failed on"
    told.message += (
        f" Two engines {what} this very request, so no other gets it for {MEMORY_S:g} s: "
        "change it, or tell the operator of the engines."
    )
    told.should_retry = False
    return told


_REFUSALS: Final[dict[str, tuple[type[Refusal], str, str]]] = {
    "local": (
        Unavailable,
        "gateway_exhausted",
        "The gateway cannot connect to an engine: {message}. Its operator should raise its limits.",
    ),
    "not_served": (
        Unavailable,
        "no_worker_ready",
        "No engine serves this model at present.{detail}",
    ),
    "connect": (
        Unavailable,
        "no_worker_ready",
        "No engine that could serve this request accepts connections.",
    ),
    "timeout": (UpstreamTimeout, "engine_timeout", "The engine did not answer in time."),
    "server_error": (UpstreamBroken, "engine_error", "The engine failed ({message}).{detail}"),
}
_BROKEN: Final = (
    UpstreamBroken,
    "engine_connection_broken",
    "The engine's answer broke off before it began: {message}.",
)


def engine_refusal(fault: Fault) -> Refusal:
    """The refusal to send for the last attempt's fault."""
    said = engine_message(fault.body)
    detail = f" It said: {said}" if said else ""
    if fault.kind == "busy":
        why = detail or (f" {fault.message}." if fault.message != "busy" else "")
        return Unavailable(
            f"Every engine that could serve this request is busy.{why}",
            reason="engine_busy",
            code="engine_busy",
            retry_after_s=1.0 if fault.retry_after_s is None else fault.retry_after_s,
            should_retry=True,
        )
    refusal, reason, message = _REFUSALS.get(fault.kind, _BROKEN)
    return refusal(
        message.format(message=fault.message, detail=detail),
        reason=reason,
        code=reason,
        retry_after_s=2.0 if refusal is Unavailable else None,
    )
