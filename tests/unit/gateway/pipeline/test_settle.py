"""Settling: what budgets in money count of a request, by tokens or by the hour."""

import pytest

from gateway.fleet.model_runtime import ModelRuntime
from gateway.pipeline.settle import settle
from gateway.records.attempt import Outcome, Usage
from gateway.records.lease import Lease
from gateway.records.limit import Limit
from gateway.records.usage import token_price
from tests.builders import changed, length_estimate, served_model
from tests.fakes import FakeStore

FREE = served_model()
PRICED = changed(FREE, price=token_price(0.60, 1.80, None))
BY_HOUR = changed(FREE, by_hour=True)
MONEY = Limit(id="b", scope="tenant", name="t", unit="money", amount=10**9, window="month")
TOKENS = Limit(id="b", scope="tenant", name="t", unit="tokens", amount=10**9, window="month")
USED = Usage(prompt_tokens=10, completion_tokens=3, source="engine")


@pytest.mark.parametrize(
    ("served", "cost_nano"), [(PRICED, 10 * 600 + 3 * 1800), (BY_HOUR, 77_000), (FREE, None)]
)
@pytest.mark.parametrize("limit", [MONEY, TOKENS, None])
def test_a_budget_in_money_counts_the_cost_that_the_record_has(
    served: ModelRuntime, cost_nano: int | None, limit: Limit | None
) -> None:
    store = FakeStore()
    lease = Lease(
        id="l",
        model="m",
        entitlement="e",
        pool=0,
        spilled=False,
        cost_tokens=13,
        sequences=1,
        asked=() if limit is None else (limit,),
    )
    store.leases["l"] = lease
    outcome = Outcome(label="ok", status=200, usage=USED, completed=True)
    found = settle(
        store, lease, outcome, length_estimate(), served, dispatched=True, slot_nano=77_000.4
    )
    assert found == (USED, cost_nano, None)
    ((_, settlement),) = store.settlements
    assert settlement.money == (cost_nano or 0 if limit is MONEY else 0)
