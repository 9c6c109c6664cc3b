"""Engines' refusals: context overflow (rescue it), busy (try elsewhere), and what a client is told.

An overflow is a 400, 413 or 422 (or a first event) that has an engine's code for it, or whose
message is about length: it begins with what is too long (prompt, input, tokens, context ...), says
that a bound is exceeded, and the bound is a context window by name, or a number that can be the
window of this pool. No sentence is known by heart: engines reword them with every version.

Engines echo what clients send. So quoted text does not count, nor what follows a colon, and the
numbers must be possible for the request. Busy is a 503 from a live engine with a full queue.
"""

import re
from typing import Any, Final

import orjson

from gateway.errors import Refusal, Unavailable
from gateway.records.request import BodyFacts
from gateway.routing.retry import MEMORY_S, Fault, Harm

_CODES: Final = frozenset({"context_length_exceeded", "exceed_context_size_error"})
_QUOTED: Final = re.compile(r"""(?<!\w)(['"])(?!\w{1,40}\1).*""", re.DOTALL)
_SUBJECT: Final = re.compile(
    r"\W*(?:\w+ ){0,4}?(?:prompt|inputs?|context|tokens?|request(?:ed)?|messages|model's"
    r"|max_\w*tokens|you passed)\b",
    re.IGNORECASE,
)
_EXCEEDS: Final = re.compile(
    r"exceed|too (?:long|large)|(?:longer|greater|larger|more) than|at most|maximum|is only"
    r"|must (?:be|have) (?:<|less)|[<>]",
    re.IGNORECASE,
)
_LENGTH: Final = re.compile(r"\btokens?\b|\blength\b", re.IGNORECASE)
_WINDOW: Final = re.compile(
    r"(?:context[ _](?:length|window|size|limit)|max(?:imum)?[ _]model[ _]len(?:gth)?"
    r"|max(?:imum)?[ _]seq(?:uence)?[ _]len(?:gth)?)(?:\D{0,60}?(\d{1,9}))?",
    re.IGNORECASE,
)
_NOT_PROMPT: Final = re.compile(
    r"\b(?:images?|videos?|audio|vocab\w*|bytes|seconds|batch|\w*logprobs?|array|string)\b",
    re.IGNORECASE,
)
"""Of these engines bound a number or size, too."""
_NUMBER: Final = re.compile(r"(?<![\w.])\d{1,9}\b(?!\.\d)")
_PROMPT: Final = re.compile(
    r"(\d{1,9}) (?:in the messages|in the prompt|input tokens|tokens from the input)"
    r"|(?:input|prompt)(?: length)?(?: of| \(|[ =:]){1,2}(?:length )?(\d{1,9})",
    re.IGNORECASE,
)
DROPPED: Final = b"x-llm-d-request-dropped-reason"
"""Header of an llm-d router's 429 or 503: its flow control refused or evicted the request, or no
engine was ready. The router itself is well."""
_NO_MODEL: Final = re.compile(
    r"The model [`'\"].{1,300}[`'\"] (?:does not exist|was not found)", re.DOTALL
)
_BUSY: Final = re.compile(rb"busy|backlog|try again|overloaded|queue is full", re.IGNORECASE)
_NO_PRIORITY: Final = re.compile(
    r"Got priority -?\d+ but Priority scheduling is not enabled"  # vLLM
    r"|Using priority is disabled for this server"  # SGLang, with --abort-on-priority-when-disabled
)
_LOOK_BYTES: Final = 4096
_MAX_ERROR_BYTES: Final = 64 * 1024
"""Engines' refusals are shorter; a longer body is not read as one."""
_MAX_MESSAGE: Final = 500
_ROOM_TOKENS: Final = 4096
"""Allowance for the chat template's tokens, which are not in the request's bytes."""
_MAX_TOKENS_A_BYTE: Final = 2
_UNKNOWN: Final = 1 << 40


def max_prompt_tokens(facts: BodyFacts, body_bytes: int) -> int:
    """Upper bound of the prompt tokens of a request of `body_bytes`, for any tokenizer."""
    if facts.measure.media_parts or facts.previous_response_id is not None:
        return _UNKNOWN  # media and earlier turns are not in the body and may be long
    return body_bytes * _MAX_TOKENS_A_BYTE + _ROOM_TOKENS


def overflow_of(status: int, body: bytes, facts: BodyFacts, size: int, window: int) -> Fault | None:
    """The fault of prompt + output beyond the engine's window; None if it refuses something else.

    `size`: bytes of the request; `window`: of the pool as configured.
    """
    if status not in (400, 413, 422):
        return None
    cap, most = facts.cap_tokens or 0, max_prompt_tokens(facts, size)
    message = _QUOTED.sub("", engine_message(body))
    error = _error(body) or {}
    coded = str(error.get("code")) in _CODES or str(error.get("type")) in _CODES
    bound = window if coded else _bound(message, window)
    if not 0 < bound <= most + cap:
        return None
    counted = _PROMPT.search(message)
    prompt = int(counted[1] or counted[2]) if counted and "characters" not in message else None
    fits = facts.cap_tokens is not None and (most if prompt is None else prompt) + cap < bound
    if fits or (prompt or 0) > most:
        return None
    return Fault(
        kind="overflow",
        message="context overflow",
        status=status,
        body=body,
        prompt_tokens=max(prompt or 0, bound + 1 - cap),
        window_tokens=bound,
    )


def _bound(message: str, window: int) -> int:
    """The window that a message says was exceeded; 0 if it is about something else."""
    if not (_SUBJECT.match(message) and _EXCEEDS.search(message)):
        return 0
    named = _WINDOW.search(message)
    if named and named[1]:
        return int(named[1])
    # A bound without its name may be a little below the window: of the engine's KV cache, say.
    numbers = [int(number) for number in _NUMBER.findall(message)]
    near = max((n for n in numbers if window // 2 < n <= window), default=0)
    if named:
        return near or window
    counts = len(numbers) > 1 and _LENGTH.search(message) and not _NOT_PROMPT.search(message)
    return near if counts else 0


def in_band_error(body: bytes) -> bytes:
    """The error in a body or events that came with status 200, as a body; b"" if there is none."""
    lines = body.splitlines() if body.startswith((b"data:", b"event:", b":")) else (body,)
    errors = (line.removeprefix(b"data:") for line in lines if b'"error"' in line)
    return next((line for line in errors if len(line) <= _MAX_ERROR_BYTES), b"")


def in_band_status(error: bytes) -> int:
    """The HTTP status in the `code` of an error that came with status 200; 500 if there is none."""
    code = (_error(error) or {}).get("code")
    return code if isinstance(code, int) and 400 <= code < 600 else 500


def is_busy(status: int, body: bytes, dropped: bytes = b"") -> bool:
    """Whether a 503 (or 429) means a full queue rather than a dead engine.

    `dropped`: why a router before the engines dropped the request, by its header DROPPED.
    """
    if status == 503:
        return bool(dropped) or _BUSY.search(body[:_LOOK_BYTES]) is not None
    return status == 429


def is_not_served(status: int, body: bytes) -> bool:
    """Whether a 404 means that the engine does not serve the model or adapter of the request."""
    return status == 404 and _NO_MODEL.match(engine_message(body)) is not None


def refuses_priority(status: int, body: bytes) -> bool:
    """Whether an engine refuses a request's priority because it does not schedule by it."""
    return status in (400, 503) and _NO_PRIORITY.match(engine_message(body)) is not None


def engine_message(body: bytes) -> str:
    """The message in an engine's error body of any shape, cut to a limit; "" if there is none."""
    error = _error(body)
    if error is None:
        return body.strip()[:_MAX_MESSAGE].decode("utf-8", "replace")
    return str(error.get("message") or error.get("detail") or "")[:_MAX_MESSAGE]


def suspected(harm: Harm, refusal: Refusal | None = None) -> Refusal:
    """The refusal of a body on which two engines failed: no client shall repeat it.

    `told`: what the client would be told of the last attempt, if it was made just now.
    """
    if refusal is None:
        refusal = Refusal("The request was not sent.", reason="engine_error")
        if harm == "ended":  # no other model's turn either
            refusal = Refusal("The request was not sent.", reason="engines_ended")
    what = "ended at" if harm == "ended" else "failed on"
    refusal.message += (
        f" Two engines {what} this very request, so no other gets it for {MEMORY_S:g} s: "
        "change it, or tell the operator of the engines."
    )
    refusal.should_retry = False
    return refusal


def engine_refusal(fault: Fault) -> Refusal:
    """The refusal to send for the last attempt's fault."""
    message = engine_message(fault.body)
    detail = f" It said: {message}" if message else ""
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
            return Refusal("The engine did not answer in time.", reason="engine_timeout")
        case "server_error" | "handover":
            why = f"The engine failed ({fault.message}).{detail}"
            return Refusal(why, reason="engine_error")
        case _:
            why = f"The engine's answer broke off before it began: {fault.message}."
            return Refusal(why, reason="engine_connection_broken")


def has_error_shape(body: bytes, *, anthropic: bool) -> bool:
    """Whether an engine's error body already has the shape that clients of the dialect expect."""
    decoded = _decoded(body)
    shaped = isinstance(decoded, dict) and isinstance(decoded.get("error"), dict)
    return shaped and (not anthropic or decoded.get("type") == "error")


def _error(body: bytes) -> dict[str, Any] | None:
    """The error in a body of any shape; None if it is no JSON."""
    decoded = _decoded(body)
    if decoded is None:
        return None
    error = decoded.get("error", decoded) if isinstance(decoded, dict) else {}
    return error if isinstance(error, dict) else {"message": error}


def _decoded(body: bytes) -> Any:
    """What a refusal says; None if it is no JSON, nothing if it is too long for one."""
    try:
        return orjson.loads(body) if len(body) <= _MAX_ERROR_BYTES else {}
    except orjson.JSONDecodeError:
        return None
