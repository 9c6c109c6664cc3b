"""Limits of keys, entitlements and tenants hold on every store, to the token."""

import asyncio
from collections.abc import Sequence
from datetime import datetime
from typing import Any
from zoneinfo import ZoneInfo

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.admission.terms import AdmissionRequest, Terms
from gateway.admission.token_pool import LEASE_TTL_S
from gateway.errors import RateLimited, Refusal
from gateway.ports import Budgets, Settlement
from gateway.records.attempt import Usage
from gateway.records.lease import Lease
from gateway.records.limit import Limit, LimitView
from tests.contract.test_token_pool_invariants import OPENERS, Opened, Opener, opener_on
from tests.histories import histories
from tests.token_pools import NOW_S, entitled

TERMS = Terms(slots=(500, 500))
MONTH = Limit(
    id="tenant:t:tokens:month",
    scope="tenant",
    name="t",
    unit="tokens",
    amount=10_000,
    window="month",
    warn=8_000,
)


@pytest.fixture(params=[*OPENERS, pytest.param("redis", marks=pytest.mark.redis)])
def opener(request: pytest.FixtureRequest) -> Opener:
    known = OPENERS.get(request.param)
    return known or opener_on(request.getfixturevalue("redis_server"))


def key(unit: Any, amount: int, window: str = "") -> Limit:
    return Limit(
        id=f"key:t/k:{unit}", scope="key", name="t/k", unit=unit, amount=amount, window=window
    )


def like(limit: Limit, **changes: Any) -> Limit:
    return msgspec.structs.replace(limit, **changes)


async def take(
    opened: Opened, lease_id: str, *limits: Limit, tokens: int = 100, **more: Any
) -> Lease:
    return await opened.store.admit(
        AdmissionRequest(
            lease_id=lease_id,
            model="m",
            entitlement=more.pop("entitlement", "e"),
            pool=0,
            alternates=(),
            estimate_tokens=tokens,
            sequences=more.pop("sequences", 1),
            limits=limits,
            **more,
        )
    )


def used(tokens: int, money: int = 0) -> Settlement:
    usage = Usage(prompt_tokens=tokens, completion_tokens=0)
    return Settlement(usage=usage, dispatched=True, unix_s=NOW_S, money=money)


REFUND = Settlement(usage=None, dispatched=False, unix_s=NOW_S)


async def seen(opened: Opened, limit: Limit) -> LimitView:
    await opened.quiet()
    store: Any = opened.store
    budgets: Budgets = store
    return (await budgets.levels([limit]))[0]


async def refusal(opened: Opened, lease_id: str, *limits: Limit, **more: Any) -> Refusal:
    with pytest.raises(Refusal) as caught:
        await take(opened, lease_id, *limits, **more)
    return caught.value


async def test_a_budget_is_reserved_corrected_and_refunded_to_the_token(opener: Opener) -> None:
    opened = await opener(TERMS, [entitled("e")])
    try:
        a, b, c = [await take(opened, name, MONTH, tokens=1_000) for name in "abc"]
        assert ((view := await seen(opened, MONTH)).used, view.reserved) == (3_000, 3_000)
        opened.store.settle(a, used(1_234))
        opened.store.settle(b, used(7))
        opened.store.settle(c, REFUND)
        opened.store.settle(c, used(500))  # once only
        view = await seen(opened, MONTH)
        assert (view.used, view.reserved, view.total) == (1_241, 0, 1_241)
    finally:
        await opened.close()


async def test_a_used_up_budget_says_what_is_used_and_when_it_resets(opener: Opener) -> None:
    opened = await opener(TERMS, [entitled("e")])
    budget = like(MONTH, zone="Europe/Berlin")
    try:
        opened.store.settle(await take(opened, "a", budget), used(9_950))
        found = await refusal(opened, "b", budget)
        assert found.reason == "budget"
        assert (found.status, found.type, found.code) == (429, *["insufficient_quota"] * 2)
        assert found.should_retry is False
        assert found.retry_after_s == 1_385_200, "until it resets, for loops of their own"
        assert "the tenant 't': 9950 tokens of 10000 tokens are used" in found.message
        assert "resets_at: 2023-12-01T00:00:00+01:00" in found.message
        opened.store.settle(await take(opened, "c", budget, tokens=50), used(50))
        opened.at(datetime(2023, 12, 1, tzinfo=ZoneInfo("Europe/Berlin")).timestamp())
        await take(opened, "d", budget)
        assert (await seen(opened, budget)).used == 100
    finally:
        await opened.close()


async def test_what_running_requests_reserve_is_worth_waiting_for(opener: Opener) -> None:
    opened = await opener(TERMS, [entitled("e")])
    try:
        lease = await take(opened, "a", MONTH, tokens=9_950)
        found = await refusal(opened, "b", MONTH)
        assert (found.reason, found.code, found.should_retry) == (
            "budget_reserved",
            "rate_limit_exceeded",
            True,
        )
        opened.store.settle(lease, used(10))
        await take(opened, "b", MONTH)
    finally:
        await opened.close()


async def test_a_key_gets_exactly_its_requests_a_minute(opener: Opener) -> None:
    opened = await opener(TERMS, [entitled("e")])
    limit = key("requests", 60, "minute")
    try:
        found = await asyncio.gather(
            *(take(opened, f"l{n}", limit) for n in range(200)), return_exceptions=True
        )
        refused = [each for each in found if isinstance(each, RateLimited)]
        assert len(refused) == 140
        assert {each.reason for each in refused} == {"key_requests"}
        assert "the API key 'k' on requests a minute: limit 60, used 60" in refused[0].message
        wait_s = refused[0].retry_after_s
        assert wait_s is not None
        assert 60 <= wait_s <= 65
        opened.at(NOW_S + 59)
        assert (await refusal(opened, "soon", limit)).reason == "key_requests"
        opened.at(NOW_S + wait_s)
        await take(opened, "later", limit)
    finally:
        await opened.close()


async def test_only_what_was_sent_nowhere_gives_its_place_in_the_minute_back(
    opener: Opener,
) -> None:
    opened = await opener(TERMS, [entitled("e")])
    limits = (key("requests", 2, "minute"), key("sequences", 9), MONTH)
    failed = msgspec.structs.replace(REFUND, dispatched=True)
    try:
        for number in range(5):
            opened.store.settle(await take(opened, f"unsent{number}", *limits), REFUND)
            await opened.quiet()
        for number in range(2):
            opened.store.settle(await take(opened, f"failed{number}", *limits), failed)
            await opened.quiet()
        assert (await refusal(opened, "x", *limits)).reason == "key_requests"
        assert [(await seen(opened, limit)).used for limit in limits] == [2, 0, 0]
    finally:
        await opened.close()


async def test_a_key_has_exactly_its_sequences_in_flight(opener: Opener) -> None:
    opened = await opener(TERMS, [entitled("e"), entitled("f")])
    limit = key("sequences", 5)
    try:
        found = await asyncio.gather(
            *(take(opened, f"l{n}", limit, entitlement="ef"[n % 2]) for n in range(30)),
            return_exceptions=True,
        )
        leases = [each for each in found if isinstance(each, Lease)]
        assert len(leases) == 5
        assert (await refusal(opened, "x", limit)).reason == "key_concurrency"
        opened.store.settle(leases[0], used(3))
        await opened.quiet()
        await take(opened, "y", limit)
        assert (await refusal(opened, "z", limit)).reason == "key_concurrency"
    finally:
        await opened.close()


async def test_a_request_larger_than_a_whole_limit_is_not_told_to_wait(opener: Opener) -> None:
    opened = await opener(TERMS, [entitled("e")])
    store: Any = opened.store
    running, budget = key("sequences", 4), like(MONTH, amount=500)
    try:
        await take(opened, "a", running, budget, sequences=4, tokens=500)
        for sequences, tokens in ((5, 1), (1, 501)):
            asked = {"sequences": sequences, "tokens": tokens}
            found = await refusal(opened, "b", running, budget, **asked)
            assert (found.status, found.reason) == (400, "exceeds_entitlement")
        assert (await refusal(opened, "b", running, budget, tokens=1)).reason == "key_concurrency"
        await store.add(budget, 1)
        assert (await refusal(opened, "b", budget, tokens=501)).reason == "budget_reserved"
        await store.add(budget, -400)
        assert (await refusal(opened, "b", budget, tokens=400)).reason == "budget"
    finally:
        await opened.close()


async def test_a_refused_request_takes_nothing_of_any_limit(opener: Opener) -> None:
    opened = await opener(TERMS, [entitled("e")])
    limits = (key("sequences", 9), key("requests", 9, "minute"), like(MONTH, amount=110))
    await take(opened, "first", limits[2])
    try:
        assert (await refusal(opened, "a", *limits)).reason == "budget_reserved"
        for limit in limits[:2]:
            assert ((view := await seen(opened, limit)).used, view.total) == (0, 0)
        assert (await seen(opened, limits[2])).used == 100
    finally:
        await opened.close()


async def test_an_expired_lease_is_charged_until_its_usage_comes(opener: Opener) -> None:
    opened = await opener(TERMS, [entitled("e")])
    running = key("sequences", 1)
    try:
        lease = await take(opened, "a", MONTH, running, tokens=700)
        opened.at(NOW_S + LEASE_TTL_S + 1)
        await opened.store.tick()
        view = await seen(opened, MONTH)
        assert (view.used, view.reserved) == (700, 0)
        assert (await seen(opened, running)).used == 0
        opened.store.settle(lease, used(40))
        assert (await seen(opened, MONTH)).used == 40
        assert (await seen(opened, running)).used == 0
    finally:
        await opened.close()


@pytest.mark.parametrize("unit", ["tokens", "money"])
async def test_who_teaches_short_answers_passes_a_budget_by_less_than_one_request(
    opener: Opener, unit: Any
) -> None:
    opened = await opener(TERMS, [entitled("e")])
    budget = like(MONTH, id=f"tenant:t:{unit}:month", unit=unit, amount=50_000, warn=0)
    asked = {"tokens": 60, "money": 60, "most_tokens": 8_000, "most_money": 8_000}
    spent = 0
    try:
        for round_number in range(20):
            found = await asyncio.gather(
                *(take(opened, f"{round_number}.{n}", budget, **asked) for n in range(200)),
                return_exceptions=True,
            )
            leases = [each for each in found if isinstance(each, Lease)]
            assert spent + 8_000 * len(leases) < 50_000 + 8_000
            refused = [each for each in found if isinstance(each, RateLimited)]
            assert len(leases) + len(refused) == 200
            reason = "budget_reserved" if spent + 60 <= 50_000 else "budget"
            assert {each.reason for each in refused} == {reason}
            for number, lease in enumerate(leases):
                took = 30 if number % 2 else 8_000
                opened.store.settle(lease, used(took, took))
                spent += took
            view = await seen(opened, budget)
            assert (view.used, view.reserved, view.total) == (spent, 0, spent)
        assert 50_000 - 60 < spent < 58_000
    finally:
        await opened.close()


async def test_what_costs_nothing_is_not_refused_for_money(opener: Opener) -> None:
    opened = await opener(TERMS, [entitled("e")])
    money = like(MONTH, id="tenant:t:money:month", unit="money", amount=100, warn=0)
    try:
        opened.store.settle(await take(opened, "a", money, money=90), used(1, 200))
        assert (await refusal(opened, "b", money, money=1)).reason == "budget"
        await take(opened, "free", money)
    finally:
        await opened.close()


async def test_a_new_windows_used_up_budget_is_used_up_whatever_still_runs(opener: Opener) -> None:
    opened = await opener(TERMS, [entitled("e")])
    day = like(MONTH, id="tenant:t:tokens:day", window="day", amount=1_000, warn=0)
    try:
        running = await take(opened, "old", day, tokens=900)
        opened.at(NOW_S + 86_400 - 10)
        await opened.store.renew()
        opened.at(NOW_S + 86_400)
        await opened.store.renew()
        opened.store.settle(await take(opened, "new", day), used(1_000))
        found = await refusal(opened, "b", day)
        assert found.reason == "budget"
        assert found.should_retry is False
        opened.store.settle(running, used(850))
        assert (await seen(opened, day)).used == 1_000, "the old one counts in its own day"
    finally:
        await opened.close()


async def test_beyond_a_budget_that_says_spot_only_leftovers_are_given(opener: Opener) -> None:
    terms = Terms(slots=(3,), headroom=1)
    opened = await opener(
        terms, [entitled("e", "guaranteed", baseline=(3,), created=1), entitled("f", created=2)]
    )
    budget = like(MONTH, amount=50, warn=0, spot=True)
    try:
        low = await take(opened, "a", budget)
        assert low.spilled
        assert not low.protected
        assert low.weight <= 1
        await take(opened, "b")
        assert (await refusal(opened, "c", budget)).reason == "priority"  # the last free slot
        await take(opened, "d")
    finally:
        await opened.close()


async def test_the_first_request_to_reach_warn_at_tells_so_once(opener: Opener) -> None:
    opened = await opener(TERMS, [entitled("e")])
    store: Any = opened.store
    heard: list[tuple[str, int]] = []
    store.on_warning = lambda limit, use: heard.append((limit.id, use.level))
    try:
        for number in range(9):
            lease = await take(opened, f"l{number}", MONTH, tokens=1_000, most_tokens=2_000)
            assert (lease.uses[0].level >= MONTH.warn) == (number >= 7)
            opened.store.settle(lease, used(1_000))
        assert heard == [(MONTH.id, 8_000)]
    finally:
        await opened.close()


async def test_an_administrator_adds_to_a_budget_for_its_window_alone(opener: Opener) -> None:
    opened = await opener(TERMS, [entitled("e")])
    store: Any = opened.store
    day = like(MONTH, id="tenant:t:tokens:day", window="day", amount=100, warn=0)
    try:
        opened.store.settle(await take(opened, "a", day), used(100))
        assert (await refusal(opened, "b", day)).reason == "budget"
        assert (await store.add(day, 500)).added == 500
        opened.store.settle(await take(opened, "b", day, tokens=500), used(500))
        assert (await store.add(day, -100)).added == 400
        opened.at(NOW_S + 86_400)
        view = await seen(opened, day)
        assert (view.used, view.added) == (0, 0)
    finally:
        await opened.close()


@pytest.mark.parametrize("window", ["month", "30d"])
async def test_what_a_wrong_clock_counted_ahead_counts_in_the_current_window(
    opener: Opener, window: str
) -> None:
    opened = await opener(TERMS, [entitled("e")])
    store: Any = opened.store
    budget = like(MONTH, window=window)
    try:
        opened.store.settle(await take(opened, "a", budget), used(7_000))
        opened.at(NOW_S + 3 * 365 * 86_400)
        opened.store.settle(await take(opened, "b", budget), used(500))
        running = await take(opened, "c", budget)
        await store.add(budget, 50)
        opened.at(NOW_S)
        if opened.starts_again:
            await opened.start_again(TERMS, [entitled("e")])
        assert (await seen(opened, budget)).used == 7_600
        lease = await take(opened, "d", budget, tokens=500)
        assert lease.uses[0].crossed
        opened.store.settle(running, used(90))
        opened.store.settle(lease, used(400))
        assert ((view := await seen(opened, budget)).used, view.added) == (7_990, 50)
        opened.at(NOW_S + 61 * 86_400)
        assert ((view := await seen(opened, budget)).used, view.added) == (0, 0)
    finally:
        await opened.close()


async def test_the_latest_thirty_days_never_hold_more_than_the_amount(opener: Opener) -> None:
    opened = await opener(TERMS, [entitled("e")])
    rolling = like(MONTH, id="tenant:t:tokens:30d", window="30d", amount=3_000, warn=0)
    spent: list[tuple[float, int]] = []
    try:
        for day in range(70):
            now_s = NOW_S + day * 86_400 + 3_600.0 * (day % 5)
            opened.at(now_s)
            for number in range(3):
                try:
                    lease = await take(opened, f"l{day}.{number}", rolling, tokens=100)
                except RateLimited:
                    continue
                opened.store.settle(lease, used(100))
                spent.append((now_s, 100))
        for end_s, _ in spent:
            within = sum(n for at_s, n in spent if end_s - 30 * 86_400 < at_s <= end_s)
            assert within <= 3_000
        assert sum(n for _, n in spent) >= 6_000
    finally:
        await opened.close()


@pytest.mark.parametrize(
    ("night", "hours"), [("2026-03-29", 23), ("2026-10-25", 25), ("2026-06-10", 24)]
)
async def test_a_turn_of_the_day_loses_and_doubles_nothing(
    opener: Opener, night: str, hours: int
) -> None:
    """Under load, also where a day has 23 or 25 hours: requests run across both its midnights."""
    zone = ZoneInfo("Europe/Berlin")
    opened = await opener(TERMS, [entitled("e")])
    day = like(MONTH, id="t:day", window="day", zone="Europe/Berlin", amount=10**9, warn=0)
    first_s = datetime.fromisoformat(night).replace(tzinfo=zone).timestamp()
    counted: dict[str, int] = {}
    turns = 0
    try:
        for midnight_s in (first_s, first_s + hours * 3600):
            running: list[tuple[str, Lease]] = []
            for step in range(-30, 30):
                now_s = midnight_s + step * 2.5
                opened.at(now_s)
                today = datetime.fromtimestamp(now_s, zone).date().isoformat()
                turns += today not in counted
                asked = [take(opened, f"l{now_s}.{n}", day, tokens=50) for n in range(5)]
                running += [(today, lease) for lease in await asyncio.gather(*asked)]
                counted.setdefault(today, 0)
                while len(running) > 20 or (step == 29 and running):
                    began, lease = running.pop(0)
                    tokens = len(running) * 7 % 90
                    opened.store.settle(lease, used(tokens) if tokens % 11 else REFUND)
                    counted[began] += tokens if tokens % 11 else 0
                view = await seen(opened, day)
                assert view.reserved == 50 * len(running), "of yesterday's requests, too"
                assert view.used == counted[today] + view.reserved
                assert view.total == sum(counted.values()) + view.reserved
                ends = datetime.fromtimestamp(view.resets_unix_s, zone)
                assert (
                    ends.hour,
                    ends.minute,
                    ends.date() > datetime.fromisoformat(today).date(),
                ) == (0, 0, True)
        assert turns == 3
    finally:
        await opened.close()


@pytest.mark.parametrize("store", ["memory", "sqlite"])
@given(data=st.data())
@histories(20, steps=1)
def test_after_any_history_exactly_what_was_used_is_counted(
    store: str, data: st.DataObject
) -> None:
    async def run() -> None:
        opened = await OPENERS[store](TERMS, [entitled("e")])
        open_leases: list[Lease] = []
        spent = 0
        limits: Sequence[Limit] = (MONTH, key("sequences", 4))
        try:
            for number in range(data.draw(st.integers(1, 30))):
                ends = data.draw(st.sampled_from((True, False)))
                if open_leases and ends:
                    lease = open_leases.pop(0)
                    tokens = data.draw(st.sampled_from((None, 0, 90, 2_500)))
                    opened.store.settle(lease, REFUND if tokens is None else used(tokens))
                    spent += tokens or 0
                    continue
                try:
                    most = {"tokens": 800, "most_tokens": 2_500}
                    lease = await take(opened, f"l{number}", *limits, **most)
                except RateLimited:
                    assert spent + 2_500 * len(open_leases) + 800 > 10_000 or len(open_leases) == 4
                else:
                    open_leases.append(lease)
            view = await seen(opened, MONTH)
            reserved = 2_500 * len(open_leases)
            assert (view.used, view.reserved) == (spent + reserved, reserved)
            assert spent < 10_000 + 2_500
        finally:
            await opened.close()

    asyncio.run(run())


async def test_budgets_are_kept_over_a_restart() -> None:
    opened = await OPENERS["sqlite"](TERMS, [entitled("e")])
    running = key("sequences", 2)
    store: Any = opened.store
    try:
        opened.store.settle(await take(opened, "a", MONTH, running), used(4_000))
        await take(opened, "b", MONTH, running, tokens=300)
        await store.add(MONTH, 77)
        await opened.start_again(TERMS, [entitled("e")])
        view = await seen(opened, MONTH)
        assert (view.used, view.reserved, view.added) == (4_300, 300, 77)
        assert (await seen(opened, running)).used == 1
        opened.at(NOW_S + LEASE_TTL_S + 1)
        await opened.store.tick()
        assert ((view := await seen(opened, MONTH)).used, view.reserved) == (4_300, 0)
        assert (await seen(opened, running)).used == 0
    finally:
        await opened.close()


async def test_a_counter_that_nobody_defines_is_dropped_once_its_window_is_over(
    opener: Opener,
) -> None:
    entitlements = [entitled("e")]
    opened = await opener(TERMS, entitlements)
    limits = [like(MONTH, id=f"tenant:t{n}:tokens:month") for n in range(300)]
    kept, *gone = limits

    async def totals(defined: Sequence[Limit]) -> set[int]:
        """What each limit counted since the beginning, after a sweep."""
        await opened.quiet()
        store: Any = opened.store
        await store.tick()  # with Redis, the leader sweeps
        ids = {limit.id for limit in defined}
        await store.sweep(ids.__contains__)
        if opened.starts_again:
            await opened.start_again(TERMS, entitlements)
            store = opened.store
        return {view.total for view in await store.levels(gone)}

    try:
        lease = await take(opened, "a", *limits, tokens=1_000)
        assert await totals([]) == {1_000}  # reserved
        opened.store.settle(lease, used(7))
        assert await totals([]) == {7}  # a key that is made again has used as much
        opened.at(datetime(2024, 1, 15, tzinfo=ZoneInfo("UTC")).timestamp())
        assert await totals(limits) == {7}
        assert await totals([kept]) == {0}
        assert (await seen(opened, kept)).total == 7
    finally:
        await opened.close()
