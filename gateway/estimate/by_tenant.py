"""One learner per tenant, and the median of the tenants' learners for new tenants.

Rules:
- A tenant's requests teach only that tenant's learner. After TAUGHT observations this learner
  alone estimates the tenant's requests: no other tenant influences them.
- A newer tenant gets the median over the recently taught tenants with TAUGHT observations each,
  at most VOTERS of them. A single tenant, whatever it sends, can move the median no further
  than to another tenant's neighbouring figure.
- With fewer than AGREEING such tenants a single one could set the median. Then a new tenant
  gets its own learner's figures so far, or the configured start.
- Memory is bounded: the MAX_TENANTS most recently taught tenants are kept.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Final, Generic, Protocol, TypeVar

TAUGHT: Final = 20
"""Observations after which a tenant's own learner is used."""
AGREEING: Final = 3
"""Tenants that a median needs: the third cannot move it out of the range of the other two."""
VOTERS: Final = 64
"""Most tenants that a median is taken over."""
MAX_TENANTS: Final = 1024
_EVERY: Final = 16
"""Observations between two computations of the median."""


class TenantLearner(Protocol):
    """A learner of one tenant."""

    @property
    def observations(self) -> int:
        """How many observations taught it."""


P = TypeVar("P", bound=TenantLearner)


class ByTenant(Generic[P]):
    """The learners of one figure, by tenant."""

    __slots__ = ("_agree", "_agreed", "_common", "_found", "_held", "_lessons", "_make", "_start")

    def __init__(self, make: Callable[[], P], agree: Callable[[P, Sequence[P]], None]) -> None:
        """`make` gives a new learner; `agree` sets its first argument to the others' median."""
        self._make = make
        self._agree = agree
        self._start = make()
        self._common = make()
        self._agreed = False
        self._lessons = 0
        self._found = 0
        """The number of lessons when the median was last computed."""
        self._held: dict[str, P] = {}
        """Tenant -> learner, the most recently taught last."""

    def of(self, tenant: str) -> P:
        """The learner that estimates a tenant's requests. Read-only: teach that of `taught`."""
        own = self._held.get(tenant)
        if own is not None and own.observations >= TAUGHT:
            return own
        agreed = self.agreed()
        if agreed is not None:
            return agreed
        return self._start if own is None else own

    def begun(self, tenant: str) -> P:
        """A tenant's own learner, however little it was taught; its lessons build on it."""
        return self._held.get(tenant, self._start)

    def own(self, tenant: str) -> P | None:
        """A tenant's own learner, if it was taught enough."""
        own = self._held.get(tenant)
        return own if own is not None and own.observations >= TAUGHT else None

    def agreed(self) -> P | None:
        """The median of the tenants' learners, if enough tenants were taught."""
        if self._lessons - self._found >= _EVERY:
            self._look()
        return self._common if self._agreed else None

    def taught(self, tenant: str) -> P:
        """A tenant's learner, to be taught one observation; made if the tenant is new."""
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
        """A tenant's learner, to adopt sums from the store or from other replicas."""
        self._lessons += _EVERY
        return self.taught(tenant)

    def latest(self, count: int = VOTERS) -> Iterator[tuple[str, P]]:
        """At most `count` pairs (tenant, learner), the most recently taught first."""
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
    """The middle value; for an even number of values the mean of the two in the middle."""
    found = sorted(values)
    half = len(found) // 2
    return found[half] if len(found) % 2 else (found[half - 1] + found[half]) / 2
