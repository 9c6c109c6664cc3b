"""Admission for another proxy: the same answers as the data plane's, and one settlement a lease."""

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import httpx
import msgspec
import pytest

from gateway.admission.terms import Terms
from gateway.admission.token_pool import TokenPool
from gateway.control import external_admission as service
from gateway.control.app import control_app
from gateway.control.external_admission import (
    AdmissionService,
    AuthorizeBody,
    admission_router,
)
from gateway.control.surface import MAX_BODY_BYTES
from gateway.errors import Forbidden
from gateway.fleet.fleet import SlotClock
from gateway.fleet.model_runtime import ModelRuntime
from gateway.metrics import Metrics
from gateway.payload.body import facts_of
from gateway.payload.head import digest_of
from gateway.records.endpoint import CHAT
from gateway.records.entitlement import Entitlement
from gateway.records.estimate import LengthEstimate
from gateway.records.limit import Limit
from gateway.records.request import Principal
from gateway.store.memory_leases import MemoryLeases
from gateway.tenancy.keyring import Keyring, authenticate_head
from tests.builders import ask, changed, served_model, short_and_long
from tests.control import bearer, control_of
from tests.fakes import FakeClock, ListSink

ACME = bearer("sk-acme")
OTHER = bearer("sk-other")


def keyring(trusted: Collection[str] = (), limits: tuple[Limit, ...] = ()) -> Keyring:
    """Keys of two tenants, and a second one of acme; `trusted`: the entitlements that are."""
    ring = Keyring(limits={("tenant", "acme"): limits})
    for key, name, tenant in (
        ("sk-acme", "acme-prod", "acme"),
        ("sk-acme-test", "acme-test", "acme"),
        ("sk-other", "other-prod", "other"),
    ):
        owner = Principal(entitlement=name, tenant=tenant, model="m", trusted_usage=name in trusted)
        ring.put(owner, [digest_of(key.encode())])
    return ring


class Bench:
    """A desk over the embedded store, its routes served in this process."""

    def __init__(
        self,
        *,
        default_max_tokens: int | None = None,
        slot_tokens_per_s: float = served_model().admission.slot_tokens_per_s,
        held_share: float = 1.0,
        service_class: Any = "elastic",
        trusted: Collection[str] = (),
        limits: tuple[Limit, ...] = (),
    ) -> None:
        self.clock = FakeClock(1_000.0)
        self.sink = ListSink()
        self.metrics = Metrics()
        self.draining = False
        table = short_and_long(default_max_tokens=default_max_tokens)
        self.served: ModelRuntime = changed(
            served_model(table=table), slot_tokens_per_s=slot_tokens_per_s, held_share=held_share
        )
        self.book = TokenPool(Terms(slots=(8, 8), largest_tokens=65536))
        reserves = service_class == "elastic"
        for name, limit in (("acme-prod", 2 if reserves else 8), ("other-prod", 2)):
            self.book.define(
                Entitlement(
                    name=name,
                    model="m",
                    service_class=service_class,
                    baseline=(2, 2) if reserves else (),
                    limit=limit,
                    tokens_per_s=1_000.0,
                    tokens_per_s_limit=1_000.0,
                )
            )
        models = {"m": self.served}
        self.store = MemoryLeases(
            models, self.clock, {"m": self.book}, wall_clock=self.clock, jitter=lambda: 0.0
        )
        ids = iter(range(1, 10_000))
        self.desk = AdmissionService(
            models=models,
            store=self.store,
            metrics=self.metrics,
            records=self.sink.append,
            new_id=lambda: f"lease-{next(ids)}",
            clock=self.clock,
            wall_clock=self.clock,
            draining=lambda: self.draining,
            replicas=lambda _: 2,
        )
        ring = keyring(trusted, limits)
        control = control_of(
            models=(self.served,), authenticate=lambda head: authenticate_head(ring, head, 0.0)
        )
        router = admission_router(self.desk, control.authenticate, control.peers)
        self.app = app = control_app(control, router)
        self.client = httpx.AsyncClient(
            transport=httpx.ASGITransport(app=app), base_url="http://gateway"
        )

    async def authorize(self, headers: dict[str, str] | None = None, **body: Any) -> httpx.Response:
        """POST /admission/authorize for model m."""
        given = {"model": "m", "input_tokens": 100, "max_tokens": 50, **body}
        sent = {name: value for name, value in given.items() if value is not None}
        return await self.client.post("/admission/authorize", json=sent, headers=headers or ACME)

    async def usage(
        self, lease_id: str, headers: dict[str, str] | None = None, **body: Any
    ) -> httpx.Response:
        """POST /admission/usage."""
        return await self.client.post(
            "/admission/usage", json={"lease_id": lease_id, **body}, headers=headers or ACME
        )

    @property
    def account(self) -> Any:
        """What acme uses."""
        return self.book.accounts["acme-prod"]


@pytest.fixture
def bench() -> Bench:
    return Bench()


def error(answer: httpx.Response) -> tuple[int, str | None, str | None]:
    """(status, code, reason)."""
    code = answer.json()["error"]["code"]
    return answer.status_code, code, answer.headers.get("x-sluice-reason")


# -- asking


async def test_a_request_that_may_enter_gets_a_lease_with_its_limits(bench: Bench) -> None:
    answer = await bench.authorize()
    assert answer.status_code == 200
    found = answer.json()
    assert (found["lease_id"], found["pool"], found["spilled"]) == ("lease-1", "short", False)
    assert (found["reserved_tokens"], found["max_tokens"]) == (150, 50)
    assert found["weight"] > 1
    assert found["expires_in_s"] == 600
    assert (found["limits"]["sequences"], found["limits"]["sequences_free"]) == (2, 1)
    assert answer.headers["x-ratelimit-remaining-requests"] == "1"
    assert answer.headers["x-ratelimit-remaining-tokens"] == str(65536 - 150)
    assert (bench.account.total, bench.desk.held, bench.store.active) == (1, 1, 1)


async def test_text_is_estimated_and_a_request_without_a_limit_gets_the_default() -> None:
    bench = Bench(default_max_tokens=300)
    answer = await bench.authorize(input_tokens=None, text_bytes=4_000)
    assert 1_000 <= answer.json()["reserved_tokens"] - 50 <= 1_400
    assert (await bench.authorize(max_tokens=None)).json()["max_tokens"] == 300


async def test_past_its_limit_a_tenant_gets_the_data_plane_s_429(bench: Bench) -> None:
    await bench.authorize()
    await bench.authorize()
    answer = await bench.authorize()
    assert error(answer) == (429, "rate_limit_exceeded", "concurrency")
    assert answer.json()["error"]["type"] == "requests"
    assert int(answer.headers["retry-after"]) >= 1
    assert int(answer.headers["retry-after-ms"]) >= 1000
    assert answer.headers["x-should-retry"] == "true"
    (record,) = bench.sink.records
    assert (record.endpoint, record.outcome, record.reason) == (
        "admission",
        "refused",
        "concurrency",
    )
    assert bench.metrics.admission.values["acme-prod", "denied", "concurrency"] == 1
    assert bench.desk.held == 2


async def test_what_can_never_fit_is_a_400(bench: Bench) -> None:
    assert error(await bench.authorize(input_tokens=70_000))[:2] == (400, "context_length_exceeded")
    assert error(await bench.authorize(n=3))[2] == "exceeds_entitlement"


async def test_keys_are_those_of_the_data_plane(bench: Bench) -> None:
    for path in ("/admission/authorize", "/admission/usage"):
        answer = await bench.client.post(path, json={})
        assert error(answer) == (401, "invalid_api_key", "missing_api_key")
        answer = await bench.client.post(path, json={}, headers={"x-api-key": "sk-unknown"})
        assert error(answer) == (401, "invalid_api_key", "invalid_api_key")


async def test_a_key_opens_its_own_model_only() -> None:
    bench = Bench()
    bench.desk = AdmissionService(
        models={"n": served_model(name="n")},
        store=bench.store,
        metrics=bench.metrics,
        records=bench.sink.append,
        new_id=lambda: "x",
        clock=bench.clock,
        wall_clock=bench.clock,
    )
    owner = Principal(entitlement="e", tenant="t", model="m")
    with pytest.raises(Forbidden, match="'m' only"):
        await bench.desk.admit(owner, AuthorizeBody(model="n", input_tokens=1))


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"model": None}, "model"),
        ({"model": ""}, "model"),
        ({"input_tokens": None}, "input_tokens"),
        ({"input_tokens": -1}, "input_tokens"),
        ({"input_tokens": "9"}, "input_tokens"),
        ({"input_tokens": 1.5}, "input_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"lease_s": 3601}, "lease_s"),
        ({"lease_s": 0}, "lease_s"),
        ({"request_id": "x" * 129}, "request_id"),
    ],
)
async def test_bad_fields_are_named(bench: Bench, body: dict[str, Any], param: str) -> None:
    answer = await bench.authorize(**body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert bench.desk.held == 0


@pytest.mark.parametrize("raw", [b"", b"[]", b"{", b'{"model": "\xff"}', b"1", b"[" * 100_000])
async def test_bodies_that_are_no_objects_are_refused(bench: Bench, raw: bytes) -> None:
    for path in ("/admission/authorize", "/admission/usage"):
        answer = await bench.client.post(path, content=raw, headers=ACME)
        assert answer.status_code in (400, 413)
        assert answer.json()["error"]["message"]


async def test_unknown_fields_and_large_bodies_are_refused(bench: Bench) -> None:
    answer = await bench.authorize(max_token=5)
    assert answer.status_code == 400
    assert "max_token" in answer.json()["error"]["message"]
    answer = await bench.client.post(
        "/admission/authorize", content=b" " * (MAX_BODY_BYTES + 1), headers=ACME
    )
    assert error(answer)[:2] == (413, "request_too_large")


async def test_a_gateway_that_shuts_down_sends_others_away(bench: Bench) -> None:
    bench.draining = True
    assert error(await bench.authorize())[:2] == (503, "shutting_down")


# -- reporting


async def test_usage_settles_the_lease_and_charges_what_was_used(bench: Bench) -> None:
    lease = (await bench.authorize(request_id="r-7")).json()["lease_id"]
    bench.clock.advance(2)
    answer = await bench.usage(
        lease, prompt_tokens=120, completion_tokens=30, cached_tokens=100, latency_s=1.5
    )
    assert answer.status_code == 200
    assert answer.json() == {
        "lease_id": "lease-1",
        "status": "ok",
        "charge_tokens": 60,
        "prompt_tokens": 120,
        "completion_tokens": 30,
        "cached_tokens": 100,
        "held_tokens": 0,
    }
    assert (bench.account.total, bench.account.used, bench.desk.held) == (0, 60, 0)
    assert bench.account.debited - bench.account.refunded == 60
    (record,) = bench.sink.records
    assert (record.request_id, record.admission.lease_id, record.outcome) == (
        "r-7",
        "lease-1",
        "ok",
    )
    assert (record.admission.charge_tokens, record.usage.source, record.timing.duration_s) == (
        60,
        "proxy",
        1.5,
    )
    assert (record.tenant, record.entitlement, record.model) == ("acme", "acme-prod", "m")
    assert bench.metrics.tokens.values["m", "acme-prod", "input"] == 120


async def test_a_repeated_report_gets_the_first_settlement(bench: Bench) -> None:
    lease = (await bench.authorize()).json()["lease_id"]
    first = await bench.usage(lease, prompt_tokens=100, completion_tokens=10)
    again = await bench.usage(lease, prompt_tokens=9, completion_tokens=9, status="cancelled")
    assert again.status_code == 200
    assert again.json() == first.json()
    assert (bench.account.used, len(bench.sink.records)) == (110, 1)


@pytest.mark.parametrize(
    ("held_s", "report", "completion", "held", "charge"),
    [
        (10.0, {"status": "failed"}, 600, 600, 600),
        (10.0, {"prompt_tokens": 1}, 599, 599, 600),
        (10.0, {"prompt_tokens": 100, "completion_tokens": 60}, 500, 440, 600),
        (10.0, {"status": "cancelled"}, 500, 500, 600),
        (1.0, {"prompt_tokens": 100, "completion_tokens": 60}, 60, 0, 160),
    ],
)
async def test_a_slot_is_never_held_for_nothing(
    held_s: float, report: dict[str, Any], completion: int, held: int, charge: int
) -> None:
    bench = Bench(slot_tokens_per_s=30.0)
    lease = (await bench.authorize(n=2)).json()["lease_id"]
    bench.clock.advance(held_s)
    answer = (await bench.usage(lease, **report)).json()
    assert (answer["completion_tokens"], answer["held_tokens"]) == (completion, held)
    assert answer["charge_tokens"] == bench.account.used == charge


async def test_a_lease_that_failed_keeps_its_place_in_the_minute() -> None:
    limit = Limit(id="r", scope="key", name="k", unit="requests", amount=2, window="minute")
    bench = Bench(limits=(limit,))
    for _ in range(2):
        lease = (await bench.authorize()).json()["lease_id"]
        await bench.usage(lease, status="failed")
    assert error(await bench.authorize()) == (429, "rate_limit_exceeded", "key_requests")


@pytest.mark.parametrize("latency_s", [None, 0.0, 0.001, 5_000.0])
async def test_a_price_by_the_hour_counts_the_time_held_whatever_the_proxy_says(
    latency_s: float | None,
) -> None:
    budget = Limit(id="b", scope="tenant", name="acme", unit="money", amount=10**12, window="month")
    bench = Bench(limits=(budget,))
    bench.served.by_hour = True
    for pool in bench.served.fleet.pools:
        pool.slot_clock = SlotClock(3.6)  # a thousandth a second
    slots = bench.served.fleet.pools[0].slots_per_worker
    lease = (await bench.authorize(n=2)).json()["lease_id"]
    bench.clock.advance(16.0)
    said: dict[str, Any] = {} if latency_s is None else {"latency_s": latency_s}
    await bench.usage(lease, prompt_tokens=100, completion_tokens=9, **said)
    cost = round(2 * 16 * 1_000_000 / slots)
    (record,) = bench.sink.records
    assert record.usage.cost_nano == cost
    assert record.timing.duration_s == (16.0 if latency_s is None else latency_s)
    (level,) = await bench.store.levels([budget])
    assert (level.used, level.reserved) == (cost, 0)


async def test_other_proxies_hold_a_share_of_a_pool_beyond_reserved_baselines() -> None:
    bench = Bench(held_share=0.5, service_class="spot")
    pool = bench.served.fleet.pools[0]
    most = len(pool.workers) * pool.slots_per_worker // 2 // 2  # of two gateways
    leases = [(await bench.authorize()).json()["lease_id"] for _ in range(most)]
    refused = await bench.authorize()
    assert error(refused) == (429, "rate_limit_exceeded", "too_many_leases")
    assert (bench.account.total, bench.account.used, bench.desk.held) == (most, 0, most)
    await bench.usage(leases[0], prompt_tokens=100)
    assert (await bench.authorize()).status_code == 200


@pytest.mark.parametrize("managed", [True, False])
async def test_where_admission_refuses_nobody_there_is_no_share(managed: bool) -> None:
    bench = Bench(held_share=0.01, service_class="spot")
    bench.served.admission = replace(bench.served.admission, observe=managed)
    if not managed:
        bench.store = MemoryLeases(
            {"m": bench.served}, bench.clock, {}, wall_clock=bench.clock, jitter=lambda: 0.0
        )
        bench.desk.store = bench.store
    for _ in range(3):
        lease = await bench.authorize()
        assert lease.status_code == 200
    await bench.usage(lease.json()["lease_id"], prompt_tokens=100)
    assert bench.desk.held == 2


@pytest.mark.parametrize("enforced_first", [True, False])
async def test_a_reload_of_the_mode_frees_just_the_slots_that_a_lease_took(
    enforced_first: bool,
) -> None:
    bench = Bench(held_share=0.5, service_class="spot")
    pool = bench.served.fleet.pools[0]
    most = len(pool.workers) * pool.slots_per_worker // 2 // 2  # of two gateways

    def reload(*, observe: bool) -> None:
        bench.served.admission = replace(bench.served.admission, observe=observe)

    reload(observe=not enforced_first)
    held = [(await bench.authorize()).json()["lease_id"] for _ in range(3)]
    reload(observe=enforced_first)
    for lease_id in held:
        await bench.usage(lease_id, prompt_tokens=10)
    reload(observe=False)
    answers = [(await bench.authorize()).status_code for _ in range(most + 1)]
    assert answers == [200] * most + [429]


async def test_a_lease_that_gives_way_ends_and_frees_its_slot() -> None:
    bench = Bench(service_class="preemptible")
    bench.store.on_evict(bench.desk.evict)
    leases = [(await bench.authorize()).json()["lease_id"] for _ in range(7)]
    bench.book.define(
        Entitlement(name="g", model="m", service_class="guaranteed", baseline=(3, 0), limit=3)
    )
    protected = msgspec.structs.replace(ask("g", cost_tokens=10, sequences=3), entitlement="g")
    await bench.store.reclaim(await bench.store.admit(protected))
    assert bench.account.total < 7
    evicted = [record.admission.lease_id or "" for record in bench.sink.records]
    assert evicted
    assert set(evicted) < set(leases)
    answer = (await bench.usage(evicted[0], prompt_tokens=1)).json()
    assert (answer["status"], answer["charge_tokens"]) == ("evicted", 150)
    assert bench.sink.records[0].outcome == "evicted"


@pytest.mark.parametrize(
    ("report", "charge", "outcome"),
    [
        ({"status": "failed"}, None, "upstream_error"),
        ({"status": "failed", "prompt_tokens": 100, "completion_tokens": 5}, 105, "upstream_error"),
        ({"status": "cancelled", "completion_tokens": 7}, 107, "disconnected"),
        ({"prompt_tokens": 10, "cached_tokens": 5_000}, 1, "ok"),
        ({"prompt_tokens": 8192}, 8192, "ok"),
    ],
    ids=[
        "refunded",
        "failed-midway",
        "prompt-as-estimated",
        "cached-beyond-prompt",
        "whole-window",
    ],
)
async def test_a_report_is_charged_by_how_the_request_ended(
    bench: Bench, report: dict[str, Any], charge: int | None, outcome: str
) -> None:
    lease = (await bench.authorize()).json()["lease_id"]
    answer = (await bench.usage(lease, **report)).json()
    assert (answer["charge_tokens"], bench.sink.records[0].outcome) == (charge, outcome)
    assert (bench.account.used, bench.account.total) == (charge or 0, 0)
    assert (answer["cached_tokens"] or 0) <= (answer["prompt_tokens"] or 0)


@pytest.mark.parametrize(
    ("report", "field"),
    [
        ({}, "prompt_tokens"),
        ({"prompt_tokens": 8193}, "prompt_tokens"),
        ({"prompt_tokens": 8_150, "completion_tokens": 50}, "completion_tokens"),
        ({"prompt_tokens": 100, "completion_tokens": 51}, "completion_tokens"),
        ({"prompt_tokens": 0, "completion_tokens": 5}, "prompt_tokens"),
    ],
    ids=["unsaid", "beyond-the-window", "together", "beyond-the-limit", "no-prompt"],
)
async def test_a_proxy_is_believed_no_more_than_an_engine(
    bench: Bench, report: dict[str, Any], field: str
) -> None:
    lease = (await bench.authorize()).json()["lease_id"]
    answer = await bench.usage(lease, **report)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)
    assert bench.desk.held == 1, "it can still be reported"


async def test_another_tenant_can_neither_settle_a_lease_nor_learn_of_it(bench: Bench) -> None:
    lease = (await bench.authorize()).json()["lease_id"]
    answer = await bench.usage(lease, OTHER, prompt_tokens=1)
    assert error(answer)[:2] == (404, "lease_not_found")
    await bench.usage(lease, prompt_tokens=1)
    again = await bench.usage(lease, OTHER, prompt_tokens=1)
    assert error(again)[:2] == (404, "lease_not_found")
    unknown = await bench.usage("lease-99", OTHER, prompt_tokens=1)
    assert unknown.json()["error"]["message"].replace("99", "1") == again.json()["error"]["message"]


# -- what nobody reports


async def reported(
    bench: Bench,
    text_bytes: int,
    headers: dict[str, str] | None = None,
    by: dict[str, str] | None = None,
    max_tokens: int | None = 50_000,
    **usage: Any,
) -> None:
    """A whole request of one tenant, whose usage is reported `by` a key."""
    told = await bench.authorize(
        headers, input_tokens=None, text_bytes=text_bytes, max_tokens=max_tokens
    )
    assert told.status_code == 200, told.text
    done = await bench.usage(told.json()["lease_id"], by or headers, **usage)
    assert done.status_code == 200, done.text
    bench.clock.now_s += 60.0


def estimated(bench: Bench, tenant: str = "acme") -> LengthEstimate:
    """The estimate of a prompt of 30,000 bytes."""
    request = AuthorizeBody(model="m", text_bytes=30_000)
    return bench.served.estimator.estimate(CHAT, facts_of(request), tenant)


@pytest.fixture
def trusting() -> Bench:
    return Bench(trusted=("acme-prod", "other-prod"), slot_tokens_per_s=0.001)


async def test_trusted_reports_teach_the_ratio_and_the_length_of_answers(trusting: Bench) -> None:
    before, others = estimated(trusting), estimated(trusting, "other")
    for _ in range(30):
        await reported(trusting, 6_000, prompt_tokens=3_000, completion_tokens=40)
    after = estimated(trusting)
    assert after.ratio == pytest.approx(2.0, rel=0.02)
    assert before.ratio > 3
    assert 40 <= after.expected_output_tokens <= 44 < before.expected_output_tokens
    assert estimated(trusting, "other") == others, "no other tenant is taught"


async def test_both_the_key_that_asks_and_the_one_that_reports_must_be_trusted() -> None:
    bench = Bench(trusted=("acme-prod",), slot_tokens_per_s=0.001)
    untrusted = bearer("sk-acme-test")
    await reported(bench, 6_000, by=untrusted, prompt_tokens=3_000, completion_tokens=40)
    assert bench.served.estimator.observations == 0
    await reported(bench, 6_000, prompt_tokens=3_000, completion_tokens=40)
    assert bench.served.estimator.observations == 1


@pytest.mark.parametrize(
    "usage",
    [{"status": "cancelled", "completion_tokens": 10}, {"completion_tokens": 50}],
    ids=["cancelled", "at-the-limit"],
)
async def test_an_answer_that_was_cut_is_a_lower_bound_of_its_length(
    trusting: Bench, usage: dict[str, Any]
) -> None:
    before = estimated(trusting).expected_output_tokens
    for _ in range(40):
        await reported(trusting, 6_000, max_tokens=50, prompt_tokens=1_500, **usage)
    assert trusting.served.estimator.observations == 40
    assert estimated(trusting).expected_output_tokens == before


async def test_failures_and_estimates_teach_nothing(trusting: Bench) -> None:
    await reported(trusting, 6_000, status="failed", prompt_tokens=3_000, completion_tokens=4)
    await trusting.authorize(lease_s=1)
    trusting.clock.now_s += 5.0
    trusting.desk.sweep()
    assert trusting.served.estimator.observations == 0


async def test_a_lease_that_nobody_reports_is_charged_its_estimate(bench: Bench) -> None:
    lease = (await bench.authorize(lease_s=10)).json()["lease_id"]
    bench.clock.advance(9.9)
    bench.desk.sweep()
    assert bench.desk.held == 1
    bench.clock.advance(0.1)
    bench.desk.sweep()
    assert (bench.desk.held, bench.account.total, bench.account.used) == (0, 0, 150)
    late = await bench.usage(lease, prompt_tokens=1)
    assert (late.json()["status"], late.json()["charge_tokens"]) == ("expired", 150)
    (record,) = bench.sink.records
    assert (record.outcome, record.usage.source, record.admission.charge_tokens) == (
        "expired",
        "counted",
        150,
    )


async def test_at_shutdown_what_is_held_is_settled(bench: Bench) -> None:
    await bench.authorize()
    await bench.authorize(OTHER)
    bench.desk.start()
    await bench.desk.close()
    assert (bench.desk.held, bench.store.active) == (0, 0)
    assert [r.outcome for r in bench.sink.records] == ["expired", "expired"]


async def test_one_tenant_can_hold_so_many_and_no_more_with_all_of_its_entitlements(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "MAX_HELD_EACH", 1)
    for _ in range(3):
        assert error(await bench.authorize(n=3))[0] == 400, "what is refused takes no place"
    lease = (await bench.authorize()).json()["lease_id"]
    for key in ("sk-acme", "sk-acme-test"):
        refused = await bench.authorize(bearer(key))
        assert error(refused) == (429, "rate_limit_exceeded", "too_many_leases")
    assert (await bench.authorize(OTHER)).status_code == 200
    await bench.usage(lease, prompt_tokens=1)
    assert (await bench.authorize()).status_code == 200


async def test_all_together_can_hold_so_many_and_no_more(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "MAX_HELD", 1)
    await bench.authorize()
    assert error(await bench.authorize(OTHER)) == (503, "too_many_leases", "too_many_leases")


async def test_what_is_remembered_of_ended_leases_is_bounded(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "RETAINED_SETTLED", 2)
    leases = []
    for _ in range(3):
        leases.append((await bench.authorize()).json()["lease_id"])
        await bench.usage(leases[-1], prompt_tokens=1)
    assert error(await bench.usage(leases[0], prompt_tokens=1))[0] == 404
    assert (await bench.usage(leases[1], prompt_tokens=1)).status_code == 200


async def test_a_client_that_leaves_amid_its_body_is_no_bug(bench: Bench) -> None:
    pieces = [{"type": "http.request", "body": b"{", "more_body": True}]
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return pieces.pop() if pieces else {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/admission/authorize",
        "raw_path": b"/admission/authorize",
        "query_string": b"",
        "headers": [(b"authorization", ACME["authorization"].encode())],
        "client": ("127.0.0.1", 1),
        "server": ("gateway", 80),
        "scheme": "http",
        "http_version": "1.1",
    }
    await bench.app(scope, receive, send)
    assert sent[0]["status"] == 499
