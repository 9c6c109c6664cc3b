"""The error that a client gets after the last attempt at an engine failed."""

from gateway.errors import Refusal, Unavailable, UpstreamBroken, UpstreamTimeout
from gateway.routing.overflow import engine_message
from gateway.routing.retry import Fault
from gateway.routing.suspects import MEMORY_S, Harm


def suspected(harm: Harm, told: Refusal | None = None) -> Refusal:
    """The refusal of a body on which two engines failed: no client shall repeat it.

    `told`: what the client would be told of the last attempt, if it was made just now.
    """
    if told is None:
        told = UpstreamBroken("The request was not sent.", reason="engine_error")
        if harm == "ended":  # no other model's turn either
            told = UpstreamBroken("The request was not sent.", reason="engines_ended")
    what = "ended at" if harm == "ended" else "failed on"
    told.message += (
        f" Two engines {what} this very request, so no other gets it for {MEMORY_S:g} s: "
        "change it, or tell the operator of the engines."
    )
    told.should_retry = False
    return told


def engine_refusal(fault: Fault) -> Refusal:
    """The refusal to send for the last attempt's fault."""
    said = engine_message(fault.body)
    detail = f" It said: {said}" if said else ""
    match fault.kind:
        case "busy":
            why = detail or (f" {fault.message}." if fault.message != "busy" else "")
            return Unavailable(
                f"Every engine that could serve this request is busy.{why}",
                reason="engine_busy",
                retry_after_s=1.0 if fault.retry_after_s is None else fault.retry_after_s,
                should_retry=True,
            )
        case "local":
            return Unavailable(
                f"The gateway could not open a connection to an engine: {fault.message}. "
                "Its operator should raise its limits.",
                reason="gateway_exhausted",
                retry_after_s=2.0,
            )
        case "not_served" | "connect":
            why = "No engine that could serve this request accepts connections."
            if fault.kind == "not_served":
                why = f"No engine serves this model at present.{detail}"
            return Unavailable(why, reason="no_worker_ready", retry_after_s=2.0)
        case "timeout":
            return UpstreamTimeout("The engine did not answer in time.", reason="engine_timeout")
        case "server_error":
            why = f"The engine failed ({fault.message}).{detail}"
            return UpstreamBroken(why, reason="engine_error")
        case _:
            why = f"The engine's answer broke off before it began: {fault.message}."
            return UpstreamBroken(why, reason="engine_connection_broken")
