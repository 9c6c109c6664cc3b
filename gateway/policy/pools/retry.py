"""What to do after a failed attempt, as long as no byte has reached the client.

- Nothing was sent (connect), or the engine broke, timed out or answered 5xx before its first
  byte: another worker, then an alternate pool. Generation has no side effects, so sending
  it again is safe; a response the client asked to be stored and run in the background is
  the exception.
- The gateway's own machine has no open file or port left (local): no other worker can be
  reached either, and none of them is to blame.
- The engine is frozen: another worker, once, whatever was tried before.
- A live engine that is busy: another worker, no health penalty.
- A context overflow: the original body goes to the next larger window (overflow rescue).
- Anything else is the engine's answer and belongs to the client.
"""

from typing import Literal

from gateway.records.record import Record

FaultKind = Literal[
    "local",
    "connect",
    "frozen",
    "reset",
    "timeout",
    "protocol",
    "server_error",
    "busy",
    "overflow",
    "empty",
]


class Fault(Record, frozen=True, kw_only=True):
    """An attempt that failed before the client saw a byte."""

    kind: FaultKind
    message: str
    status: int = 0
    """The engine's own status; 0 when there was none."""
    content_type: bytes = b"application/json"
    body: bytes = b""
    """The engine's own error body, relayed when nothing else is left to try."""


Step = Literal["retry", "rescue", "give_up"]


def next_step(
    fault: Fault, *, sent: int, max_attempts: int, repeatable: bool, larger_pool: bool
) -> Step:
    """Decide after a fault.

    `sent`: attempts that reached an engine so far (refused connections are free);
    `repeatable`: sending the request twice is safe; `larger_pool`: a larger window exists.
    """
    if fault.kind in ("overflow", "empty"):
        return "rescue" if larger_pool and repeatable else "give_up"
    if fault.kind == "local":
        return "give_up"
    if fault.kind in ("connect", "frozen"):
        return "retry"
    if not repeatable and fault.kind != "busy":
        return "give_up"
    return "retry" if sent < max_attempts else "give_up"


def hurts_health(fault: Fault) -> bool:
    """Whether the fault counts towards the worker's ejection."""
    return fault.kind in ("reset", "timeout", "protocol", "server_error")
