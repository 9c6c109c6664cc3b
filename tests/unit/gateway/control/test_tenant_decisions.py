"""A tenant sees its own requests, and of workers what the answer's headers said."""

from collections import Counter

import msgspec
import pytest

from gateway.control import tenant_decisions
from gateway.control.tenant_decisions import finder
from gateway.records.attempt import Attempt
from gateway.records.decision import AdmissionSection, DecisionRecord, SchedulingSection
from gateway.usage.request_log import DecisionRing


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


def test_its_own_request_is_told_with_its_story() -> None:
    found = finder(ring_of(record("acme")).find)("r-1", "acme")
    assert found is not None
    told = msgspec.json.decode(found)
    assert (told["pool"], told["worker"]) == ("short", "w-own")
    assert told["admission"]["charge_tokens"] == 12
    assert told["story"][-1] == "The request was served; acme-prod was charged 12 tokens."


def test_nothing_is_told_of_other_workers_or_the_prompt() -> None:
    found = finder(ring_of(record("acme")).find)("r-1", "acme")
    assert found is not None
    for secret in (b"w-secret", b"777", b"lease-secret", b"other", b"the body"):
        assert secret not in found


def test_the_request_of_another_tenant_is_not_found() -> None:
    find = finder(ring_of(record("acme")).find)
    assert find("r-1", "rival") is None
    assert find("r-2", "acme") is None


def test_of_an_id_that_several_tenants_sent_each_finds_its_own() -> None:
    many = [record("filler", f"f-{i}") for i in range(150)]
    find = finder(ring_of(*many[:75], record("acme"), record("rival"), *many[75:90]).find)
    for tenant in ("acme", "rival"):
        found = find("r-1", tenant)
        assert found is not None
        assert msgspec.json.decode(found)["tenant"] == tenant


def test_a_look_up_reads_one_record_however_often_others_used_the_id(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read = Counter[str]()
    decode = tenant_decisions._decode

    def counted(line: bytes) -> DecisionRecord:
        read["records"] += 1
        return decode(line)

    monkeypatch.setattr(tenant_decisions, "_decode", counted)
    ring = DecisionRing(1_000)
    for name in ("acme", *["rival"] * 800):
        ring.append("r-1", msgspec.json.encode(record(name)), name)
    find = finder(ring.find)
    assert find("r-1", "acme") is not None
    assert find("r-1", "nobody") is None
    assert read["records"] == 1


def test_a_record_whose_hash_alone_fits_is_not_shown() -> None:
    line = msgspec.json.encode(record("rival"))
    assert finder(lambda _id, _tenant: line)("r-1", "acme") is None
