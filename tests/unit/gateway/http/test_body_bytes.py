"""What is held of requests is bounded: who holds most without a key is dropped, keys share."""

from contextlib import suppress
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.errors import RateLimited, Unavailable
from gateway.http.body_bytes import BodyBytes, Share

MIB = 2**20


class Holder:
    def __init__(self, bodies: BodyBytes) -> None:
        self.bodies = bodies
        self.size = 0
        self.dropped = 0

    def hold(self, size: int) -> None:
        self.size = size
        self.bodies.hold(self, size)

    def drop(self) -> None:
        self.dropped += 1
        self.hold(0)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 60)), max_size=60))
def test_the_sum_is_that_of_the_holders_and_bounded(steps: list[tuple[int, int]]) -> None:
    bodies = BodyBytes(most_unproven_bytes=100)
    holders = [Holder(bodies) for _ in range(10)]
    for who, size in steps:
        holders[who].hold(size)
        assert bodies.unproven == sum(holder.size for holder in holders) <= 100


def test_who_holds_most_is_dropped_and_who_holds_little_stays() -> None:
    bodies = BodyBytes(most_unproven_bytes=1_000)
    small = [Holder(bodies) for _ in range(50)]
    greedy = [Holder(bodies) for _ in range(3)]
    for holder in small:
        holder.hold(5)
    for step in range(1, 100):
        for holder in greedy:
            holder.hold(10 * step)
    assert not any(holder.dropped for holder in small)
    assert all(holder.dropped for holder in greedy)


# -- bodies sent with a known key


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 60)), max_size=60), st.randoms())
def test_bodies_are_bounded_and_given_back(steps: list[tuple[int, int]], rng: Random) -> None:
    bodies = BodyBytes(200 * 1024)
    shares: list[tuple[Share, int]] = []
    for who, size_kib in steps:
        share = Share(bodies, f"owner {who}")
        with suppress(RateLimited, Unavailable):
            share.cover(size_kib * 1024)
            shares.append((share, size_kib * 1024 if size_kib > 16 else 0))
        if rng.random() < 0.3 and shares:
            share, _ = shares.pop(rng.randrange(len(shares)))
            share.give_back()
            share.give_back()
        assert bodies.total == sum(size for _, size in shares) <= 200 * 1024
    for share, _ in shares:
        share.give_back()
    assert bodies.total == 0


def test_one_entitlement_leaves_room_for_others() -> None:
    bodies = BodyBytes(1_000 * MIB)
    with suppress(RateLimited):
        for _ in range(100):
            Share(bodies, "greedy").cover(32 * MIB)
    assert 468 * MIB < bodies.total <= 500 * MIB
    with pytest.raises(RateLimited) as own:
        Share(bodies, "greedy").cover(32 * MIB)
    assert own.value.reason == "too_many_body_bytes"
    assert own.value.retry_after_s
    for n in range(10):
        Share(bodies, f"other {n}").cover(32 * MIB)
    Share(bodies, "large").cover(160 * MIB)  # one body of an entitlement needs only to fit
    with pytest.raises(Unavailable) as full:
        Share(bodies, "late").cover(160 * MIB)
    assert full.value.retry_after_s


def test_a_body_that_grows_past_the_share_gives_all_of_it_back() -> None:
    bodies = BodyBytes(100 * MIB)
    share = Share(bodies, "a")
    Share(bodies, "a").cover(20 * MIB)
    share.cover(20 * MIB)
    with pytest.raises(RateLimited):
        share.cover(60 * MIB)
    assert bodies.total == 20 * MIB
