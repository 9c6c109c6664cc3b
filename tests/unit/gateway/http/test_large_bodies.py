"""Large bodies are read a little in each turn of the loop, and begin to be answered one by one."""

import asyncio

from gateway.http.large_bodies import LargeBodies


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
