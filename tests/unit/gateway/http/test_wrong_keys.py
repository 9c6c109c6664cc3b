"""Who tries keys is slowed, by address; what is kept of addresses is bounded."""

import pytest

from gateway.http.wrong_keys import (
    APART_S,
    DELAY_S,
    FORGIVEN_EVERY_S,
    FREE,
    MAX_ADDRESSES,
    MAX_DELAY_S,
    WrongKeys,
)
from tests.fakes import FakeClock


def test_some_refusals_are_free_and_more_wait_until_forgiven() -> None:
    clock = FakeClock()
    keys = WrongKeys(clock)
    assert [keys.delay_s("10.0.0.1") for _ in range(FREE)] == [0.0] * FREE
    assert keys.delay_s("10.0.0.1") == DELAY_S
    assert keys.delay_s("10.0.0.2") == 0.0, "another address"
    clock.advance(FORGIVEN_EVERY_S)
    assert [keys.delay_s("10.0.0.1") for _ in range(2)] == [0.0, DELAY_S]
    clock.advance(FREE * FORGIVEN_EVERY_S)
    assert [keys.delay_s("10.0.0.1") for _ in range(FREE + 1)] == [0.0] * FREE + [DELAY_S]


def test_many_connections_of_one_address_guess_no_faster_than_a_few() -> None:
    keys = WrongKeys(FakeClock())
    for _ in range(FREE):
        keys.delay_s("10.0.0.1")
    late_s = [keys.delay_s("10.0.0.1") for _ in range(10_000)]
    assert late_s[:3] == [pytest.approx(DELAY_S + n * APART_S) for n in range(3)]
    assert late_s == sorted(late_s)
    assert max(late_s) == MAX_DELAY_S
    assert keys.delay_s("10.0.0.2") == 0.0, "another address"


def test_what_is_kept_of_addresses_is_bounded() -> None:
    keys = WrongKeys(FakeClock())
    for _ in range(FREE + 1):
        keys.delay_s("10.0.0.1")
    for n in range(3 * MAX_ADDRESSES):
        keys.delay_s(f"192.168.{n >> 8}.{n & 255}")
        if n % 100 == 0:
            assert keys.delay_s("10.0.0.1") >= DELAY_S, "who goes on is not forgotten"
    assert len(keys._noted) <= MAX_ADDRESSES


def test_an_ipv6_network_is_one_address() -> None:
    keys = WrongKeys(FakeClock())
    for n in range(FREE):
        assert keys.delay_s(f"2001:db8:0:1::{n:x}") == 0.0
    assert keys.delay_s("2001:db8:0:1:ffff::1") == DELAY_S
    assert keys.delay_s("2001:db8:0:2::1") == 0.0
    for n in range(FREE):
        assert keys.delay_s(f"::ffff:10.0.0.{n}") == 0.0, "IPv4 in IPv6's dress"
    assert keys.delay_s("fe80::1%eth0") == keys.delay_s("somewhere:else") == 0.0
