"""The process that reads large bodies: it receives tasks and bodies and returns facts, in frames.

Like `gateway.adapters.compress.child`, it ends when its pipe closes. It keeps nothing between two
bodies.
"""

import gc
import logging
import os
import resource
import signal
import socket
from collections.abc import Sequence
from typing import Final

import msgspec

from gateway.adapters.compress.child import NICENESS, framed, received
from gateway.errors import BadRequest
from gateway.policy.request.body import read_body
from gateway.policy.request.members import locate
from gateway.records.endpoint import ENDPOINTS, Endpoint
from gateway.records.record import Record
from gateway.records.request import BodyFacts

MAX_MEMORY_BYTES: Final = 4 << 30
"""Limit of address space: 32 MiB of empty lists decode to 1 GiB of it."""


class BodyTask(Record, frozen=True, array_like=True):
    """How a body is read."""

    path: str
    """Path of its endpoint."""
    content_types: tuple[bytes, ...] = ()
    """The request's content-type headers, which tell how to read a form."""


class ReadResult(Record, frozen=True, kw_only=True):
    """The facts, with members given as positions in the body; or a refusal."""

    facts: BodyFacts | None = None
    message: str = ""
    reason: str = ""
    code: str | None = None
    param: str | None = None


def read(endpoint: Endpoint, body: bytes, content_types: Sequence[bytes] = ()) -> ReadResult:
    """Read a body's facts, or the reason why it is refused."""
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


def main() -> None:
    """Serve the socket that is standard input."""
    os.nice(NICENESS)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    # A core dump would hold a tenant's prompt.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    # Decoded bodies have no reference cycles, and the collector would scan millions of lists.
    gc.disable()
    with socket.socket(fileno=0) as pipe:
        try:
            received(pipe)
            pipe.sendall(framed(msgspec.msgpack.encode("")))
            while True:
                task = msgspec.msgpack.decode(received(pipe), type=BodyTask)
                result = read(ENDPOINTS[task.path], received(pipe), task.content_types)
                pipe.sendall(framed(msgspec.msgpack.encode(result)))
        except (EOFError, ConnectionError):
            return


if __name__ == "__main__":
    main()
