"""Leases by id and by expiry, in parts that stay small."""

from collections import OrderedDict
from random import Random

import pytest

from gateway.policy.token_pool.counters import SHARDS, OpenLeases
from gateway.policy.token_pool.terms import LeaseRecord


def held(lease_id: str) -> LeaseRecord:
    return LeaseRecord(
        id=lease_id,
        entitlement="e",
        pool=0,
        sequences=1,
        estimate_tokens=1,
        kv_bytes=0,
        weight=1.0,
        issued_s=0.0,
        expires_s=30.0,
        funded="own",
        owner="o",
        would_deny="",
    )


def test_the_first_to_expire_is_known_whatever_came_ended_and_was_renewed() -> None:
    draw = Random(2)
    leases, expected = OpenLeases(), OrderedDict[str, LeaseRecord]()
    for number in range(6_000):
        known = list(expected)[: draw.randrange(1, 20)]
        step = draw.random()
        if known and step < 0.3:
            assert leases.take(known[-1]) is expected.pop(known[-1])
        elif known and step < 0.5:
            leases.renewed(known[-1])
            expected.move_to_end(known[-1])
        else:
            leases[f"l{number}"] = expected[f"l{number}"] = held(f"l{number}")
        assert leases.first() is next(iter(expected.values()), None)
    assert dict(leases) == dict(expected)
    assert len(leases) == len(expected)


def test_no_part_holds_more_than_its_share() -> None:
    leases = OpenLeases()
    for number in range(64_000):
        leases[f"lease-{number}"] = held(f"lease-{number}")
    assert leases.longest_shard < 1.3 * 64_000 / SHARDS


def test_it_is_a_mapping() -> None:
    leases = OpenLeases()
    assert leases.first() is None
    assert leases.take("a") is None
    leases["a"] = first = held("a")
    leases["a"] = again = held("a")
    assert (leases["a"], leases.get("b"), leases.get("b", 7), len(leases)) == (again, None, 7, 1)
    assert leases["a"] is not first
    assert "a" in leases
    assert "b" not in leases
    del leases["a"]
    assert (list(leases), len(leases)) == ([], 0)
    with pytest.raises(KeyError):
        del leases["a"]
