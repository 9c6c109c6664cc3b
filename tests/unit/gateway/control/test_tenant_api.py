"""The tenant API: a tenant's own terms, counters and decisions, and nobody else's."""

from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import httpx
import msgspec
import pytest
from fastapi import FastAPI, Response

from gateway.admission.entitlement_terms import ModelShape
from gateway.admission.terms import Terms
from gateway.admission.token_pool import TokenPool
from gateway.control import tenant_api
from gateway.control.tenant_api import own_decision, tenant_router
from gateway.errors import BadRequest, NotFound, Unauthorized, Unavailable
from gateway.http.body_bytes import BodyBytes
from gateway.metrics import Metrics
from gateway.payload.head import digest_of
from gateway.pipeline.quote import Quoter
from gateway.ports import AccountView
from gateway.records.attempt import Attempt
from gateway.records.decision import (
    AdmissionSection,
    DecisionRecord,
    RequestSection,
    SchedulingSection,
)
from gateway.records.entitlement import Entitlement
from gateway.records.limit import Limit
from gateway.records.request import Principal, RequestHead
from gateway.store.memory_leases import MemoryLeases
from gateway.usage.request_log import DecisionRing
from tests.builders import ask, served_model
from tests.control import Replies, bearer, control_of
from tests.fakes import FakeClock

ACME = Entitlement(
    name="acme-prod",
    model="m",
    tenant="acme",
    service_class="elastic",
    slo_ms=500,
    baseline=(3, 1),
    limit=6,
    tokens_per_s=100.0,
    kv_bytes=1 << 30,
)
WHOLE = Limit(id="tenant:acme:tokens:day", scope="tenant", name="acme", unit="tokens", amount=9)
RIVAL = msgspec.structs.replace(ACME, name="rival-prod", tenant="rival", tokens_per_s=7_777.0)
OWNERS = {
    digest_of(b"sk-acme"): Principal(entitlement="acme-prod", tenant="acme", model="m"),
    digest_of(b"sk-plain"): Principal(entitlement="plain", tenant="acme", model="bare"),
    digest_of(b"sk-both"): Principal(
        entitlement="",
        tenant="acme",
        key="both",
        choices={
            model: tuple(
                Principal(entitlement=f"{model}-{n}", tenant="acme", model=model, limits=(WHOLE,))
                for n in range(40)
            )
            for model in ("m", "bare")
        },
    ),
    b"": Principal(entitlement="open", tenant="open"),
}


def record(tenant: str, request_id: str = "r-1") -> DecisionRecord:
    return DecisionRecord(
        schema=2,
        time_unix_s=1.0,
        request_id=request_id,
        endpoint="chat",
        outcome="ok",
        status=200,
        tenant=tenant,
        entitlement=f"{tenant}-prod",
        pool="short",
        worker="w-own",
        prompt="the body",
        request=RequestSection(body_bytes=900, prompt_digests=((888, 86753091),)),
        attempts=(Attempt(pool="short", worker="w-secret", result="connect"),),
        scheduling=SchedulingSection(candidates=(("w-secret", 3.0),), backlog_tokens=777),
        admission=AdmissionSection(
            lease_id="lease-secret", alternates=("other",), priority=5.0, charge_tokens=12
        ),
    )


def ring_of(*records: DecisionRecord) -> DecisionRing:
    ring = DecisionRing(100)
    for each in records:
        ring.append(each.request_id, msgspec.json.encode(each), each.tenant)
    return ring


class Bench:
    """The route over the embedded store."""

    def __init__(self) -> None:
        self.clock = FakeClock(1_000.0)
        self.metrics = Metrics()
        self.book = TokenPool(Terms(slots=(8, 8), largest_tokens=65536))
        for terms in (ACME, RIVAL):
            self.book.define(terms)
        self.store = MemoryLeases(
            {"m": served_model()}, self.clock, {"m": self.book}, wall_clock=self.clock
        )
        self.peers = Replies()
        self.limits_read = 0
        self.viewed: list[tuple[str, int]] = []
        self.ring = ring_of(record("acme"))
        self.terms = {each.name: each for each in (ACME, RIVAL)}
        shape = ModelShape(name="m", pools=("short", "long"), slots=(8, 8))
        self.shapes = {"m": shape, "bare": shape}
        app = FastAPI()
        app.add_exception_handler(
            NotFound, lambda _request, refusal: Response(str(refusal), status_code=404)
        )
        app.include_router(
            tenant_router(
                control_of(
                    authenticate=self._authenticate,
                    registry=SimpleNamespace(find=self.terms.get),
                    view=self._view,
                    budgets=self,
                    peers=self.peers,
                    shapes=self.shapes,
                    metrics=self.metrics,
                    ring=self.ring,
                ),
                cast("Quoter", None),
                BodyBytes(200_000),
            )
        )
        self.client = httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://g")

    async def shown(self, limits: Sequence[Limit]) -> list[dict[str, object]]:
        self.limits_read += 1
        return [{"id": limit.id} for limit in limits]

    async def _view(self, model: str, names: Sequence[str]) -> list[AccountView]:
        self.viewed.append((model, len(names)))
        return await self.store.view(model, names)

    async def decision(self, request_id: str, key: str) -> httpx.Response:
        """The answer of a look-up."""
        return await self.client.get(f"/v1/sluice/decisions/{request_id}", headers=bearer(key))

    async def me(self, key: str = "sk-acme", query: str = "") -> dict[str, Any]:
        """The answer for a key."""
        headers = bearer(key) if key else {}
        answer = await self.client.get("/v1/sluice/me" + query, headers=headers)
        assert answer.status_code == 200
        found: dict[str, Any] = answer.json()
        return found

    @staticmethod
    async def _authenticate(head: RequestHead) -> Principal:
        owner = OWNERS.get(head.key_digest or b"")
        if owner is None:
            raise Unauthorized("no", reason="invalid_api_key")
        return owner


async def test_terms_are_told_as_they_are_written() -> None:
    found = await Bench().me()
    assert (found["entitlement"], found["tenant"], found["model"], found["managed"]) == (
        "acme-prod",
        "acme",
        "m",
        True,
    )
    assert found["terms"].keys().isdisjoint({"name", "tenant", "model"})
    stated = {"service_class": "elastic", "slo_target_ms": 500, "max_concurrency": 6}
    stated |= {"kv_cache_gib": 1.0, "concurrency": {"short": 3, "long": 1}, "expires_at": None}
    assert found["terms"].items() >= stated.items()


async def test_a_quote_s_body_counts_in_what_requests_hold() -> None:
    content = b" " * 250_000
    with pytest.raises(Unavailable, match="bodies"):
        await Bench().client.post("/v1/sluice/quote", content=content, headers=bearer("sk-acme"))


async def test_counters_follow_what_is_in_flight() -> None:
    bench = Bench()
    idle = await bench.me()
    assert idle["state"] == "bound"
    assert idle["usage"]["in_flight"] == {"short": 0, "long": 0}
    asked = msgspec.structs.replace(
        ask("l1", cost_tokens=1_000, sequences=2), entitlement="acme-prod", kv_bytes=5
    )
    await bench.store.admit(asked)
    usage = (await bench.me())["usage"]
    assert usage["in_flight"] == {"short": 2, "long": 0}
    assert (usage["kv_bytes"], usage["debited_tokens"], usage["used_tokens"]) == (5, 1_000, 0)
    assert usage["bucket_depth_tokens"] - usage["bucket_tokens"] == pytest.approx(1_000)
    assert usage["weight"] > 1
    assert (usage["debt"], usage["burst"]) == (0, 0)


async def test_a_model_that_is_leaving_has_no_terms_to_tell() -> None:
    bench = Bench()
    bench.shapes.clear()
    found = await bench.me()
    assert found["entitlement"] == "acme-prod"
    assert "terms" not in found


async def test_a_key_of_many_entitlements_asks_each_store_and_the_replicas_once() -> None:
    bench = Bench()
    for model in ("m", "bare"):
        for n in range(40):
            name = f"{model}-{n}"
            terms = msgspec.structs.replace(ACME, name=name, model=model)
            bench.terms[name] = terms
            if model == "m":
                bench.book.define(terms)
    found = await bench.me("sk-both")
    rows = found["entitlements"]
    assert [row["entitlement"] for row in rows] == [
        f"{model}-{n}" for model in ("m", "bare") for n in range(40)
    ]
    assert all(row["limits"] == [{"id": WHOLE.id}] for row in rows)
    assert [row["state"] for row in rows[:40]] == ["bound"] * 40
    assert not any("usage" in row for row in rows[40:])
    assert bench.viewed == [("m", 40)]
    assert sorted(topic for topic, _ in bench.peers.asked) == ["refused", "slo"]
    assert bench.limits_read == 1


async def test_a_key_of_many_entitlements_is_told_page_by_page() -> None:
    bench = Bench()
    whole = await bench.me("sk-both")
    seen, after = [], ""
    while True:
        page = await bench.me("sk-both", f"?limit=30{after}")
        seen += page["entitlements"]
        if page["next"] is None:
            break
        after = f"&after={page['next']}"
    assert seen == whole["entitlements"]
    assert whole["next"] is None
    with pytest.raises(BadRequest):
        await bench.me("sk-both", "?after=gone")


async def test_nothing_of_other_tenants_is_told() -> None:
    bench = Bench()
    bench.metrics.admission.add("rival-prod", "denied", "kv")
    bench.metrics.slo_requests.add("rival-prod", "false")
    text = str(await bench.me())
    assert "rival" not in text
    assert "7777" not in text
    assert "kv'" not in text


async def test_of_a_model_that_is_not_managed_there_is_no_usage() -> None:
    bench = Bench()
    bench.terms["plain"] = Entitlement(name="plain", model="bare", tenant="acme")
    found = await bench.me("sk-plain")
    assert found["managed"] is False
    assert found["terms"]["service_class"] == "elastic"
    assert "usage" not in found


async def test_an_open_gateway_has_no_terms_to_tell() -> None:
    found = await Bench().me("")
    assert found == {
        "entitlement": "open",
        "tenant": "open",
        "model": None,
        "managed": False,
        "refused": {},
    }


async def test_a_tenant_looks_up_its_own_decisions_with_any_of_its_keys() -> None:
    bench = Bench()
    bench.ring.append("r-2", msgspec.json.encode(record("rival", "r-2")), "rival")
    for key in ("sk-acme", "sk-plain"):
        answer = await bench.decision("r-1", key)
        assert (answer.status_code, answer.json()["request_id"]) == (200, "r-1")
        assert (await bench.decision("r-2", key)).status_code == 404, "somebody else's"
    with pytest.raises(Unauthorized):
        await bench.decision("r-2", "sk-unknown")


def test_its_own_request_is_told_with_its_story_and_nothing_of_other_workers() -> None:
    found = own_decision(ring_of(record("acme")), "r-1", "acme")
    assert found is not None
    told = msgspec.json.decode(found)
    assert (told["pool"], told["worker"]) == ("short", "w-own")
    assert told["admission"]["charge_tokens"] == 12
    assert told["story"][-1] == "The request was served; acme-prod was charged 12 tokens."
    for secret in (b"w-secret", b"777", b"lease-secret", b"other", b"the body", b"86753091"):
        assert secret not in found


def test_of_an_id_that_several_tenants_sent_each_finds_its_own() -> None:
    many = [record("filler", f"f-{i}") for i in range(150)]
    ring = ring_of(*many[:75], record("acme"), record("rival"), *many[75:90])
    for tenant in ("acme", "rival"):
        found = own_decision(ring, "r-1", tenant)
        assert found is not None
        assert msgspec.json.decode(found)["tenant"] == tenant


def test_a_look_up_reads_one_record_however_often_others_used_the_id(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read = Counter[str]()
    decode = tenant_api._decode

    def counted(line: bytes) -> DecisionRecord:
        read["records"] += 1
        return decode(line)

    monkeypatch.setattr(tenant_api, "_decode", counted)
    ring = DecisionRing(1_000)
    for name in ("acme", *["rival"] * 800):
        ring.append("r-1", msgspec.json.encode(record(name)), name)
    assert own_decision(ring, "r-1", "acme") is not None
    assert own_decision(ring, "r-1", "nobody") is None
    assert read["records"] == 1


def test_a_record_whose_hash_alone_fits_is_not_shown() -> None:
    ring = DecisionRing(100)
    ring.append("r-1", msgspec.json.encode(record("rival")), "acme")
    assert own_decision(ring, "r-1", "acme") is None
