"""What tests run in their own process: commands of `sluice`, mock engines, small servers."""

import contextlib
import functools
import socketserver
import threading
import time
from collections.abc import Iterator
from contextvars import copy_context
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner, Result

from simulator.engine.engine import EngineProfile
from simulator.mock_server import MockConfig
from sluice import cli
from sluice.mock import make_server

MOCK_MODEL = "mock-model"


@functools.cache
def command() -> Any:
    """With all verbs, built once: Typer's runner builds them for each call, in 30 ms."""
    cli.register()
    return typer.main.get_command(cli.app)


pytest.MonkeyPatch().setattr("typer.testing._get_command", lambda _: command())


def sluice(*arguments: object, stdin: str | None = None, **environment: str) -> Result:
    """One command, as at a terminal with these variables."""
    run = CliRunner(env=environment).invoke
    # A command is a process: it hears nothing of another one's --json.
    return copy_context().run(run, cli.app, [*map(str, arguments)], input=stdin)


@contextlib.contextmanager
def serving(server: socketserver.TCPServer) -> Iterator[str]:
    """The address of a server that answers in a thread of its own."""
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)
        assert not thread.is_alive()


@contextlib.contextmanager
def mock_engine(
    *,
    max_model_len: int = 2048,
    max_num_seqs: int = 32,
    speed: float = 20,
    host: str = "127.0.0.1",
    port: int = 0,
    **fields: Any,
) -> Iterator[str]:
    """The address of a mock engine; fields are its profile's or its server's."""
    engine = {k: fields.pop(k) for k in list(fields) if k in EngineProfile.__struct_fields__}
    profile = EngineProfile(
        name="test", max_model_len=max_model_len, max_num_seqs=max_num_seqs, **engine
    )
    config = MockConfig(**{"model": MOCK_MODEL, "profile": profile, "speed": speed, **fields})
    server = make_server(config, host=host, port=port)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        give_up = time.monotonic() + 10
        while not server.started:
            assert time.monotonic() < give_up, "the mock did not start"
            time.sleep(0.005)
        yield f"http://{host}:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(10)
        assert not thread.is_alive()
