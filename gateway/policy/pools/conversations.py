"""Conversations that engines hold: responses they stored, prompts they were sent unchanged.

Stored responses: a `previous_response_id` goes back to the worker that has it, is its own tenant's
only, and counts what it continues. A forgotten one is bound like any request.

Prompts: a turn's messages are the beginning of the next turn's. The gateway keeps digests of whole
prompts; the next turn has a point where this one ended (`gateway.policy.prefix.digests`), so it is
asked for at its points and nothing is compared.
"""

from collections.abc import Callable
from typing import Final, NamedTuple

from gateway.policy.scheduling.scheduler import Points

KEPT: Final = 20_000


class Conversations:
    """Prompts that engines were sent unchanged, of one model.

    Bounded: between half and all of `kept`, the longest unused go first.
    """

    __slots__ = ("_before", "_half", "_recent")

    def __init__(self, kept: int = KEPT) -> None:
        """At most `kept` (>= 2) prompts."""
        self._half = kept // 2
        self._recent: set[int] = set()
        self._before: set[int] = set()

    def __len__(self) -> int:
        return len(self._recent | self._before)

    def remember(self, tenant: str, points: Points) -> None:
        """Note a prompt that was served as it came, by its points."""
        if not points:
            return
        self._recent.add(hash((tenant, points[-1][1])))
        if len(self._recent) >= self._half:
            self._before, self._recent = self._recent, set()

    def continues(self, tenant: str, points: Points) -> bool:
        """Whether an earlier turn of this conversation, or the same, was served as it came."""
        keys = [hash((tenant, digest)) for _, digest in points]
        return not (self._recent.isdisjoint(keys) and self._before.isdisjoint(keys))


MAX_HOMES = 10_000


class Home(NamedTuple):
    """Of one response."""

    pool: int
    worker: int
    tenant: str = ""
    tokens: int = 0
    """Of its prompt and its answer: what the next turn begins with."""


class ResponseHomes:
    """response id -> Home, at most `MAX_HOMES`: the tenant with the most loses its oldest first."""

    __slots__ = ("_homes", "_of", "tell")

    def __init__(self) -> None:
        self._homes: dict[str, Home] = {}
        self._of: dict[str, dict[str, None]] = {}
        """Each tenant's ids, the oldest first."""
        self.tell: Callable[[str, Home], None] | None = None
        """Hears what was remembered, for replicas that serve the same clients."""

    def __len__(self) -> int:
        return len(self._homes)

    def remember(self, response_id: str, home: Home) -> None:
        """Note a response that an engine made. An id stays whose it was first."""
        self.learn(response_id, home)
        if self.tell is not None:
            self.tell(response_id, home)

    def learn(self, response_id: str, home: Home) -> None:
        """The same, from another replica."""
        known = self._homes.get(response_id)
        if known is not None and known.tenant != home.tenant:
            return
        if known is not None:
            self._forget(response_id)
        elif len(self._homes) >= MAX_HOMES:
            most = max(self._of.values(), key=len)
            self._forget(next(iter(most)))
        self._homes[response_id] = home
        self._of.setdefault(home.tenant, {})[response_id] = None

    def find(self, response_id: str | None) -> Home | None:
        """The response's home, if it is still known."""
        return None if response_id is None else self._homes.get(response_id)

    def _forget(self, response_id: str) -> None:
        tenant = self._homes.pop(response_id).tenant
        held = self._of[tenant]
        del held[response_id]
        if not held:
            del self._of[tenant]
