"""The calls of a plan: in order, some together, and again where they failed."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from controller.health import Figures
from controller.kube import ApiFailure, Away, Conflict, Forbidden, Invalid, NotFound
from controller.records import NODES, PODS, TOKEN_ENTITLEMENTS, Call, EventNote, Object, Resource
from controller.virtual_node import POOL_LABEL
from controller.writes import AT_ONCE, Writes
from tests.virtual_time import run


class Api:
    """Records calls; some fail."""

    namespace = "team"

    def __init__(self) -> None:
        self.made: list[str] = []
        self.most = 0
        self.failing: dict[str, ApiFailure] = {}
        self.refused: ApiFailure | None = None
        self.takes_s: dict[str, float] = {}
        self.cleanup_s = 0.0
        """Closing a connection takes its time, too."""
        self._running = 0

    async def make(self, call: Call) -> Object:
        name = f"{call.verb} {call.name}"
        self.made.append(name)
        self._running += 1
        self.most = max(self.most, self._running)
        try:
            await asyncio.sleep(self.takes_s.get(name, 0.01))
        finally:
            self._running -= 1
            await asyncio.sleep(self.cleanup_s)
        if self.refused is not None:
            raise self.refused
        if name in self.failing:
            raise self.failing[name]
        return {"metadata": {"name": call.name}}


class Scene:
    def __init__(self) -> None:
        self.api = Api()
        self.leads = True
        self.written: list[str] = []
        self.writes = Writes(
            self.api,  # type: ignore[arg-type]
            may_write=lambda: self.leads,
            written=self._written,
            figures=Figures(),
            identity="one",
        )

    def _written(self, resource: Resource, told: Object) -> None:
        self.written.append(told["metadata"]["name"])


def played(play: Callable[[Scene], Coroutine[Any, Any, None]]) -> None:
    async def scene() -> None:
        await play(Scene())

    run(scene())


def status(name: str) -> Call:
    return Call(verb="patch_status", resource=TOKEN_ENTITLEMENTS, name=name)


def pod(verb: Any, name: str, pool: str = "p", **body: Any) -> Call:
    if verb == "create":
        body["metadata"] = {"name": name, "labels": {POOL_LABEL: pool}}
    return Call(verb=verb, resource=PODS, name=name, body=body)


def test_calls_are_made_in_order_and_statuses_together() -> None:
    async def play(scene: Scene) -> None:
        first = [Call(verb="create", resource=NODES, name="node"), pod("delete", "a-1-x")]
        last = [pod("create", "a-1-y")]
        statuses = [status(f"s{i}") for i in range(100)]
        assert await scene.writes.carry_out([*first, *statuses, *last])
        assert scene.api.made[:2] == ["create node", "delete a-1-x"]
        assert scene.api.made[-1] == "create a-1-y"
        assert sorted(scene.api.made[2:-1]) == sorted(f"patch_status s{i}" for i in range(100))
        assert scene.api.most == AT_ONCE
        assert sorted(scene.written) == sorted(["node", *(f"s{i}" for i in range(100)), "a-1-y"])

    played(play)


def test_pods_of_pools_are_made_together_and_of_a_pool_in_order() -> None:
    async def play(scene: Scene) -> None:
        pools = {
            f"p{number}": [f"p{number}-{place}-x" for place in range(3)] for number in range(40)
        }
        calls = [pod("create", name, pool) for pool, names in pools.items() for name in names]
        calls.append(pod("delete", "old-1-x"))
        assert await scene.writes.carry_out(calls)
        assert scene.api.made[0] == "delete old-1-x"
        for names in pools.values():
            made = [call for call in scene.api.made if call.removeprefix("create ") in names]
            assert made == [f"create {name}" for name in names]
        assert scene.api.most == AT_ONCE

    played(play)


def test_what_failed_holds_up_the_same_entitlement_alone() -> None:
    async def play(scene: Scene) -> None:
        scene.api.failing["delete a-1-x"] = Conflict("another uid")
        calls = [pod("delete", "a-1-x"), pod("create", "a-1-y"), pod("create", "b-2-z")]
        assert await scene.writes.carry_out(calls)
        assert scene.api.made == ["delete a-1-x", "create b-2-z"]
        # Nor does the second half go ahead while the first one waits for its next try.
        await scene.writes.carry_out(calls)
        assert "create a-1-y" not in scene.api.made

    played(play)


def test_a_failure_is_logged_once_and_tried_again_ever_more_rarely(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def play(scene: Scene) -> None:
        scene.api.failing["create a-1-x"] = Invalid("no such priority class")
        for _ in range(3600):
            assert not await scene.writes.carry_out([pod("create", "a-1-x", size=1)])
            await asyncio.sleep(1)
        assert 60 <= len(scene.api.made) <= 75
        assert caplog.messages == ["cannot create Pod a-1-x: no such priority class"]
        assert 0 < scene.writes.retry_s() <= 60
        # What says something else is tried at once.
        tries = len(scene.api.made)
        await scene.writes.carry_out([pod("create", "a-1-x", size=2)])
        assert len(scene.api.made) == tries + 1
        scene.api.failing.clear()
        await asyncio.sleep(60)
        assert await scene.writes.carry_out([pod("create", "a-1-x", size=2)])
        assert scene.writes.retry_s() == float("inf")

    with caplog.at_level(logging.WARNING, "sluice.controller"):
        played(play)


def test_an_object_of_somebody_else_is_told_of_and_a_race_is_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def play(scene: Scene) -> None:
        scene.api.failing["create there"] = Conflict("it exists")
        for _ in range(10):
            await scene.writes.carry_out([pod("create", "there")])
            told.append(len(caplog.messages))
            await asyncio.sleep(scene.writes.retry_s())

    told: list[int] = []
    with caplog.at_level(logging.WARNING):
        played(play)
    assert told == [0, 0, *[1] * 8]
    assert caplog.messages == ["cannot create Pod there: it exists"]


def test_one_node_whose_lease_is_refused_leaves_the_others_alive() -> None:
    async def play(scene: Scene) -> None:
        nodes = [{"metadata": {"name": f"node-{at}", "uid": "1"}} for at in range(2 * AT_ONCE)]
        scene.api.failing["patch node-0"] = Invalid("no")
        with pytest.raises(Invalid):
            await scene.writes.beat(nodes)
        assert len(scene.api.made) == 2 * AT_ONCE

    played(play)


def test_events_that_are_refused_are_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    async def play(scene: Scene) -> None:
        sending = asyncio.ensure_future(scene.writes.send_events())
        metadata = {"name": "search", "namespace": "team", "uid": "1"}
        regarding = {"apiVersion": "v1", "kind": "TokenEntitlement", "metadata": metadata}
        note = EventNote(regarding=regarding, kind="Normal", reason="Bound", message="")
        await scene.writes.carry_out([status("search")])
        scene.writes.tell([note, note, note])
        scene.api.refused = Forbidden("no right to create events")
        await asyncio.sleep(1)
        sending.cancel()

    with caplog.at_level(logging.WARNING):
        played(play)
    assert caplog.messages == ["events are lost: no right to create events"]


def test_what_is_gone_already_counts_as_deleted() -> None:
    async def play(scene: Scene) -> None:
        scene.api.failing["delete a-1-x"] = NotFound("gone")
        assert await scene.writes.carry_out([pod("delete", "a-1-x")])
        assert scene.writes.retry_s() == float("inf")

    played(play)


def test_an_api_that_is_away_ends_the_pass() -> None:
    async def play(scene: Scene) -> None:
        scene.api.failing["patch_status s3"] = Away("nobody answers")
        with pytest.raises(Away, match="nobody answers"):
            await scene.writes.carry_out([*(status(f"s{i}") for i in range(100)), status("z")])
        assert len(scene.api.made) < 50

    played(play)


def test_who_leads_no_more_writes_no_more() -> None:
    async def play(scene: Scene) -> None:
        scene.leads = False
        assert not await scene.writes.carry_out([pod("create", "a-1-x"), status("s")])
        assert scene.api.made == []

    played(play)


def test_events_of_what_could_not_be_written_wait_for_the_next_pass() -> None:
    def note(name: str) -> EventNote:
        metadata = {"name": name, "namespace": "team", "uid": f"uid-{name}"}
        regarding = {"apiVersion": "v1", "kind": "TokenEntitlement", "metadata": metadata}
        return EventNote(regarding=regarding, kind="Normal", reason="Allocated", message="it has")

    async def play(scene: Scene) -> None:
        scene.api.failing["patch_status s1"] = Invalid("no")
        sending = asyncio.ensure_future(scene.writes.send_events())
        scene.api.failing["create away"] = Away("nobody answers")
        calls = [status("s1"), status("s2"), pod("create", "away"), status("s3")]
        with pytest.raises(Away):
            await scene.writes.carry_out(calls)
        scene.writes.tell([note("s1"), note("s2"), note("s3")])
        await asyncio.sleep(1)
        sending.cancel()
        told = [name for name in scene.api.made if name.startswith("create s")]
        assert [name.partition(".")[0] for name in told] == ["create s2"]

    played(play)


def test_a_cancellation_counts_also_at_the_moment_of_a_failure() -> None:
    async def play(scene: Scene) -> None:
        scene.api.failing["patch_status s0"] = Away("nobody answers")
        scene.api.takes_s["patch_status s0"] = 0.005
        scene.api.cleanup_s = 0.004
        for moment_s in (0.001, 0.006, 0.008, 0.01, 0.012, 0.02):
            ended: list[str] = []

            async def passes(ended: list[str] = ended) -> None:
                try:
                    with contextlib.suppress(Away):
                        await scene.writes.carry_out([status(f"s{i}") for i in range(100)])
                    await asyncio.sleep(10**6)
                finally:
                    ended.append("")

            task = asyncio.ensure_future(passes())
            asyncio.get_running_loop().call_later(moment_s, task.cancel)
            await asyncio.sleep(60)
            assert ended, f"cancelled after {moment_s} s, it goes on"

    played(play)
