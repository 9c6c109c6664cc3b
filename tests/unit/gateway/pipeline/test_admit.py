"""What a tenant taught decides what its requests are expected to use, not what budgets reserve."""

import asyncio

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.admission.denials import refusal_of
from gateway.admission.terms import AdmissionRequest, Denial, DenialReason
from gateway.errors import Refusal
from gateway.pipeline import plan as estimating
from gateway.pipeline.plan import admit
from gateway.records.endpoint import CHAT, TOKENIZE, Endpoint
from gateway.records.estimate import Plan
from gateway.records.lease import Lease
from gateway.records.limit import Limit
from gateway.records.request import Principal, RequestHead
from gateway.records.usage import cost_nano, token_price
from simulator.mock_server import tokenizer
from tests.builders import chat_body, observation, served_model
from tests.fakes import FakeStore

PRICE = token_price(0.6, 1.8, None)
MONEY = Limit(id="t:money", scope="tenant", name="t", unit="money", amount=10**12, window="month")
OWNER = Principal(entitlement="e", tenant="t", limits=(MONEY,))
WINDOW = 65_536
"""The largest of the model."""


class Asked(FakeStore):
    """Notes what it is asked."""

    async def admit(self, ask: AdmissionRequest) -> Lease:
        """See LeaseStore."""
        self.ask = ask
        return await super().admit(ask)


async def asked(
    text: str, max_tokens: int | None, taught: list[tuple[int, int]]
) -> AdmissionRequest:
    """What is asked for a chat after a tenant's requests used so many tokens."""
    served, store = served_model(), Asked()
    served.price = PRICE
    body = {"model": "m", "messages": [{"role": "user", "content": text}], "n": 2}
    raw = orjson.dumps(body if max_tokens is None else {**body, "max_tokens": max_tokens})
    facts = estimating.read(CHAT, raw, RequestHead())
    for prompt_tokens, completion_tokens in taught:
        found = observation(facts.measure, prompt_tokens, completion_tokens=completion_tokens)
        served.estimator.learn(found)
    lengths = estimating.estimate(served, CHAT, facts, OWNER)
    await admit(store, served, OWNER, "l", lengths, Plan(pool=0, alternates=(), reason="test"))
    return store.ask


@given(
    text=st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=400),
    max_tokens=st.none() | st.integers(1, 2 * WINDOW),
    taught=st.lists(st.tuples(st.integers(1, 400), st.integers(1, 5_000)), max_size=60),
)
def test_budgets_reserve_what_no_request_can_pass(
    text: str, max_tokens: int | None, taught: list[tuple[int, int]]
) -> None:
    ask = asyncio.run(asked(text, max_tokens, taught))
    untaught = asyncio.run(asked(text, max_tokens, []))
    assert (ask.most_tokens, ask.most_money) == (untaught.most_tokens, untaught.most_money)
    prompt_tokens = tokenizer.count(text) + 8
    answer_tokens = 2 * min(max_tokens or WINDOW, WINDOW - prompt_tokens)
    assert ask.most_tokens >= prompt_tokens + answer_tokens
    assert ask.most_money >= cost_nano(PRICE, prompt_tokens, answer_tokens)


@pytest.mark.parametrize(
    ("by_hour", "endpoint", "money"), [(True, CHAT, 1), (True, TOKENIZE, 0), (False, CHAT, 0)]
)
async def test_what_costs_nothing_asks_for_nothing(
    by_hour: bool, endpoint: Endpoint, money: int
) -> None:
    served, store = served_model(), Asked()
    served.by_hour = by_hour
    facts = estimating.read(endpoint, chat_body(), RequestHead())
    lengths = estimating.estimate(served, endpoint, facts, OWNER)
    await admit(store, served, OWNER, "l", lengths, Plan(pool=0, alternates=(), reason="test"))
    assert (store.ask.money, store.ask.most_money) == (money, 0)
    assert (store.ask.estimate_tokens > 0, store.ask.most_tokens > 0) == (endpoint is CHAT,) * 2


@pytest.mark.parametrize(
    ("reason", "of_cluster", "told"),
    [
        ("entitlement_suspended", True, (503, "entitlement_pending")),
        ("entitlement_unknown", True, (503, "entitlement_pending")),
        ("entitlement_expired", True, (403, "entitlement_expired")),
        ("entitlement_suspended", False, (403, "entitlement_suspended")),
        ("entitlement_unknown", False, (403, "entitlement_unknown")),
    ],
)
async def test_what_the_store_heard_of_a_cluster_first_is_asked_again(
    reason: DenialReason, told: tuple[int, str], *, of_cluster: bool
) -> None:
    """Clients repeat a 503, and then the gateway knows why; a 403 is final for them."""

    class Refusing(FakeStore):
        async def admit(self, ask: AdmissionRequest) -> Lease:
            raise refusal_of(Denial(reason=reason), ask.entitlement, 0.0)

    served, plan = served_model(), Plan(pool=0, alternates=(), reason="test")
    facts = estimating.read(CHAT, chat_body(), RequestHead())
    lengths = estimating.estimate(served, CHAT, facts, OWNER)
    who = Principal(entitlement="e", tenant="t", of_cluster=of_cluster)
    with pytest.raises(Refusal) as caught:
        await admit(Refusing(), served, who, "l", lengths, plan)
    assert (caught.value.status, caught.value.reason) == told
