"""What one tenant does, or was once, takes nothing from another: on every store."""

import asyncio
from collections.abc import Collection, Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.admission.terms import AdmissionRequest, Terms
from gateway.admission.token_pool import LEASE_TTL_S
from gateway.errors import RateLimited, Refusal
from gateway.ports import Settlement
from gateway.records.attempt import Usage
from gateway.records.lease import Lease
from tests.contract.test_token_pool_invariants import OPENERS, Opened, Opener, opener_on
from tests.histories import histories
from tests.token_pools import NOW_S, entitled

TERMS = Terms(slots=(2, 2), mean_slo_ms=1000.0, headroom=0)


@pytest.fixture(params=[*OPENERS, pytest.param("redis", marks=pytest.mark.redis)])
def opener(request: pytest.FixtureRequest) -> Opener:
    known = OPENERS.get(request.param)
    return known or opener_on(request.getfixturevalue("redis_server"))


async def take(opened: Opened, lease_id: str, entitlement: str, **more: int) -> Lease:
    return await opened.store.admit(asking(lease_id, entitlement, **more))


def asking(
    lease_id: str, entitlement: str, *, tokens: int = 100, sequences: int = 1
) -> AdmissionRequest:
    return AdmissionRequest(
        lease_id=lease_id,
        model="m",
        entitlement=entitlement,
        pool=0,
        alternates=(),
        estimate_tokens=tokens,
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


CROWDED = Terms(
    slots=(4, 3),
    kv_bytes=(4000, 4000),
    tokens_per_s=10.0,
    largest_tokens=300,
    mean_slo_ms=1000.0,
    headroom=1,
    spill_queue=1,
)
OTHERS = (
    entitled("d", "dedicated", baseline=(1, 0), limit=3, tokens_per_s=20.0, created=1),
    entitled("g", "guaranteed", baseline=(1, 1), limit=2, tokens_per_s=30.0, created=2),
    entitled("e", baseline=(1, 1), slo_ms=100, tokens_per_s=10.0, kv_bytes=3000, created=3),
    entitled("f", baseline=(1, 0), slo_ms=900, limit=4, created=4),
)
GREEDY = (
    entitled("x", "guaranteed", baseline=(1, 0), limit=1, tokens_per_s=5.0, created=9),
    entitled("x", "dedicated", baseline=(1, 0), limit=2, tokens_per_s=5.0, created=9),
    entitled("x", "spot", limit=3, kv_bytes=2000, created=9),
    entitled("x", "preemptible", created=9),
)
"""Of all classes but the one that is owed for its refusals: those weigh, within the class."""
ASKS = st.tuples(
    st.sampled_from(["d", "g", "e", "f", "x", "x", "x"]),
    st.sampled_from([0, 0, 1]),
    st.booleans(),
    st.sampled_from([1, 1, 2, 9]),
    st.sampled_from([1, 40, 250, 10**6]),
    st.sampled_from([0, 100, 1500]),
)
EVENTS = st.lists(
    st.one_of(ASKS, ASKS, ASKS, st.integers(0, 9), st.sampled_from([0.5, 5.0])),
    min_size=10,
    max_size=60,
)
"""Requests; the end of one of those that run; seconds that pass."""
Event = tuple[str, int, bool, int, int, int] | int | float


async def lived(
    opened: Opened, events: Sequence[Event], left_out: Collection[int]
) -> dict[int, Any]:
    """What became of each request, by its place; those left out are never sent."""
    outcomes: dict[int, Any] = {}
    running: dict[int, Lease] = {}
    now_s = NOW_S
    for place, event in enumerate(events):
        if isinstance(event, float):
            now_s += event
            opened.at(now_s)
            await opened.store.tick()
            await opened.store.renew()
        elif isinstance(event, int):
            if running:
                lease = running.pop(sorted(running)[event % len(running)])
                opened.store.settle(lease, used(lease.cost_tokens * event // 4))
                await opened.quiet()
        elif place not in left_out:
            name, pool, spills, sequences, tokens, kv_bytes = event
            ask = AdmissionRequest(
                lease_id=f"l{place}",
                model="m",
                entitlement=name,
                pool=pool,
                alternates=(1 - pool,) if spills else (),
                estimate_tokens=tokens,
                sequences=sequences,
                kv_bytes=kv_bytes,
            )
            try:
                lease = running[place] = await opened.store.admit(ask)
                outcomes[place] = name, lease.pool, lease.spilled, lease.protected, lease.weight
            except Refusal as refusal:
                outcomes[place] = name, refusal.status, refusal.reason
    return outcomes


def test_what_a_tenant_is_refused_changes_nothing_for_anybody(
    opener: Opener, request: pytest.FixtureRequest
) -> None:
    """Any history, and the same without one tenant's refused requests."""

    async def outcomes(
        greedy: Any, events: Sequence[Event], left_out: Collection[int]
    ) -> dict[int, Any]:
        opened = await opener(CROWDED, [*OTHERS, greedy])
        try:
            return await lived(opened, events, left_out)
        finally:
            await opened.close()

    @histories(EXAMPLES[request.node.callspec.params["opener"]])
    @given(greedy=st.sampled_from(GREEDY), events=EVENTS)
    def holds(greedy: Any, events: list[Event]) -> None:
        whole = asyncio.run(outcomes(greedy, events, ()))
        refused = {at for at, (name, *said) in whole.items() if name == "x" and len(said) == 2}
        rest = {at: said for at, said in whole.items() if at not in refused}
        assert asyncio.run(outcomes(greedy, events, refused)) == rest

    holds()


EXAMPLES = {"memory": 150, "sqlite": 20, "redis": 10}


async def test_one_tenant_s_retries_lengthen_nobody_else_s_wait(opener: Opener) -> None:
    opened = await opener(
        TERMS,
        [
            entitled("g", "guaranteed", baseline=2, created=1),
            entitled("s", "spot", created=2),
            entitled("t", "spot", created=3),
        ],
    )
    try:
        for lease_id in ("g1", "g2"):
            await take(opened, lease_id, "g")
        waits = []
        for lease_id in [f"s{number}" for number in range(100)] + ["t"]:
            with pytest.raises(RateLimited) as refused:
                await take(opened, lease_id, lease_id[0])
            waits.append(refused.value.retry_after_s)
        assert waits[99] == 60
        assert waits[100] is not None
        assert waits[100] <= 8  # two places of 5 s over two slots, and the jitter
    finally:
        await opened.close()
