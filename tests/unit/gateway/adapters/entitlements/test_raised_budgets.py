"""What an administrator is told who raises a budget whose store does not answer."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from gateway.adapters.entitlements.budgets import BudgetService
from gateway.adapters.store.redis.link import RedisAway
from gateway.errors import Unavailable
from gateway.metrics import Metrics
from gateway.records.limit import Limit, LimitView

BUDGET = Limit(id="b", scope="tenant", name="t", unit="tokens", amount=10, window="day")


class Silent:
    """A store whose answers are lost."""

    def __init__(self, *, sent: bool) -> None:
        self.sent = sent

    def know(self, limits: Mapping[str, Limit]) -> None:
        """Follow these."""

    async def levels(self, limits: Sequence[Limit]) -> list[LimitView]:
        raise RedisAway("away", sent=self.sent)

    async def sweep(self, defined: Callable[[str], bool]) -> None:
        """Drop none."""

    async def add(self, limit: Limit, amount: int) -> LimitView:
        raise RedisAway("away", sent=self.sent)


@pytest.mark.parametrize("sent", [False, True])
async def test_a_raise_that_may_have_been_applied_is_not_to_be_repeated(*, sent: bool) -> None:
    noted: list[Any] = []
    service = BudgetService(Silent(sent=sent), Metrics(), lambda *said: noted.append(said))
    service.replace("t", [BUDGET])
    with pytest.raises(Unavailable) as caught:
        await service.add("b", 5, "root")
    assert caught.value.should_retry is not sent
    assert (caught.value.retry_after_s is None) == sent
    assert ("before you try again" in str(caught.value)) == sent
    uncertain: Any = ("root", "raise_budget", "b", {}, {"by": 5, "outcome": "uncertain"})
    assert noted == ([uncertain] if sent else [])
