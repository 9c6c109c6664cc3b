"""What is held of requests is bounded: who holds most without a key is dropped, keys share.

Large bodies are read a little in each turn of the loop, and begin to be answered one by one.
"""

import asyncio
from contextlib import suppress
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.errors import RateLimited, Unavailable
from gateway.http.body_bytes import BodyBytes, LargeBodies, Share

MIB = 2**20


class Holder:
    def __init__(self, bodies: BodyBytes) -> None:
        self.bodies = bodies
        self.size = 0
        self.dropped = 0

    def hold(self, size: int) -> None:
        self.size = size
        self.bodies.hold(self.drop, size)

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


# -- turns of the loop


class Sender(asyncio.Transport):
    """A connection that always has more to be read, in pieces of 100 bytes."""

    def __init__(self, large: LargeBodies) -> None:
        super().__init__()
        self.large = large
        self.read = 0
        self.paused = False

    def turn(self) -> int:
        """Read as the event loop would: as long as there is something, until it pauses."""
        before = self.read
        while not self.paused:
            self.read += 100
            self.large.took(self, 100, asyncio.get_running_loop())
        return self.read - before

    def pause_reading(self) -> None:
        self.paused = True

    def resume_reading(self) -> None:
        self.paused = False

    def is_closing(self) -> bool:
        return False


async def test_a_turn_reads_a_bounded_part_and_everybody_goes_on() -> None:
    large = LargeBodies(turn_bytes=500)
    senders = [Sender(large) for _ in range(20)]
    for sender in senders:
        sender.turn()
    for _ in range(200):
        await asyncio.sleep(0)
        # Of those that may read on each reads a piece at least.
        assert sum(sender.turn() for sender in senders) <= 500 + 100
    for sender in senders:
        assert sender.read
    most, least = max(s.read for s in senders), min(s.read for s in senders)
    assert least > 0.5 * most


async def test_a_sender_alone_is_not_held_up() -> None:
    large = LargeBodies(turn_bytes=500)
    sender = Sender(large)
    for _ in range(100):
        assert sender.turn()
        await asyncio.sleep(0)
        await asyncio.sleep(0)


async def test_answers_to_large_bodies_begin_one_in_a_turn() -> None:
    large, began = LargeBodies(), []

    async def answer(number: int) -> None:
        await large.alone()
        began.append(number)

    answering = [asyncio.create_task(answer(number)) for number in range(5)]
    await asyncio.sleep(0)
    answering[1].cancel()
    for _ in range(20):
        before = len(began)
        await asyncio.sleep(0)
        assert len(began) <= before + 1
    assert began == [0, 2, 3, 4]
