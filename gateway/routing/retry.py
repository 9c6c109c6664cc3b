"""Decide the next step after a failed attempt, as long as no byte has reached the client.

- Nothing was sent (connect), or the engine broke, timed out or answered 5xx before its first
  byte: try another worker, then an alternate pool, except for a response that the client asked
  to store and to run in the background.
- The gateway's own machine has no open file or port left (local): give up. No other worker
  can be reached either, and no worker is to blame.
- The engine is frozen: try another worker once, regardless of earlier attempts.
- A live engine is busy: try another worker, without a health penalty.
- The engine does not serve the model, or the LoRA adapter, (any more): try another worker.
- Two different engines failed on the same body (`gateway.routing.suspects`): give up, for
  the request may be what ends them.
- A context overflow: send the original body to the next larger window (overflow rescue).
- Any other answer is relayed to the client.
"""

from typing import Literal

from gateway.records.record import Record

_SAID_BYTES = 4096
"""Of an engine's error in which a cause is looked for."""
FaultKind = Literal[
    "local",
    "connect",
    "frozen",
    "reset",
    "timeout",
    "protocol",
    "server_error",
    "busy",
    "not_served",
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
    """The engine's own error body, relayed when no other attempt is left."""
    retry_after_s: float | None = None
    """When a busy engine wants to be asked again; None if it does not say."""
    prompt_tokens: int = 0
    """Of an overflow, as is `window_tokens`."""
    window_tokens: int = 0

    @property
    def result(self) -> str:
        """Its name in the log; without memory, an engine speaks against its pool's boundary."""
        if self.kind == "server_error" and b"out of memory" in self.body[:_SAID_BYTES].lower():
            return "out_of_memory"
        return self.kind

    @property
    def hurts_health(self) -> bool:
        """Whether it counts towards the worker's ejection."""
        return self.kind in ("reset", "timeout", "protocol", "server_error")


Step = Literal["retry", "rescue", "give_up"]


def next_step(
    fault: Fault,
    *,
    sent: int,
    max_attempts: int,
    repeatable: bool,
    larger_pool: bool,
    guilty: bool = False,
) -> Step:
    """Decide after a fault.

    `sent`: attempts that reached an engine so far (refused connections are free);
    `repeatable`: sending the request twice is safe; `larger_pool`: a larger window exists;
    `guilty`: two engines failed on it.
    """
    if guilty:
        return "give_up"
    if fault.kind in ("overflow", "empty"):
        return "rescue" if larger_pool and repeatable else "give_up"
    if fault.kind == "local":
        return "give_up"
    if fault.kind in ("connect", "frozen", "not_served"):
        return "retry"
    if not repeatable and fault.kind != "busy":
        return "give_up"
    return "retry" if sent < max_attempts else "give_up"
