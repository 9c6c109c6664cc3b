"""A compression worker process: it receives tasks and returns results until its pipe closes.

Rules:
- One socket, passed as standard input, carries both directions. A frame is its length in four
  bytes, then msgpack.
- The first frame is Setup; the first answer is "" or an error text. Then task, result, ...
- The process ends when the pipe closes, so no worker outlives a killed gateway. A task that
  hangs is ended by the worker's own alarm, a little after the gateway's time limit.
- The process ignores signals meant for the gateway (Ctrl-C, a service manager's stop), because
  requests that are being drained still need it.
"""

import gc
import logging
import os
import resource
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Final

import msgspec

from gateway.ports import CompressTask
from gateway.records.record import Record

NICENESS: Final = 1
"""Slightly below the event loop: a compression may wait a little, the streams may not. At 5, on a
full processor, a worker would get a third of the loop's share."""
START_LIMIT_S: Final = 60.0
"""Time limit for loading imports, tables and tokenizers."""
_ALARM_SLACK_S: Final = 1.0
_LENGTH_BYTES: Final = 4


class Setup(Record, frozen=True, kw_only=True):
    """The first frame to a worker."""

    time_limit_s: float
    tokenizers: tuple[str, ...] = ()
    """Paths of tokenizers to load before the first task, because loading exceeds a task's limit."""


def length_of(data: bytes) -> bytes:
    """The length prefix of `data` in its frame."""
    return len(data).to_bytes(_LENGTH_BYTES, "big")


def framed(data: bytes) -> bytes:
    """`data` as one frame."""
    return length_of(data) + data


def unframed(buffer: bytes | bytearray) -> bytes | None:
    """The first frame's content; None until all of it has arrived."""
    end = _LENGTH_BYTES + int.from_bytes(buffer[:_LENGTH_BYTES], "big")
    if len(buffer) < max(end, _LENGTH_BYTES):
        return None
    return bytes(buffer[_LENGTH_BYTES:end])


def serve(run: Callable[[socket.socket], None]) -> None:
    """Have `run` serve the socket that is standard input, until it closes."""
    os.nice(NICENESS)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    # A core dump would hold a tenant's prompt.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    with socket.socket(fileno=0) as pipe, suppress(EOFError, ConnectionError):
        run(pipe)


def _compress(pipe: socket.socket) -> None:
    setup = msgspec.msgpack.decode(received(pipe), type=Setup)
    signal.setitimer(signal.ITIMER_REAL, START_LIMIT_S)
    # Imported here, because the gateway imports this module and does not need the tables.
    from compressor import warm  # noqa: PLC0415
    from gateway.workers.compression_work import Counters, work  # noqa: PLC0415

    counters = Counters()
    for path in setup.tokenizers:
        counters.get(path)
    warm()
    gc.freeze()  # these objects stay; the collector need not scan them again
    signal.setitimer(signal.ITIMER_REAL, 0)
    pipe.sendall(framed(b""))
    tasks = msgspec.msgpack.Decoder(CompressTask)
    while True:
        task = tasks.decode(received(pipe))
        signal.setitimer(signal.ITIMER_REAL, setup.time_limit_s + _ALARM_SLACK_S)
        result = work(task, counters)
        signal.setitimer(signal.ITIMER_REAL, 0)
        pipe.sendall(framed(msgspec.msgpack.encode(result)))


def received(pipe: socket.socket) -> bytes:
    """The next frame's content. Raises EOFError when the pipe has closed."""
    return _exactly(pipe, int.from_bytes(_exactly(pipe, _LENGTH_BYTES), "big"))


def _exactly(pipe: socket.socket, count: int) -> bytes:
    data = bytearray(count)
    rest = memoryview(data)
    while rest:
        got = pipe.recv_into(rest)
        if not got:
            raise EOFError("the gateway has gone")
        rest = rest[got:]
    return bytes(data)


if __name__ == "__main__":
    serve(_compress)
