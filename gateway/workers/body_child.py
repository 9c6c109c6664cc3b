"""The process that reads large bodies: it receives tasks and bodies and returns facts, in frames.

Like `gateway.workers.compression_child`, it ends when its pipe closes. It keeps nothing between two
bodies.
"""

import gc
import resource
import signal
import socket
from collections.abc import Sequence
from typing import Final

import msgspec

from gateway.errors import BadRequest
from gateway.payload.body import of_any_us, read_body
from gateway.payload.members import locate
from gateway.records.endpoint import ENDPOINTS, Endpoint
from gateway.records.record import Record
from gateway.records.request import BodyFacts
from gateway.workers.compression_child import framed, received, serve

MAX_MEMORY_BYTES: Final = 512 << 20
"""Limit of address space. What may be read of 32 MiB takes 290 MiB at most."""


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


def read(
    endpoint: Endpoint, body: bytes, most_us: float, content_types: Sequence[bytes] = ()
) -> ReadResult | None:
    """Read a body's facts, or the reason why it is refused; None if that may take too long."""
    if not endpoint.multipart and of_any_us(body) > most_us:
        return None
    try:
        facts = read_body(endpoint, body, content_types=content_types)
        places = () if endpoint.multipart else tuple(locate(body))
    except BadRequest as refused:
        return ReadResult(
            message=refused.message, reason=refused.reason, code=refused.code, param=refused.param
        )
    except MemoryError:
        return ReadResult(message="The request body has too many values.", reason="too_complex")
    return ReadResult(facts=msgspec.structs.replace(facts, members={}, places=places))


def _read_bodies(pipe: socket.socket) -> None:
    # Decoded bodies have no reference cycles, and the collector would scan millions of lists.
    gc.disable()
    received(pipe)
    pipe.sendall(framed(b""))
    while True:
        task = msgspec.msgpack.decode(received(pipe), type=BodyTask)
        resource.setrlimit(resource.RLIMIT_AS, (task.memory_bytes, task.memory_bytes))
        body = received(pipe)
        # Its signal ends the process, in the midst of C code, too.
        signal.setitimer(signal.ITIMER_PROF, task.limit_s)
        result = read(ENDPOINTS[task.path], body, task.most_us, task.content_types)
        signal.setitimer(signal.ITIMER_PROF, 0)
        pipe.sendall(framed(msgspec.msgpack.encode(result)))


if __name__ == "__main__":
    serve(_read_bodies)
