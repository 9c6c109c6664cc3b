"""The supervisor's patience with replicas that die, and what it does with one only."""

import asyncio
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from gateway.settings import Config, load, parse
from gateway.wiring import supervisor
from gateway.wiring.handover import bound
from gateway.wiring.supervisor import (
    DEATHS_WITHIN_S,
    MAX_DEATHS,
    MAX_PAUSE_S,
    Replica,
    Supervisor,
    pause_after,
)

FILE = """
version: 1
server: {port: 0, workers: %d, management_port: 9100, admin_key: "sk-secret"}
state: {url: "redis://127.0.0.1:6379/0"}
models:
  - name: m
    pools:
      only: {max_model_len: 4096, max_num_seqs: 8, workers: ["http://127.0.0.1:9"]}
entitlements:
  - {name: a, tenant: t, model: m, expires_at: 2030-01-01T00:00:00Z}
"""


def config(workers: int) -> Config:
    return parse(FILE % workers, "sluice.yaml", {})


def test_a_replica_that_dies_often_is_waited_for_longer_and_then_given_up() -> None:
    deaths_s = [float(n) for n in range(MAX_DEATHS)]
    waited = [pause_after(deaths_s[: n + 1]) or 0.0 for n in range(MAX_DEATHS - 1)]
    assert waited == sorted(set(waited))
    assert waited[0] == pytest.approx(0.1)
    assert waited[-1] == MAX_PAUSE_S
    assert pause_after(deaths_s) is None
    assert pause_after([n * DEATHS_WITHIN_S for n in range(MAX_DEATHS)]) == pytest.approx(0.1)


async def test_replicas_get_the_configuration_with_a_management_port_each() -> None:
    made = config(3)
    given = [(await Supervisor(made, None).setup_of(n)).config for n in (1, 2, 3)]
    assert [each.server.management_port for each in given] == [9101, 9102, 9103]
    server = made.server
    for each in given:
        same = each.server.model_copy(update={"management_port": server.management_port})
        assert each.model_copy(update={"server": same}).model_dump() == made.model_dump()


async def test_a_replica_that_starts_again_gets_the_last_good_file(tmp_path: Path) -> None:
    path = tmp_path / "sluice.yaml"
    path.write_text(FILE % 2)
    whole = Supervisor(load(path).listening(host="127.0.0.2"), None)

    async def given() -> Config:
        return (await whole.setup_of(1)).config

    assert [each.name for each in (await given()).entitlements] == ["a"]
    # A later file without the entitlement, whose new number of replicas needs a restart of all.
    path.write_text((FILE % 3).partition("entitlements")[0])
    assert (await given()).entitlements == ()
    path.write_text("version: broken")
    now = await given()
    assert now.entitlements == ()
    assert (now.server.workers, now.server.host) == (2, "127.0.0.2")


async def test_sighup_waits_until_a_replica_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    """The program dies of a SIGHUP before it is ready; after that the signal ends it well."""
    program = (
        "import os, signal, time; time.sleep(0.3);"
        "signal.signal(signal.SIGHUP, lambda *_: os._exit(7)); os.write(1, b'ready\\n');"
        "time.sleep(60)"
    )
    replica = replica_of(monkeypatch, [sys.executable, "-c", program])
    running = asyncio.create_task(replica.run())
    async with asyncio.timeout(20):
        while replica._process is None:  # noqa: ASYNC110 - it has no event
            await asyncio.sleep(0.001)
        replica.supervisor.reload()
        assert await running == 7
    await replica.supervisor._chores.close()


async def test_sighup_during_the_start_does_not_tell_that_the_gateway_is_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as told:
        told.bind(address)
        told.setblocking(False)
        monkeypatch.setenv("NOTIFY_SOCKET", address)
        whole = Supervisor(config(2), None)
        whole.reload()
        with pytest.raises(BlockingIOError):
            told.recv(4096)
        for replica in whole.replicas:
            replica.ready = True
        whole.replica_serves()
        assert told.recv(4096) == b"READY=1"
        whole.reload()
        assert told.recv(4096).startswith(b"RELOADING=1")
        assert told.recv(4096) == b"READY=1"
    await whole._chores.close()


def replica_of(monkeypatch: pytest.MonkeyPatch, program: list[str] | OSError) -> Replica:
    """A replica that served before, and whose successors are this program."""
    start = asyncio.create_subprocess_exec

    async def started(*_: str, **more: Any) -> asyncio.subprocess.Process:
        if isinstance(program, OSError):
            raise program
        return await start(*program, **more)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", started)
    monkeypatch.setattr(supervisor, "MAX_PAUSE_S", 0.01)
    (replica, _) = Supervisor(config(2), None).replicas
    replica.ready = True
    return replica


async def test_a_replica_that_cannot_be_started_again_is_tried_as_often_as_one_that_dies(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    replica = replica_of(monkeypatch, BlockingIOError(11, "no process is left"))
    await asyncio.wait_for(replica.keep(), 10)
    assert caplog.text.count("no process is left") == MAX_DEATHS
    assert f"died {MAX_DEATHS} times" in caplog.text


async def test_a_successor_that_hangs_at_its_start_is_not_listed_and_killed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(supervisor, "START_S", 0.2)
    replica = replica_of(monkeypatch, [sys.executable, "-c", "import time; time.sleep(60)"])
    keeping = asyncio.create_task(replica.keep())
    await asyncio.sleep(0.1)
    assert not replica.serves
    await asyncio.wait_for(keeping, 20)
    assert caplog.text.count("ended with status -9") == MAX_DEATHS


async def test_only_replicas_that_serve_now_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    program = "import os, time; os.write(1, b'ready\\n'); time.sleep(0.5)"
    replica = replica_of(monkeypatch, [sys.executable, "-c", program])
    whole = replica.supervisor
    assert whole.ports() == []
    keeping = asyncio.create_task(replica.keep())
    found = []
    async with asyncio.timeout(20):
        while not keeping.done():
            found.append(whole.ports())
            await asyncio.wait([keeping], timeout=0.01)
    assert [9101] in found
    assert whole.ports() == []


async def test_a_start_waits_for_a_port_that_is_let_go_of() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = taken.getsockname()
        asyncio.get_running_loop().call_later(0.3, taken.close)
        (found,) = await supervisor.when_free(lambda: bound(*address))
    assert found.getsockname() == address
    found.close()


def test_a_port_in_use_ends_it_with_an_error(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "PORT_S", 0.2)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        made = config(2)
        port = taken.getsockname()[1]
        server = made.server.model_copy(update={"port": port})
        assert supervisor.run(made.model_copy(update={"server": server})) == 1
    assert "in use" in caplog.text
