"""Connections dealt out by the parent: evenly, none lost while there is a worker."""

import asyncio
import os
import socket
from collections.abc import AsyncIterator

import pytest

from gateway.adapters.shared.handover import Door, bound
from gateway.adapters.shared.way import Way


class Echo(asyncio.Protocol):
    """Says which worker it belongs to."""

    def __init__(self, name: bytes) -> None:
        self._name = name

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self.transport = transport
        transport.write(self._name)


class House:
    """A door and workers behind it."""

    def __init__(self) -> None:
        (listener,) = bound("127.0.0.1", 0)
        self.port: int = listener.getsockname()[1]
        self.door = Door([listener])
        self.ways: dict[int, Way] = {}
        self.taken: list[Echo] = []
        self._clients: list[asyncio.StreamWriter] = []

    def join(self, index: int) -> None:
        ours, theirs = socket.socketpair()
        way = self.ways[index] = Way(theirs)
        way.open(lambda: self._made(index))
        self.door.add(index, ours)

    def _made(self, index: int) -> Echo:
        self.taken.append(Echo(b"%d" % index))
        return self.taken[-1]

    async def served_by(self) -> int:
        """A new client's worker."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        self._clients.append(writer)
        return int(await asyncio.wait_for(reader.readexactly(1), 5))

    async def close(self) -> None:
        self.door.close()
        for way in self.ways.values():
            way.close()
        for client in self._clients:
            client.close()
        await asyncio.sleep(0.01)


@pytest.fixture
async def house() -> AsyncIterator[House]:
    found = House()
    yield found
    await found.close()


async def test_every_worker_gets_as_many(house: House) -> None:
    for index in range(3):
        house.join(index)
    house.door.listen()
    served = [await house.served_by() for _ in range(12)]
    assert [served.count(index) for index in range(3)] == [4, 4, 4]


async def test_a_worker_whose_clients_left_gets_the_next(house: House) -> None:
    house.join(0)
    house.join(1)
    house.door.listen()
    for _ in range(6):
        await house.served_by()
    house.door.told(1, 3, 0)
    assert [await house.served_by() for _ in range(3)] == [1, 1, 1]


async def test_a_newcomer_gets_all_until_it_has_as_many(house: House) -> None:
    house.join(0)
    house.door.listen()
    for _ in range(3):
        await house.served_by()
    house.join(1)
    assert [await house.served_by() for _ in range(3)] == [1, 1, 1]


async def test_without_a_worker_clients_wait_for_one(house: House) -> None:
    house.join(0)
    house.door.listen()
    assert await house.served_by() == 0
    house.door.remove(0)
    waiting = asyncio.ensure_future(house.served_by())
    await asyncio.sleep(0.02)
    assert not waiting.done()
    house.join(1)
    assert await waiting == 1


async def test_a_worker_that_takes_none_is_passed_over(house: House) -> None:
    house.join(0)
    house.join(1)
    house.ways[0].close()
    house.door.listen()
    assert [await house.served_by() for _ in range(4)] == [1, 1, 1, 1]


@pytest.mark.parametrize(
    ("answered", "asked"),
    [
        ((50, 50), []),
        ((55, 45), []),
        ((62, 38), [(0, 1)]),
        ((10, 90), [(1, 2)]),
        ((5, 0), []),  # too few to say
    ],
)
async def test_who_answers_clearly_more_gives_away(
    house: House, answered: tuple[int, int], asked: list[tuple[int, int]]
) -> None:
    found: list[tuple[int, int]] = []
    house.door.ask_back = lambda index, count: found.append((index, count))
    for index in range(2):
        house.join(index)
    compare(house, *answered)
    assert found == [], "once is what workers tell at different times"
    compare(house, *answered)
    assert found == asked
    compare(house)
    assert found == asked, "each quarter of a second by itself"


async def test_who_tells_at_other_times_gives_nothing_away(house: House) -> None:
    found: list[tuple[int, int]] = []
    house.door.ask_back = lambda index, count: found.append((index, count))
    for index in range(2):
        house.join(index)
    for _ in range(4):
        compare(house, 60, 40)
        compare(house, 40, 60)
    compare(house, 60, 40)
    compare(house, 50, 50)
    compare(house, 60, 40)
    compare(house, 5, 0)
    compare(house, 60, 40)
    assert found == []
    compare(house, 60, 40)
    assert found == [(0, 1)]


def compare(house: House, *answered: int) -> None:
    """The shares, of workers that answered so many requests each."""
    for index, requests in enumerate(answered):
        house.door.told(index, 0, requests)
    house.door._even()


async def test_who_has_far_too_many_gives_half_of_them_away(house: House) -> None:
    found: list[tuple[int, int]] = []
    house.door.ask_back = lambda index, count: found.append((index, count))
    house.join(0)
    house.door.listen()
    for _ in range(24):
        await house.served_by()
    house.join(1)
    compare(house, 300, 100)
    compare(house, 300, 100)
    assert found == [(0, 4)], "of 24 it should have 16"


async def test_a_connection_given_away_is_served_by_the_least_busy(house: House) -> None:
    for index in range(3):
        house.join(index)
    house.door.listen()
    reader, writer = await asyncio.open_connection("127.0.0.1", house.port)
    house._clients.append(writer)
    assert await reader.readexactly(1) == b"0"
    compare(house, 90, 20, 3)
    compare(house, 90, 20, 3)
    (served,) = house.taken
    transport = served.transport
    mine = transport.get_extra_info("socket")
    house.ways[0].give_away(socket.socket(fileno=os.dup(mine.fileno())))
    transport.close()
    assert await asyncio.wait_for(reader.readexactly(1), 5) == b"2", "the same connection"


def test_a_port_in_use_is_refused_at_once() -> None:
    (first,) = bound("127.0.0.1", 0)
    with first:
        first.listen()
        with pytest.raises(OSError, match="in use"):
            bound("127.0.0.1", first.getsockname()[1])


def test_all_addresses_of_a_host_get_the_same_port() -> None:
    found = bound("localhost", 0)
    assert len({sock.getsockname()[1] for sock in found}) == 1
    for sock in found:
        sock.close()
