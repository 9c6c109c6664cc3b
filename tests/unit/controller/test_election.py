"""One of several controllers acts at a time, whatever the network does to their calls."""

import asyncio
import copy
import logging
from collections.abc import Mapping
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.election import DURATION_S, RENEWAL_LIMIT_S, Election, Superseded
from controller.kube import Away, Conflict, Forbidden, NotFound
from controller.records import Call, Object, Resource
from tests.virtual_time import run

CLEANUP_S = 3.0
"""How long work may take to end."""


class Leases:
    """The server's side: one Lease, with optimistic locking."""

    def __init__(self) -> None:
        self.lease: Object | None = None
        self.version = 10

    def write(self, body: Mapping[str, Any] | None, *, create: bool = False) -> Object:
        """Read, create or patch."""
        if create and self.lease is not None:
            raise Conflict("it exists")
        if not create and self.lease is None:
            raise NotFound("no such Lease")
        if body is not None:
            held: Object = self.lease or {"metadata": {}, "spec": {}}
            wanted = body.get("metadata", {}).get("resourceVersion")
            if wanted is not None and wanted != held["metadata"]["resourceVersion"]:
                raise Conflict("another version")
            self.version += 1
            metadata = {"name": "it", "resourceVersion": str(self.version)}
            self.lease = {"metadata": metadata, "spec": {**held["spec"], **body["spec"]}}
        assert self.lease is not None
        return copy.deepcopy(self.lease)


class Network:
    """One candidate's way to the server, on which calls are late, lost, or lose their answers."""

    namespace = "team"

    def __init__(self, server: Leases, draw: Random | None = None) -> None:
        self.server = server
        self.draw = draw
        self.cut = False
        self.phase, self.phase_until_s = "good", 0.0

    def _fate(self) -> tuple[float, float, bool]:
        """Delays there and back, and whether the call is lost; good and bad times last a while."""
        if self.draw is None:
            return 0.01, 0.01, self.cut
        now_s = asyncio.get_running_loop().time()
        if now_s >= self.phase_until_s:
            self.phase_until_s = now_s + self.draw.choice((3.0, 15.0, 40.0))
            self.phase = self.draw.choice(("good", "good", "slow", "away"))
        if self.phase != "slow":
            return 0.01, 0.01, self.cut or self.phase == "away"
        late = (0.1, 1.0, 3.0, 4.6, 12.0)
        return self.draw.choice(late), self.draw.choice(late), self.draw.random() < 0.2

    async def _call(self, body: Mapping[str, Any] | None, *, create: bool = False) -> Object:
        there_s, back_s, lost = self._fate()
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Object] = loop.create_future()

        def arrives() -> None:  # also where the caller gave up meanwhile
            if self.cut:
                return
            try:
                answer = self.server.write(body, create=create)
            except Exception as error:  # noqa: BLE001
                if not done.done():
                    done.set_exception(error)
            else:
                if not done.done():
                    done.set_result(answer)

        if not lost:
            loop.call_later(there_s, arrives)
        try:
            async with asyncio.timeout(5.0):
                answer = await done
                await asyncio.sleep(back_s)
        except TimeoutError:
            raise Away("no answer") from None
        return answer

    async def get(self, resource: Resource, name: str) -> Object:
        return await self._call(None)

    async def make(self, call: Call) -> Object:
        return await self._call(call.body, create=call.verb == "create")


class Work:
    """What leaders do; asserts that they do it alone."""

    def __init__(self) -> None:
        self.acting: set[int] = set()
        self.epochs: list[int] = []
        self.began_s: list[float] = []

    async def lead(self, epoch: int) -> None:
        assert not self.acting, "two act"
        assert not self.epochs or epoch > self.epochs[-1], "the epoch did not rise"
        self.epochs.append(epoch)
        self.began_s.append(asyncio.get_running_loop().time())
        self.acting.add(epoch)
        try:
            await asyncio.sleep(10**6)
        finally:
            await asyncio.sleep(CLEANUP_S)
            self.acting.discard(epoch)


def candidate(network: Network, name: str) -> Election:
    """Clocks of machines differ by hours."""
    loop, skew_s = asyncio.get_running_loop(), 3600.0 * hash(name)
    clock = {"unix_s": lambda: 1.8e9 + skew_s % 86_400 + loop.time()}
    return Election(network, name="it", identity=name, **clock)  # type: ignore[arg-type]


@given(seed=st.integers(0, 1 << 32), cut_after_s=st.floats(0, 200))
@settings(max_examples=150)
def test_one_acts_at_a_time_and_epochs_rise(seed: int, cut_after_s: float) -> None:
    draw = Random(seed)  # Hypothesis's own may end an example in a task, or while it is collected

    async def scene() -> None:
        server, work = Leases(), Work()
        networks = [Network(server, draw) for _ in range(3)]
        running = [
            asyncio.ensure_future(candidate(network, f"c{i}").run(work.lead))
            for i, network in enumerate(networks)
        ]
        await asyncio.sleep(cut_after_s)
        networks[0].cut = True  # a machine that lost its network, for good
        await asyncio.sleep(200)
        for network in networks:
            network.draw = None
        await asyncio.sleep(90)
        assert work.acting, "none acts on a network that works"
        for task in running:
            assert not task.done()
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    run(scene())


def test_a_leader_that_cannot_renew_ends_before_the_lease_is_taken() -> None:
    async def scene() -> tuple[float, float]:
        loop, server, work = asyncio.get_running_loop(), Leases(), Work()
        ended: list[float] = []

        async def lead(epoch: int) -> None:
            try:
                await asyncio.sleep(10**6)
            finally:
                ended.append(loop.time())

        first = Network(server)
        running = [asyncio.ensure_future(candidate(first, "a").run(lead))]
        await asyncio.sleep(5)
        running.append(asyncio.ensure_future(candidate(Network(server), "b").run(work.lead)))
        await asyncio.sleep(30)
        first.cut = True
        cut_s = loop.time()
        await asyncio.sleep(60)
        for task in running:
            task.cancel()
        return ended[0] - cut_s, work.began_s[0] - cut_s

    ended_s, began_s = run(scene())
    assert ended_s <= RENEWAL_LIMIT_S
    # Either looks every 1.6 to 2.4 s: for the last renewal, and for the end of its time.
    assert DURATION_S - 2.5 <= began_s <= DURATION_S + 5


def test_a_lease_that_may_not_be_taken_is_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    class Refusing(Network):
        async def get(self, resource: Resource, name: str) -> Object:
            raise Forbidden("no right to get leases")

    async def scene() -> None:
        waiting = asyncio.ensure_future(candidate(Refusing(Leases()), "a").run(Work().lead))
        await asyncio.sleep(60)
        waiting.cancel()

    with caplog.at_level(logging.WARNING):
        run(scene())
    assert caplog.messages == ["the Lease it cannot be taken: no right to get leases"]


def test_a_leader_that_stops_gives_the_lease_back_at_once() -> None:
    async def scene() -> tuple[float, list[int]]:
        loop, server, work = asyncio.get_running_loop(), Leases(), Work()
        first = asyncio.ensure_future(candidate(Network(server), "a").run(work.lead))
        await asyncio.sleep(5)
        second = asyncio.ensure_future(candidate(Network(server), "b").run(work.lead))
        await asyncio.sleep(30)
        stopped_s = loop.time()
        first.cancel()
        await asyncio.sleep(10)
        second.cancel()
        return work.began_s[1] - stopped_s - CLEANUP_S, work.epochs

    took_s, epochs = run(scene())
    assert took_s < 2.5
    assert epochs == [1, 2]


def test_a_deleted_lease_does_not_lower_the_epoch_that_a_store_knows() -> None:
    async def scene() -> list[int]:
        server = Leases()
        epochs: list[int] = []

        async def lead(epoch: int) -> None:
            epochs.append(epoch)
            if epoch <= 41:
                raise Superseded(41)
            await asyncio.sleep(10**6)

        task = asyncio.ensure_future(candidate(Network(server), "a").run(lead))
        await asyncio.sleep(30)
        task.cancel()
        return epochs

    assert run(scene()) == [1, 42]


def test_a_failure_of_the_work_is_raised() -> None:
    async def lead(epoch: int) -> None:
        raise LookupError("a defect")

    async def scene() -> None:
        await candidate(Network(Leases()), "a").run(lead)

    with pytest.raises(LookupError, match="a defect"):
        run(scene())
