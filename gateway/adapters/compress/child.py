"""A worker process: frames of tasks in, frames of results out, until its pipe closes.

Rules:
- One socket, as standard input, both ways; a frame is its length in four bytes, then msgpack.
- The first frame is Setup; the first answer is "" or what is missing. Then task, result, ...
- It ends when the pipe closes, so that nothing stays behind a gateway that was killed. A task
  that hangs is ended by an alarm of its own, a little after the gateway would have done it.
- Signals meant for the gateway (Ctrl-C, a service manager's stop) are not for it: requests
  that are being drained still need it.
"""

import gc
import logging
import os
import resource
import signal
import socket
from typing import Final

import msgspec

from gateway.ports import CompressTask
from gateway.records.record import Record

NICENESS: Final = 1
"""Below the event loop, and just so: a compression may wait a little, the streams of all others
may not. At 5 it would get a third of what the loop gets of a processor that is full."""
START_LIMIT_S: Final = 60.0
"""For imports, tables and tokenizers."""
_ALARM_SLACK_S: Final = 1.0
_LENGTH_BYTES: Final = 4


class Setup(Record, frozen=True, kw_only=True):
    """What a worker is told first."""

    time_limit_s: float
    tokenizers: tuple[str, ...] = ()
    """Paths to load before the first task: that takes longer than a task may."""


def length_of(data: bytes) -> bytes:
    """What stands before `data` in its frame."""
    return len(data).to_bytes(_LENGTH_BYTES, "big")


def framed(data: bytes) -> bytes:
    """`data` as one frame."""
    return length_of(data) + data


def unframed(buffer: bytes | bytearray) -> bytes | None:
    """The first frame's content once all of it is there."""
    end = _LENGTH_BYTES + int.from_bytes(buffer[:_LENGTH_BYTES], "big")
    if len(buffer) < max(end, _LENGTH_BYTES):
        return None
    return bytes(buffer[_LENGTH_BYTES:end])


def main() -> None:
    """Serve the socket that is standard input."""
    os.nice(NICENESS)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    # A core dump would hold a tenant's prompt.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    with socket.socket(fileno=0) as pipe:
        try:
            _serve(pipe)
        except (EOFError, ConnectionError):
            return


def _serve(pipe: socket.socket) -> None:
    setup = msgspec.msgpack.decode(received(pipe), type=Setup)
    signal.setitimer(signal.ITIMER_REAL, START_LIMIT_S)
    # Here, since the gateway imports this module, and has no use for the tables.
    from compressor import warm  # noqa: PLC0415
    from gateway.adapters.compress.work import Counters, work  # noqa: PLC0415

    counters = Counters()
    for path in setup.tokenizers:
        counters.get(path)
    warm()
    gc.freeze()  # what is there stays, and need not be looked through again
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
    """The next frame's content; EOFError when the pipe has closed."""
    length = int.from_bytes(_exactly(pipe, _LENGTH_BYTES), "big")
    return _exactly(pipe, length)


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
    main()
