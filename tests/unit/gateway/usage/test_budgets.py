"""The list of limits: by pages, in step with the keys that come and go, and raised at run time."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from gateway.errors import NotFound, Unavailable
from gateway.metrics import Metrics
from gateway.records.limit import Budget, KeyLimits, Limit, LimitView, budget_limits, key_limits
from gateway.store.memory_leases import MemoryLeases
from gateway.store.redis.link import RedisAway
from gateway.usage.budgets import BudgetService
from tests.fakes import FakeClock

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


def service() -> BudgetService:
    store = MemoryLeases({}, FakeClock(1_900_000_000.0))
    return BudgetService(store, Metrics(), lambda *_: None)


async def ids(of: BudgetService, limit: int = 9) -> list[str]:
    """Every id, by pages of so many."""
    found: list[str] = []
    after: Any = None
    while True:
        page: Any = await of.page(after, limit)
        found += [each["id"] for each in page["data"]]
        after = page["next"]
        if after is None:
            return found


async def test_limits_of_keys_come_and_go_with_their_tenant() -> None:
    made = service()
    made.replace("", budget_limits("tenant", "b", [Budget(tokens=5)], ""))
    for tenant in ("b", "a"):
        stated = KeyLimits(requests_per_minute=3, max_concurrency=2)
        made.replace(tenant, key_limits(tenant, "web", stated, ""))
    everything = [
        *("key:a/web:requests:minute", "key:a/web:sequences"),
        *("key:b/web:requests:minute", "key:b/web:sequences", "tenant:b:tokens:month"),
    ]
    assert await ids(made) == await ids(made, limit=2) == everything
    made.replace("a", key_limits("a", "web", KeyLimits(max_concurrency=2), ""))
    made.replace("b", ())
    assert await ids(made) == ["key:a/web:sequences", "tenant:b:tokens:month"]
    made.replace("", ())
    with pytest.raises(NotFound):
        await made.add("tenant:b:tokens:month", 5, "me")


async def test_a_key_s_budget_is_raised() -> None:
    made = service()
    made.replace("a", key_limits("a", "web", KeyLimits(budgets=(Budget(money=2.5),)), "EUR"))
    shown = await made.add("key:a/web:money:month", 1.5, "me")
    assert (shown["unit"], shown["amount"], shown["added"]) == ("EUR", "2.50", "1.50")


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
