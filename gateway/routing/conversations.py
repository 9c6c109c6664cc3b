"""Conversations whose state engines hold: stored responses, and prompts sent unchanged.

Response affinity: a request with a `previous_response_id` goes to the worker that stored that
response, and the response's tokens count as prompt. Only its own tenant may continue it. If the
gateway forgot the response, the request is bound like any other.

Prompts: each turn's messages begin with the previous turn's. The gateway keeps digests of whole
prompts. The next turn has a point where the previous one ended
(`gateway.scheduling.prefix_digests`), so looking up its points finds the conversation without
comparing texts.
"""

from collections.abc import Callable, Collection
from typing import Final, NamedTuple

from gateway.scheduling.scheduler import Points

RETAINED: Final = 20_000


class Conversations:
    """Prompts of one model that were sent to engines unchanged.

    Memory is bounded: the latest `kept` / 2 to `kept` prompts are remembered.
    """

    __slots__ = ("_before", "_half", "_recent")

    def __init__(self, kept: int = RETAINED) -> None:
        """At most `kept` (>= 2) prompts."""
        self._half = kept // 2
        self._recent: set[int] = set()
        self._before: set[int] = set()

    def __len__(self) -> int:
        return len(self._recent | self._before)

    def remember(self, tenant: str, points: Points) -> None:
        """Note a prompt that was served unchanged, by its points."""
        if not points:
            return
        self._recent.add(hash((tenant, points[-1][1])))
        if len(self._recent) >= self._half:
            self._before, self._recent = self._recent, set()

    def continues(self, tenant: str, points: Points) -> bool:
        """Whether this prompt or an earlier turn of its conversation was served unchanged."""
        keys = [hash((tenant, digest)) for _, digest in points]
        return not (self._recent.isdisjoint(keys) and self._before.isdisjoint(keys))


MAX_RESPONSES = 10_000


class ResponseLocation(NamedTuple):
    """Where one stored response is, and whose it is."""

    pool: str
    worker: int
    tenant: str = ""
    tokens: int = 0
    """Tokens of its prompt and answer, with which the next turn begins."""


class ResponseAffinity:
    """Response affinity: response id -> ResponseLocation, at most `MAX_RESPONSES`.

    When full, the tenant with the most responses loses its oldest one.
    """

    __slots__ = ("_locations", "_of", "on_remember")

    def __init__(self) -> None:
        self._locations: dict[str, ResponseLocation] = {}
        self._of: dict[str, dict[str, None]] = {}
        """Each tenant's ids, the oldest first."""
        self.on_remember: Callable[[str, ResponseLocation], None] | None = None
        """Called with each remembered response, to publish it to other replicas."""

    def __len__(self) -> int:
        return len(self._locations)

    def remember(self, response_id: str, location: ResponseLocation) -> None:
        """Note a response that an engine made. An id stays with its first tenant."""
        self.learn(response_id, location)
        if self.on_remember is not None:
            self.on_remember(response_id, location)

    def learn(self, response_id: str, location: ResponseLocation) -> None:
        """Note a response that another replica published."""
        known = self._locations.get(response_id)
        if known is not None and known.tenant != location.tenant:
            return
        if known is not None:
            self._forget(response_id)
        elif len(self._locations) >= MAX_RESPONSES:
            most = max(self._of.values(), key=len)
            self._forget(next(iter(most)))
        self._locations[response_id] = location
        self._of.setdefault(location.tenant, {})[response_id] = None

    def find(self, response_id: str | None) -> ResponseLocation | None:
        """Where the response is; None if unknown."""
        return None if response_id is None else self._locations.get(response_id)

    def left(self, pool: str, workers: Collection[int]) -> None:
        """Forget what workers store: their engines are gone. Takes one pass over all responses."""
        gone = [
            response_id
            for response_id, location in self._locations.items()
            if location.pool == pool and location.worker in workers
        ]
        for response_id in gone:
            self._forget(response_id)

    def _forget(self, response_id: str) -> None:
        tenant = self._locations.pop(response_id).tenant
        held = self._of[tenant]
        del held[response_id]
        if not held:
            del self._of[tenant]
