"""What the process that takes over is passed, and what it takes for passed."""

import asyncio
import json
import os
import socket
import sys
from pathlib import Path

import pytest

from gateway.wiring.handover import PREDECESSOR, Origin, Successor

PROGRAM = """
import json, os, sys
from gateway.wiring.handover import PREDECESSOR, Origin
origin = Origin(os.environ)
found = {
    "ports": [sock.getsockname()[1] for sock in origin.sockets],
    "linked": origin.link is not None,
    "left": [name for name in os.environ if name.startswith("LISTEN_") or name == PREDECESSOR],
}
print(json.dumps(found), file=open(sys.argv[1], "w"))
origin.ready()
"""


@pytest.mark.skipif(sys.platform == "win32", reason="passes file descriptors")
@pytest.mark.parametrize("held", [0, 1, 2])
async def test_the_new_process_takes_the_sockets_that_this_one_holds_and_no_other(
    held: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = tmp_path / "told"
    origin = Origin({})
    origin.sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(held)]
    # As a unit passes them that has a Unix socket before ours, or as another program got them.
    foreign = {"LISTEN_FDS": "3", "LISTEN_PID": "1", "LISTEN_FDNAMES": "a:b:c"}
    left = asyncio.Event()
    monkeypatch.setattr(sys, "orig_argv", ["python", "-c", PROGRAM, str(told)])
    environ = {**os.environ, **foreign}
    ended = asyncio.Event()
    successor = Successor(origin, environ, lambda _: left.set(), ended.set)
    successor.start()
    process = successor._process
    assert process is not None
    async with asyncio.timeout(60):
        await left.wait()
        await ended.wait()
    ports = [sock.getsockname()[1] for sock in origin.sockets]
    assert json.loads(told.read_text()) == {"ports": ports, "linked": True, "left": []}
    successor.end()
    for sock in origin.sockets:
        sock.close()


def test_a_process_that_replaces_none_is_passed_nothing() -> None:
    environ = {"LISTEN_FDS": "1", "LISTEN_PID": "1", PREDECESSOR: ""}
    origin = Origin(environ)
    assert (origin.link, origin.sockets) == (None, [])
