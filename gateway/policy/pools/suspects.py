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

from gateway.policy.pools.retry import Fault, hurts_health
from gateway.records.attempt import Outcome

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
    if answer.kind == "server_error" and answer.status < 500:  # the worker's key was refused
        return ""
    return "failed" if hurts_health(answer) else ""


class _Suspect(NamedTuple):
    engines: frozenset[str]
    harm: Harm
    noted_s: float


class Suspects:
    """Bodies that engines failed on lately, by tenant. A body is known by its length and hash."""

    __slots__ = ("_known", "_sizes")

    def __init__(self) -> None:
        self._known: dict[tuple[str, int, int], _Suspect] = {}
        """In the order of their last failures."""
        self._sizes: set[tuple[str, int]] = set()
        """Tenants and lengths: nearly no request needs a hash."""

    def verdict(self, tenant: str, body: bytes, now_s: float) -> Harm:
        """What two engines came to on this body; "" if it may be sent."""
        size = len(body)
        if not self._sizes or (tenant, size) not in self._sizes:
            return ""
        known = self._known.get((tenant, size, hash(body)))
        if known is None or now_s - known.noted_s > MEMORY_S or len(known.engines) < 2:
            return ""
        return known.harm

    def served(self, tenant: str, body: bytes) -> None:
        """Note that an engine served a body: it was not the body's doing."""
        if self._sizes and (tenant, len(body)) in self._sizes:
            self._known.pop((tenant, len(body), hash(body)), None)

    def note(self, tenant: str, body: bytes, engine: str, harm: Harm, now_s: float) -> Harm:
        """Note that an engine (by its URL) failed on a body; the verdict on it."""
        key = (tenant, len(body), hash(body))
        known = self._known.pop(key, None)
        engines = frozenset((engine,))
        if known is not None and now_s - known.noted_s <= MEMORY_S:
            engines |= known.engines
            harm = "ended" if known.harm == "ended" else harm
        self._known[key] = _Suspect(engines, harm, now_s)
        old = [each for each, found in self._known.items() if now_s - found.noted_s > MEMORY_S]
        for each in old or list(self._known)[:-MOST_BODIES]:
            del self._known[each]
        self._sizes = {(owner, size) for owner, size, _ in self._known}
        return harm if len(engines) > 1 else ""
