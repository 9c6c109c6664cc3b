"""A worker process: `python -m gateway.workers.child compress` or `read`.

It receives tasks and returns results until its pipe closes. Rules:
- One socket, passed as standard input, carries both directions. A frame is its length in four
  bytes, then its content.
- The first frame is Setup, its answer is empty. Then task, result, ... in msgpack; the body that
  is to be read is a frame of its own after its task.
- The process ends when the pipe closes, so no worker outlives a killed gateway. A task that hangs
  is ended by the worker's own alarm.
- The process ignores signals meant for the gateway (Ctrl-C, a service manager's stop), because
  requests that are being drained still need it.
"""

import gc
import logging
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Final

import msgspec

from gateway.errors import BadRequest
from gateway.payload.body import of_any_us, read_body
from gateway.payload.members import locate
from gateway.ports import CompressResult, CompressTask
from gateway.records.endpoint import ENDPOINTS
from gateway.records.record import Record
from gateway.records.request import BodyFacts

NICENESS: Final = 1
"""Slightly below the event loop: a compression may wait a little, the streams may not. At 5, on a
full processor, a worker would get a third of the loop's share."""
START_LIMIT_S: Final = 60.0
"""Time limit for loading imports, tables and tokenizers."""
MAX_MEMORY_BYTES: Final = 512 << 20
"""Limit of address space for reading. What may be read of 32 MiB takes 290 MiB at most."""
_ALARM_SLACK_S: Final = 1.0
LENGTH_BYTES: Final = 4


class Setup(Record, frozen=True, kw_only=True):
    """The first frame to a worker."""

    time_limit_s: float = 0.0
    """Of a compression."""
    tokenizers: tuple[str, ...] = ()
    """Paths of tokenizers to load before the first task, because loading exceeds a task's limit."""


class BodyTask(Record, frozen=True, array_like=True):
    """How a body is read."""

    path: str
    """Path of its endpoint."""
    most_us: float
    """What reading it may take, by an estimate from above."""
    limit_s: float
    """What it may take of the processor, whatever the estimate was."""
    memory_bytes: int = MAX_MEMORY_BYTES
    """What the process may use of memory."""
    content_types: tuple[bytes, ...] = ()
    """The request's content-type headers, which tell how to read a form."""


class ReadResult(Record, frozen=True, kw_only=True):
    """The facts, with members given as positions in the body; or a refusal."""

    facts: BodyFacts | None = None
    message: str = ""
    reason: str = ""
    code: str | None = None
    param: str | None = None


def _reading(pipe: socket.socket) -> ReadResult | None:
    """Read a body's facts, or why it is refused; None if that may take too long."""
    task = msgspec.msgpack.decode(_received(pipe), type=BodyTask)
    resource.setrlimit(resource.RLIMIT_AS, (task.memory_bytes, task.memory_bytes))
    body, endpoint = _received(pipe), ENDPOINTS[task.path]
    # Its signal ends the process, in the midst of C code, too.
    signal.setitimer(signal.ITIMER_PROF, task.limit_s)
    try:
        if not endpoint.multipart and of_any_us(body) > task.most_us:
            return None
        facts = read_body(endpoint, body, content_types=task.content_types)
        places = () if endpoint.multipart else tuple(locate(body))
    except BadRequest as why:
        return ReadResult(message=why.message, reason=why.reason, code=why.code, param=why.param)
    except MemoryError:
        return ReadResult(message="The request body has too many values.", reason="too_complex")
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return ReadResult(facts=msgspec.structs.replace(facts, members={}, places=places))


def _compressing(pipe: socket.socket, setup: Setup) -> Callable[[], CompressResult]:
    """What does one task."""
    # Imported here, because the gateway imports this module and does not need the tables.
    from compressor import warm  # noqa: PLC0415
    from gateway.workers.compression_work import counter_of, work  # noqa: PLC0415

    for path in setup.tokenizers:
        counter_of(path)
    warm()
    gc.freeze()  # these objects stay; the collector need not scan them again

    def compress() -> CompressResult:
        task = msgspec.msgpack.decode(_received(pipe), type=CompressTask)
        signal.setitimer(signal.ITIMER_REAL, setup.time_limit_s + _ALARM_SLACK_S)
        result = work(task)
        signal.setitimer(signal.ITIMER_REAL, 0)
        return result

    return compress


def main(program: str) -> None:
    """Do tasks until the pipe closes."""
    os.nice(NICENESS)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    # A core dump would hold a tenant's prompt.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    with socket.socket(fileno=0) as pipe, suppress(EOFError, ConnectionError):
        setup = msgspec.msgpack.decode(_received(pipe), type=Setup)
        signal.setitimer(signal.ITIMER_REAL, START_LIMIT_S)
        work: Callable[[], Record | None] = partial(_reading, pipe)
        if program == "compress":
            work = _compressing(pipe, setup)
        else:
            # Decoded bodies have no cycles, and the collector would scan millions of lists.
            gc.disable()
        signal.setitimer(signal.ITIMER_REAL, 0)
        pipe.sendall(bytes(LENGTH_BYTES))
        while True:
            result = msgspec.msgpack.encode(work())
            pipe.sendall(len(result).to_bytes(LENGTH_BYTES) + result)


def _received(pipe: socket.socket) -> bytes:
    """The next frame's content. Raises EOFError when the pipe has closed."""
    return _exactly(pipe, int.from_bytes(_exactly(pipe, LENGTH_BYTES)))


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
    main(sys.argv[1])
