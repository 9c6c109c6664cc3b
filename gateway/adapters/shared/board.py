"""Notes that each worker process puts up for the others: what is learned and merged by readers.

One note a name and worker, the newest. What changed is sent every BOARD_EVERY_S, or within LAZIER_S
after it, with what leaves then; a new worker hears of all there is, and the notes of one that is
gone go with it.
"""

import asyncio
import contextlib
from typing import Final

from gateway.adapters.shared.link import Link
from gateway.adapters.shared.wire import LAZIER_S, Message, Op

BOARD_EVERY_S: Final = 1.0


class PeerBoard:
    """A worker's view of the board. Without a link there is nobody to hear of."""

    def __init__(self, link: Link | None = None) -> None:
        self._link = link
        self._mine: dict[str, bytes] = {}
        self._changed: dict[str, bytes] = {}
        self._theirs: dict[int, dict[str, bytes]] = {}
        self._task: asyncio.Task[None] | None = None
        if link is not None:
            link.hears(Op.BOARD, self._heard)
            link.hears(Op.GONE, self._gone)

    def publish(self, name: str, payload: bytes) -> None:
        """Put up a note (1 MiB at most, 64 names); the others have it soon after BOARD_EVERY_S."""
        if self._link is not None and self._mine.get(name) != payload:
            self._mine[name] = self._changed[name] = payload

    def peers(self, name: str) -> list[bytes]:
        """The others' notes of that name, by worker; this worker's own is not among them."""
        found = [self._theirs[index].get(name) for index in sorted(self._theirs)]
        return [payload for payload in found if payload is not None]

    def start(self) -> None:
        """Begin to send; call within the running loop."""
        if self._link is not None:
            self._task = asyncio.get_running_loop().create_task(self._run())

    async def close(self) -> None:
        """Send what is left, and stop."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None
        self.flush()

    def flush(self) -> None:
        """Send what changed now."""
        if self._link is not None and self._changed:
            changed, self._changed = self._changed, {}
            self._link.post_lazily(Op.BOARD, changed, within_s=LAZIER_S)

    def _heard(self, message: Message) -> None:
        self._theirs.setdefault(message[2], {}).update(message[3])

    def _gone(self, message: Message) -> None:
        self._theirs.pop(message[2], None)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(BOARD_EVERY_S)
            self.flush()
