"""Decide the next step after a failed attempt, as long as no byte has reached the client.

- Nothing was sent (connect), or the engine broke, timed out or answered 5xx before its first
  byte: try another worker, then an alternate pool, except for a response that the client asked
  to store and to run in the background.
- The gateway's own machine has no open file or port left (local): give up. No other worker
  can be reached either, and no worker is to blame.
- The engine is frozen: try another worker once, regardless of earlier attempts.
- A live engine is busy: try another worker, without a health penalty.
- The engine does not serve the model, or the LoRA adapter, (any more): try another worker.
- Two different engines failed on the same body: give up, for the request may be what ends them.
- The hand-over between two phases failed: again, by a new one or without.
- A context overflow: send the original body to the next larger window (overflow rescue).
- Any other answer is relayed to the client.

A request may end the engine that runs it (a query of death), or meet a defect that every engine
answers with a 500. The gateway's retries and then its client's would take it to one engine after
the other, so a body that two different engines failed on is sent no more.

An engine that dies for another reason fails on all bodies that it has. That is one engine: they
are tried elsewhere, and who is served there is free of suspicion. Only who meets a second failing
engine is taken for guilty without being so, so nothing is remembered for longer than MEMORY_S. The
memory is one process's own.
"""

from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from gateway.records.attempt import Outcome

MEMORY_S: Final = 60.0
"""From the last failure on a body."""
MOST_BODIES: Final = 1024
"""The oldest are forgotten first."""
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
    "handover",
]


@dataclass(frozen=True, kw_only=True)
class Fault:
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
    at_prefill: bool = False
    """In the first of two phases: the decode worker, if one is bound, is not to blame."""

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
    if fault.kind in ("connect", "frozen", "not_served", "handover"):
        return "retry"
    if not repeatable and fault.kind != "busy":
        return "give_up"
    return "retry" if sent < max_attempts else "give_up"


Harm = Literal["", "failed", "ended"]
"""What came of an attempt at its engine: nothing bad; an error or silence; it seems to be gone."""


def harm_of(answer: Outcome | Fault) -> Harm:
    """What came of an attempt at its engine, as far as the gateway sees."""
    if isinstance(answer, Outcome):
        if answer.label != "upstream_error":
            return ""
        return "ended" if answer.status == 502 else "failed"
    if answer.kind in ("reset", "frozen"):
        return "ended"
    refused = answer.kind == "server_error" and answer.status < 500  # the worker's key
    return "failed" if answer.hurts_health and not refused else ""


class _Suspect(NamedTuple):
    engines: frozenset[str]
    harm: Harm
    noted_s: float


class Suspects:
    """Bodies that engines failed on lately, by tenant. A body is known by its length and hash."""

    def __init__(self) -> None:
        self._suspects: dict[tuple[str, int, int], _Suspect] = {}
        """In the order of their last failures."""
        self.sizes: set[tuple[str, int]] = set()
        """Tenants and lengths. A body of any other is unknown; nearly none needs a hash."""

    def verdict(self, tenant: str, body: bytes, now_s: float) -> Harm:
        """What two engines came to on this body; "" if it may be sent."""
        self._forget(now_s)
        suspect = self._suspects.get((tenant, len(body), hash(body)))
        return "" if suspect is None or len(suspect.engines) < 2 else suspect.harm

    def served(self, tenant: str, body: bytes) -> None:
        """Note that an engine served a body: it was not the body's doing."""
        self._suspects.pop((tenant, len(body), hash(body)), None)

    def note(self, tenant: str, body: bytes, engine: str, harm: Harm, now_s: float) -> Harm:
        """Note that an engine (by its URL) failed on a body; the verdict on it."""
        self._forget(now_s)
        key = (tenant, len(body), hash(body))
        engines = frozenset((engine,))
        if (suspect := self._suspects.pop(key, None)) is not None:
            engines |= suspect.engines
            harm = "ended" if suspect.harm == "ended" else harm
        self._suspects[key] = _Suspect(engines, harm, now_s)
        self.sizes.add(key[:2])
        return harm if len(engines) > 1 else ""

    def _forget(self, now_s: float) -> None:
        """Forget what is old, and the oldest where the next one would be too many."""
        old = [key for key, suspect in self._suspects.items() if now_s - suspect.noted_s > MEMORY_S]
        for key in old or list(self._suspects)[: 1 - MOST_BODIES]:
            del self._suspects[key]
        self.sizes = {(tenant, size) for tenant, size, _ in self._suspects}
