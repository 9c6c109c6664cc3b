"""Send requests when they are due, whatever became of earlier ones: an open loop."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import msgspec

from sluice.replay.client import Answered, ReplayClient
from sluice.replay.load import ReplayRequest
from sluice.replay.texts import Texts

LET_FINISH_S: Final = 30.0
"""Seconds that running requests get to finish after sending stops."""
_AHEAD_S: Final = 0.5

Say = Callable[[int, int], None]
"""Progress callback, called now and then with (sent, ended)."""


class Replayed(msgspec.Struct, frozen=True, kw_only=True):
    """All requests that were sent, in order."""

    asks: tuple[ReplayRequest, ...]
    answers: tuple[Answered, ...]
    """One result per request; abandoned requests are errors."""
    started_s: float
    ended_s: float
    stopped: bool
    """Whether the user stopped it early."""
    most_open: int
    """Most requests open at once."""

    @property
    def late_s(self) -> list[float]:
        """How late each was sent, because of the limit on open requests or a busy machine."""
        return [answer.sent_s - answer.due_s for answer in self.answers]


async def replay(
    client: ReplayClient,
    texts: Texts,
    asks: Sequence[ReplayRequest],
    *,
    most_open: int,
    stop: asyncio.Event,
    say: Say,
    keys: Mapping[str, str] | None = None,
) -> Replayed:
    """Send all, each with its entitlement's key of `keys`.

    `stop` ends the sending, and running requests get LET_FINISH_S to finish.
    """
    run = _ReplayRun(client, asks, most_open, keys or {})
    started_s = time.perf_counter() + 0.1
    for index, ask in enumerate(asks):
        # The text is generated ahead of the due time, since that takes time.
        text = texts.prompt(ask.category or "prose", ask.prompt_tokens)
        due_s = started_s + ask.at_s
        if not await _until(due_s, stop):
            break
        await run.start(index, text, due_s)
        say(run.sent, run.ended)
    await run.finish(lambda: say(run.sent, run.ended))
    return Replayed(
        asks=tuple(asks[: run.sent]),
        answers=tuple(run.answer(i) for i in range(run.sent)),
        started_s=started_s,
        ended_s=time.perf_counter(),
        stopped=stop.is_set(),
        most_open=run.most,
    )


class _ReplayRun:
    """Open requests and results."""

    def __init__(
        self,
        client: ReplayClient,
        asks: Sequence[ReplayRequest],
        most_open: int,
        keys: Mapping[str, str],
    ) -> None:
        self._client = client
        self._keys = keys
        self._asks = asks
        self._places = asyncio.Semaphore(most_open)
        self._open: set[asyncio.Task[None]] = set()
        self._answers: dict[int, Answered] = {}
        self._due: list[float] = []
        self.most = 0

    @property
    def sent(self) -> int:
        """Requests sent so far."""
        return len(self._due)

    @property
    def ended(self) -> int:
        """Requests ended so far."""
        return len(self._answers)

    async def start(self, index: int, text: str, due_s: float) -> None:
        """Send one request as soon as the limit on open requests allows."""
        await self._places.acquire()
        self._due.append(due_s)
        task = asyncio.create_task(self._send(index, text, due_s))
        self._open.add(task)
        self.most = max(self.most, len(self._open))
        task.add_done_callback(self._closed)

    async def finish(self, say: Callable[[], None]) -> None:
        """Let running requests end; abandon those that take too long."""
        until_s = time.perf_counter() + LET_FINISH_S
        while self._open and time.perf_counter() < until_s:
            await asyncio.wait(self._open, timeout=0.2)
            say()
        for task in self._open:
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)

    def answer(self, index: int) -> Answered:
        """The result of a request that was sent."""
        due_s = self._due[index]
        missing = Answered(due_s=due_s, sent_s=due_s, error="not ended in time")
        return self._answers.get(index, missing)

    def _closed(self, task: asyncio.Task[None]) -> None:
        self._open.discard(task)
        self._places.release()

    async def _send(self, index: int, text: str, due_s: float) -> None:
        ask = self._asks[index]
        key = self._keys.get(ask.entitlement or "")
        self._answers[index] = await self._client.send(text, ask.output_tokens, due_s, key)


async def _until(due_s: float, stop: asyncio.Event) -> bool:
    """Wait until a time; False if stopped before."""
    while (wait_s := due_s - time.perf_counter()) > 0 and not stop.is_set():
        try:
            async with asyncio.timeout(min(wait_s, _AHEAD_S)):
                await stop.wait()
        except TimeoutError:
            pass
    if due_s <= time.perf_counter():
        await asyncio.sleep(0)  # late: first let the loop read other requests' bytes
    return not stop.is_set()


def commonest(answers: Sequence[Answered]) -> list[tuple[str, int]]:
    """Errors with their counts, the most frequent first."""
    return Counter(a.error for a in answers if a.error).most_common(5)
