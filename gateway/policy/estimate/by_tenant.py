"""What is learned of each tenant apart, and what most tenants agree on.

Rules:
- A tenant teaches its own learner and nobody else's. From TAUGHT observations on its requests
  are estimated by that one alone: no other tenant has any influence on them.
- Before that, a tenant gets the median over those that were taught lately, at most VOTERS, with
  TAUGHT observations each. One tenant among them, whatever and however much it sends, moves the
  median no further than to the next figure of another tenant.
- With fewer than AGREEING such tenants there is no median that one of them could not set. Then
  a tenant gets what it taught itself so far, or the configured start.
- Memory is bounded: the MAX_TENANTS most recently taught are kept.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Final, Generic, Protocol, TypeVar

TAUGHT: Final = 20
"""Observations from which on a tenant's own learner is believed."""
AGREEING: Final = 3
"""Tenants that a median needs: with two honest ones the third cannot leave their range."""
VOTERS: Final = 64
"""Tenants that a median is taken over at most."""
MAX_TENANTS: Final = 1024
_EVERY: Final = 16
"""Observations between two looks at what tenants agree on."""


class Taught(Protocol):
    """A learner of one tenant."""

    @property
    def observations(self) -> int:
        """How many it was taught."""


P = TypeVar("P", bound=Taught)


class ByTenant(Generic[P]):
    """One figure's learners, by tenant."""

    __slots__ = ("_agree", "_agreed", "_common", "_found", "_held", "_lessons", "_make", "_start")

    def __init__(self, make: Callable[[], P], agree: Callable[[P, Sequence[P]], None]) -> None:
        """`make` gives a new learner; `agree` sets the first one to what the others agree on."""
        self._make = make
        self._agree = agree
        self._start = make()
        self._common = make()
        self._agreed = False
        self._lessons = 0
        self._found = 0
        """Lessons when it was last looked at what tenants agree on."""
        self._held: dict[str, P] = {}
        """The last taught last."""

    def of(self, tenant: str) -> P:
        """What to estimate a tenant's requests by; not to be taught."""
        own = self._held.get(tenant)
        if own is not None and own.observations >= TAUGHT:
            return own
        agreed = self.agreed()
        if agreed is not None:
            return agreed
        return self._start if own is None else own

    def begun(self, tenant: str) -> P:
        """A tenant's own learner however little it was taught: what its lessons build on."""
        return self._held.get(tenant, self._start)

    def own(self, tenant: str) -> P | None:
        """A tenant's own learner, if it was taught enough."""
        own = self._held.get(tenant)
        return own if own is not None and own.observations >= TAUGHT else None

    def agreed(self) -> P | None:
        """What most tenants agree on, if enough of them were taught."""
        if self._lessons - self._found >= _EVERY:
            self._look()
        return self._common if self._agreed else None

    def taught(self, tenant: str) -> P:
        """The learner of a tenant that is about to be taught, made when it is new."""
        self._lessons += 1
        held = self._held
        found = held.pop(tenant, None)
        if found is None:
            found = self._make()
            if len(held) >= MAX_TENANTS:
                del held[next(iter(held))]
        held[tenant] = found
        return found

    def part(self, tenant: str) -> P:
        """The same for a learner that goes on from what was kept, or what replicas told."""
        self._lessons += _EVERY
        return self.taught(tenant)

    def latest(self, count: int = VOTERS) -> Iterator[tuple[str, P]]:
        """(tenant, learner), the last taught first."""
        return islice(reversed(self._held.items()), count)

    def __len__(self) -> int:
        return len(self._held)

    def _look(self) -> None:
        self._found = self._lessons
        voters = [own for _, own in self.latest() if own.observations >= TAUGHT]
        self._agreed = len(voters) >= AGREEING
        if self._agreed:
            self._agree(self._common, voters)


def median(values: Sequence[float]) -> float:
    """The middle one; of an even number the mean of the two in the middle."""
    found = sorted(values)
    half = len(found) // 2
    return found[half] if len(found) % 2 else (found[half - 1] + found[half]) / 2
