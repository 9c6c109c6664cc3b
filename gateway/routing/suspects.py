"""Requests on which engines fail: two that failed on one body speak against the body.

A request may end the engine that runs it (a query of death), or meet a defect that every engine
answers with a 500. The gateway's retries and then its client's would take it to one engine after
the other, so a body that two different engines failed on is sent no more.

An engine that dies for another reason fails on all bodies that it has. That is one engine: they
are tried elsewhere, and who is served there is free of suspicion. Only who meets a second failing
engine is taken for guilty without being so, so nothing is remembered for longer than MEMORY_S. The
memory is one process's own.
"""

from typing import Final, Literal, NamedTuple

from gateway.records.attempt import Outcome
from gateway.routing.retry import Fault

MEMORY_S: Final = 60.0
"""From the last failure on a body."""
MOST_BODIES: Final = 1024
"""The oldest are forgotten first."""

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

    __slots__ = ("_known", "sizes")

    def __init__(self) -> None:
        self._known: dict[tuple[str, int, int], _Suspect] = {}
        """In the order of their last failures."""
        self.sizes: set[tuple[str, int]] = set()
        """Tenants and lengths. A body of any other is unknown; nearly none needs a hash."""

    def verdict(self, tenant: str, body: bytes, now_s: float) -> Harm:
        """What two engines came to on this body; "" if it may be sent."""
        self._forget(now_s)
        known = self._known.get((tenant, len(body), hash(body)))
        return "" if known is None or len(known.engines) < 2 else known.harm

    def served(self, tenant: str, body: bytes) -> None:
        """Note that an engine served a body: it was not the body's doing."""
        self._known.pop((tenant, len(body), hash(body)), None)

    def note(self, tenant: str, body: bytes, engine: str, harm: Harm, now_s: float) -> Harm:
        """Note that an engine (by its URL) failed on a body; the verdict on it."""
        self._forget(now_s)
        key = (tenant, len(body), hash(body))
        engines = frozenset((engine,))
        if (known := self._known.pop(key, None)) is not None:
            engines |= known.engines
            harm = "ended" if known.harm == "ended" else harm
        self._known[key] = _Suspect(engines, harm, now_s)
        self.sizes.add(key[:2])
        return harm if len(engines) > 1 else ""

    def _forget(self, now_s: float) -> None:
        """Forget what is old, and the oldest where the next one would be too many."""
        old = [key for key, found in self._known.items() if now_s - found.noted_s > MEMORY_S]
        for key in old or list(self._known)[: 1 - MOST_BODIES]:
            del self._known[key]
        self.sizes = {(tenant, size) for tenant, size, _ in self._known}
