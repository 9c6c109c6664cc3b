"""What one tenant does, or was once, takes nothing from another: on every store."""

import msgspec
import pytest

from gateway.domain import Ask, Lease, Usage
from gateway.policy.ledger import LEASE_TTL_S
from gateway.policy.pool_terms import Terms
from gateway.ports import Settlement
from tests.contract.test_token_pool_invariants import OPENERS, Opened, Opener, opener_on
from tests.token_pools import NOW_S, entitled

TERMS = Terms(slots=(2, 2), mean_slo_ms=1000.0, headroom=0)


@pytest.fixture(params=[*OPENERS, pytest.param("redis", marks=pytest.mark.redis)])
def opener(request: pytest.FixtureRequest) -> Opener:
    known = OPENERS.get(request.param)
    return known or opener_on(request.getfixturevalue("redis_server"))


async def take(opened: Opened, lease_id: str, entitlement: str, **more: int) -> Lease:
    return await opened.store.admit(asking(lease_id, entitlement, **more))


def asking(lease_id: str, entitlement: str, *, tokens: int = 100, sequences: int = 1) -> Ask:
    return Ask(
        lease_id=lease_id,
        model="m",
        entitlement=entitlement,
        pool=0,
        alternates=(),
        cost_tokens=tokens,
        sequences=sequences,
    )


def used(tokens: int) -> Settlement:
    return Settlement(
        usage=Usage(prompt_tokens=tokens, completion_tokens=0), dispatched=True, unix_s=NOW_S
    )


async def test_late_usage_of_a_removed_entitlement_is_not_its_namesake_s(opener: Opener) -> None:
    opened = await opener(TERMS, [entitled("e", created=1), entitled("f", created=2)])
    store = opened.store
    try:
        lease, other = await take(opened, "a", "e", tokens=5_000), await take(opened, "b", "f")
        opened.at(NOW_S + LEASE_TTL_S + 1)
        await store.tick()
        assert await store.remove("m", "e")
        await store.define(entitled("e", created=2))
        for late in (lease, other):
            store.settle(late, used(10))
        await opened.quiet()
        seen = await store.view("m", ["e", "f"])
        assert [(view.debited, view.refunded, view.used) for view in seen] == [
            (0, 0, 0),
            (100, 90, 10),
        ]
    finally:
        await opened.close()


async def test_who_came_to_reserve_its_place_does_not_give_way(opener: Opener) -> None:
    raised = entitled("p", "preemptible", created=1)
    opened = await opener(
        TERMS,
        [raised, entitled("q", "preemptible", created=2), entitled("g", "guaranteed", baseline=2)],
    )
    store, told = opened.store, list[str]()
    store.on_evict(told.append)
    try:
        for name in ("p", "q"):
            await take(opened, name, name)
        await store.define(
            msgspec.structs.replace(raised, service_class="dedicated", baseline=(1,))
        )
        for lease_id in ("g1", "g2"):
            await store.reclaim(await take(opened, lease_id, "g"))
            await opened.quiet()
        assert told == ["q"]
    finally:
        await opened.close()
