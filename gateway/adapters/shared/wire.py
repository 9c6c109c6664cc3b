"""The protocol between the parent and its worker processes: MessagePack over a Unix socket.

A frame is four bytes of length and an array `[op, number, ...]`. Calls carry a number, which
their answer repeats; posts and events carry 0. What one end says is heard in that order. Both
ends are of one version: nothing here is negotiated.
"""

import asyncio
import logging
import socket
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec

from gateway.adapters.shared.ops import Op

__all__ = [
    "LAZIER_S",
    "LAZY_S",
    "MAX_FRAME_BYTES",
    "Handler",
    "Message",
    "Op",
    "Wire",
    "joined",
    "packed",
    "unpacked",
]

MAX_FRAME_BYTES: Final = 256 * 1024 * 1024
"""A longer frame ends the connection."""
LAZY_S: Final = 0.002
LAZIER_S: Final = 0.1
"""For what nobody can need before, since there is plenty of room."""
READ_BYTES: Final = 64 * 1024
"""Little enough that the allocator maps no memory for it."""
BACKLOG_BYTES: Final = 64 * 1024 * 1024
"""Unsent bytes after which the other end is taken for dead."""

_log = logging.getLogger("sluice.workers")
_encode: Final = msgspec.msgpack.Encoder().encode
_encode_into: Final = msgspec.msgpack.Encoder().encode_into
_decode: Final = msgspec.msgpack.Decoder().decode


Message = list[Any]
Handler = Callable[[Message], None]


class Wire:
    """One end of the connection, a plain socket.

    What costs is waking the other process, not what it is told: so what is said while a read is
    worked off, or in one turn of the loop, leaves in one go, and what is not urgent waits
    for something to leave with: LAZY_S, or LAZIER_S.
    """

    def __init__(self, received: Handler, lost: Callable[[], None]) -> None:
        """`received` hears every message, `lost` the end of the connection, once."""
        self._received = received
        self._lost = lost
        self._sock: socket.socket | None = None
        self._said = bytearray()
        """What waits: for the end of a read, or for the other end to read."""
        self._holding = False
        self._blocked = False
        self._due = False
        self.gathered: Callable[[], tuple[object, ...] | None] = lambda: None
        """Gives what is told before anything else that is said; None: nothing."""
        self._timer: asyncio.TimerHandle | None = None
        self._waits_s = 0.0
        """What the timer was set to."""
        self._heard = bytearray()
        """The beginning of a frame."""
        self._needed = 4
        """Bytes that complete it."""

    @property
    def up(self) -> bool:
        """Whether the other end is there."""
        return self._sock is not None

    def open(self, sock: socket.socket) -> None:
        """Take a connected socket; call within the running loop."""
        sock.setblocking(False)  # noqa: FBT003
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(sock, self._readable)

    def send(self, *message: object) -> None:
        """Say something. Into the void once the other end is lost."""
        if self._sock is None:
            return
        self._add(message)
        if not self._holding:
            self.hasten()

    def hasten(self) -> None:
        """Send what waits in this turn of the loop."""
        if self.up and not (self._due or self._blocked):
            self._due = True
            self._loop.call_soon(self.flush)

    def send_lazily(self, *message: object, within_s: float = LAZY_S) -> None:
        """The same for what may wait so long; in order with all else."""
        if self._sock is None:
            return
        self._add(message)
        if not self._holding:
            self.expect(within_s)

    def expect(self, within_s: float) -> None:
        """Something waits, or is gathered: it leaves with whatever does, or so much later."""
        if self._sock is None or self._due or self._blocked:
            return
        if self._timer is not None:
            if within_s >= self._waits_s:
                return
            self._timer.cancel()
        self._waits_s = within_s
        self._timer = self._loop.call_later(within_s, self.flush)

    def flush(self) -> None:
        """Send now what was said."""
        self._due = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._gather()
        if self._said and not (self._holding or self._blocked):
            said, self._said = self._said, bytearray()
            self._write(said)

    def close(self) -> None:
        """Send what the other end takes now, and hang up."""
        self.flush()
        if self._sock is not None:
            loop = self._loop
            loop.remove_reader(self._sock)
            loop.remove_writer(self._sock)
            self._sock.close()
            self._sock = None
            loop.call_soon(self._lost)

    # -- inside

    def _add(self, message: tuple[object, ...]) -> None:
        self._gather()
        self._encode(message)

    def _gather(self) -> None:
        if self._sock is not None and (told := self.gathered()) is not None:
            self._encode(told)

    def _encode(self, message: tuple[object, ...]) -> None:
        at = len(self._said)
        self._said += b"\0\0\0\0"
        _encode_into(message, self._said, at + 4)
        self._said[at : at + 4] = (len(self._said) - at - 4).to_bytes(4, "big")
        if self._blocked and len(self._said) > BACKLOG_BYTES:
            _log.error("the other end does not read: %d bytes wait", len(self._said))
            self._said.clear()
            self.close()

    def _readable(self) -> None:
        if self._sock is None:
            return
        try:
            data = self._sock.recv(READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        if not data:
            self.close()
            return
        self._holding = True
        self._hear(data)
        self._holding = False
        if self._said:  # what is gathered need not leave for having heard something
            self.flush()

    def _hear(self, data: bytes) -> None:
        if self._heard:
            self._heard += data
            if len(self._heard) < self._needed:
                return
            data = bytes(self._heard)
            self._heard.clear()
        self._needed = 4
        at, size = 0, len(data)
        while size - at >= 4 and self._sock is not None:
            end = at + 4 + int.from_bytes(data[at : at + 4], "big")
            if end - at > MAX_FRAME_BYTES:
                _log.error("a frame of %d bytes", end - at)
                self.close()
                return
            if end > size:
                self._needed = end - at
                break
            self._take(data[at + 4 : end])
            at = end
        if at < size:
            self._heard += data[at:]

    def _take(self, frame: bytes) -> None:
        try:
            self._received(_decode(frame))
        except Exception:  # noqa: BLE001 - one message must not end all others
            _log.exception("a message between the processes failed")

    def _write(self, data: bytearray) -> None:
        if self._sock is None:
            return
        try:
            sent = self._sock.send(data)
        except (BlockingIOError, InterruptedError):
            sent = 0
        except OSError:
            self._said.clear()
            self.close()
            return
        if sent < len(data):
            self._said[:0] = data[sent:]
            self._blocked = True
            self._loop.add_writer(self._sock, self._writable)

    def _writable(self) -> None:
        if self._sock is None:
            return
        self._blocked = False
        self._loop.remove_writer(self._sock)
        self.flush()


def packed(value: object) -> bytes:
    """A value as one payload."""
    return _encode(value)


def unpacked(payload: bytes) -> Any:
    """What `packed` made, as plain lists, maps, text and numbers."""
    return _decode(payload)


def joined(parts: Sequence[bytes]) -> list[Any]:
    """The items of payloads that are lists, one after the other."""
    return [item for part in parts for item in _decode(part)]
