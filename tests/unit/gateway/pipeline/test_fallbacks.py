"""Another model answers where the asked one cannot; never for a limit of the tenant's own."""

import hashlib

import orjson
import pytest

from gateway.admission.terms import AdmissionRequest
from gateway.errors import RateLimited, Refusal, Unavailable
from gateway.records.decision import DecisionRecord
from gateway.records.lease import Lease
from gateway.records.request import Incoming, Principal, TenantKey
from gateway.routing.split_alias import SplitAlias
from gateway.tenancy.keyring import Keyring
from tests.builders import (
    OVERFLOWS,
    answer_body,
    changed,
    chat_body,
    error_answer,
    incoming,
    keyring_of,
    served_model,
)
from tests.fakes import (
    FakeStore,
    Script,
    failure,
    whole,
)
from tests.pipeline_bench import PipelineBench

OK = whole(200, answer_body())
E500 = whole(500, error_answer("CUDA error", code=500))
KEY = hashlib.sha256(b"sk-web").digest()


class Store(FakeStore):
    """Refuses the model `m`, and admits others."""

    async def admit(self, ask: AdmissionRequest) -> Lease:
        """See LeaseStore."""
        refusal, self.refuse_with = self.refuse_with, None
        if ask.model != "m" or refusal is None:
            return await super().admit(ask)
        self.refuse_with = refusal
        raise refusal


class Bench(PipelineBench):
    """The models m, which falls back on n and then o, over fakes."""

    def __init__(
        self, *script: Script, refusal: Refusal | None = None, opens: tuple[str, ...] = ()
    ) -> None:
        """`opens`: models that the tenant's key may use; without any the gateway is open."""
        asked = changed(served_model(workers=(1, 1)), fallbacks=("n", "o"))
        others = [changed(served_model(name=name), fallbacks=("m",)) for name in ("n", "o")]
        keyring = Keyring()
        if opens:
            keyring = keyring_of(tenant_keys=[TenantKey(tenant="t", name="web", sha256=KEY)])
            for name in opens:
                keyring.put(Principal(entitlement=f"e-{name}", tenant="t", model=name), ())
        super().__init__(
            *script,
            served=asked,
            store=Store(),
            keyring=keyring,
            models={model.name: model for model in (asked, *others)},
            splits={"both": SplitAlias("both", {"n": 1, "o": 1})},
        )
        self.store.refuse_with = refusal

    @property
    def records(self) -> list[DecisionRecord]:
        """Decision records, in order."""
        return self.sink.records


def full() -> Refusal:
    return RateLimited("full", reason="priority")


async def test_a_model_without_a_ready_worker_is_answered_by_its_fallback() -> None:
    bench = await Bench.answered(failure("connect"), failure("connect"), OK)
    assert (bench.reply.status, bench.reply.body) == (200, answer_body())
    assert bench.reply.headers[b"x-sluice-model"] == b"n"
    assert orjson.loads(bench.upstream.calls[-1][1].body)["model"] == "n"
    first, second = bench.records
    assert (first.outcome, first.reason, first.model) == ("fell_back", "no_worker_ready", "m")
    assert (second.outcome, second.model, second.asked_model) == ("ok", "n", "m")
    assert first.request_id == second.request_id
    assert first.admission.lease_id != second.admission.lease_id
    assert first.admission.charge_tokens is None, "a full refund"
    assert bench.store.active == 0
    assert len(bench.store.settlements) == 2


@pytest.mark.parametrize("fault", [E500, failure("timeout")])
async def test_engines_that_fail_before_the_first_byte_are_no_end(fault: Script) -> None:
    bench = await Bench.answered(*[fault] * 2, OK)
    assert bench.reply.headers[b"x-sluice-model"] == b"n"
    assert bench.reply.status == 200
    used = [settlement.dispatched for _, settlement in bench.store.settlements]
    assert used == [False, True], "one request takes one place in the minute"


async def test_a_request_that_ended_two_engines_gets_no_other_models() -> None:
    bench = await Bench.answered(failure("reset"))
    assert len(bench.upstream.calls) == 2
    assert [record.outcome for record in bench.records] == ["upstream_error"]


async def test_a_model_full_of_higher_priority_falls_back() -> None:
    bench = await Bench.answered(OK, refusal=full())
    assert bench.reply.status == 200
    assert [record.outcome for record in bench.records] == ["fell_back", "ok"]


@pytest.mark.parametrize(
    "refusal",
    [
        RateLimited("too fast", reason="tokens", retry_after_s=3.0),
        RateLimited("too many", reason="concurrency"),
        RateLimited("queued out", reason="queue_full"),
        Unavailable("degraded", reason="entitlement_degraded"),
    ],
)
async def test_a_tenants_own_limit_never_falls_over(refusal: Refusal) -> None:
    bench = await Bench.answered(OK, refusal=refusal)
    assert bench.reply.refusal is refusal
    assert not bench.upstream.calls
    assert [record.outcome for record in bench.records] == ["refused"]


async def test_fallbacks_are_tried_in_order_and_the_last_refusal_is_told() -> None:
    down = [failure("connect")] * 2
    bench = await Bench.answered(*down, *[failure("connect")] * 4, OK)
    assert bench.reply.headers[b"x-sluice-model"] == b"o"
    bench = await Bench.answered(*down, *[failure("connect")] * 8)
    assert bench.reply.reason == "no_worker_ready"
    assert [record.model for record in bench.records] == ["m", "n", "o"], "and not m again"
    assert [record.outcome for record in bench.records][:2] == ["fell_back"] * 2


async def test_a_fallback_that_the_key_does_not_open_is_passed_over() -> None:
    def asked() -> Incoming:
        return incoming(headers=[(b"authorization", b"Bearer sk-web")])

    bench = await Bench.answered(OK, refusal=full(), opens=("m", "o"), asked=asked())
    assert bench.reply.headers[b"x-sluice-model"] == b"o"
    assert [record.entitlement for record in bench.records] == ["e-m", "e-o"]
    bench = await Bench.answered(OK, refusal=full(), opens=("m",), asked=asked())
    assert bench.reply.reason == "priority"


async def test_a_prompt_that_is_too_long_does_not_change_its_model() -> None:
    overflow = whole(400, error_answer(OVERFLOWS[0]))
    bench = await Bench.answered(overflow, overflow, OK)
    assert [record.model for record in bench.records] == ["m"]
    assert bench.reply.status == 400


async def test_a_split_alias_keeps_a_conversation_at_its_model() -> None:
    seen: dict[str, set[str]] = {}
    for turn in range(2):
        for user in range(40):
            bench = Bench(OK)
            messages = [{"role": "user", "content": f"I am {user}"}]
            messages += [{"role": "assistant", "content": "hi"}] * turn
            body = {**orjson.loads(chat_body()), "model": "both", "messages": messages}
            await bench.serve(incoming(orjson.dumps(body)))
            name = bench.reply.headers[b"x-sluice-model"].decode()
            seen.setdefault(str(user), set()).add(name)
    assert all(len(names) == 1 for names in seen.values())
    assert set.union(*seen.values()) == {"n", "o"}


async def test_a_split_alias_keeps_to_the_models_that_a_key_opens() -> None:
    for user in range(20):
        bench = Bench(OK, opens=("o",))
        body = {**orjson.loads(chat_body()), "model": "both", "user": f"u{user}"}
        key = [(b"authorization", b"Bearer sk-web")]
        await bench.serve(incoming(orjson.dumps(body), headers=key))
        assert bench.reply.headers[b"x-sluice-model"] == b"o"
