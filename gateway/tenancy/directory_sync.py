"""Keeps what this process knows of the directory, and the way that changes take.

Rules:
- Every change is written to the directory first and then applied here.
- A poll every POLL_S reads other gateways' changes. While the directory is away, this process uses
  what it knows and refuses changes; the breaker decides when to ask again.
- Every write names the revisions that it is based on. If another gateway wrote first, nothing is
  written (`Raced`), and the change is made again on the new state.
- The directory tells whether it knows the last write that this process knows. If not, it lost
  writes (Redis failed over to a replica, or came back empty or older): this process first gives
  back all that it knows, then reads all.
- All of it runs under `lock`, in slices, so that requests run in between.
"""

import asyncio
import contextlib
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Final, TypeVar

import msgspec

from gateway.background_task import BackgroundTasks
from gateway.errors import Conflict, StateFailure, Unavailable
from gateway.fleet.breaker import Breaker
from gateway.ports import Directory
from gateway.records.tenancy import Denial, DirectoryChange, DirectoryState, Row, RowId
from gateway.tenancy.known import Known

POLL_S: Final = 1.0
LIMIT_S: Final = 2.0
"""Time limit of one call."""
LOAD_LIMIT_S: Final = 30.0
ATTEMPTS: Final = 5
"""Attempts at a change when other gateways' changes come first."""
RACED_S: Final = 0.05
"""Longest wait after another gateway's change came first, so that not the same one always wins."""
RETRY_S: Final = 2.0
"""Retry-After of admin operations while the directory is away."""
SLICE: Final = 50
"""Entries applied between two pauses; about 1 ms."""
BATCH: Final = 500
"""Rows given back in one call."""

_log = logging.getLogger("sluice.tenancy")
_T = TypeVar("_T")


class Raced(Exception):
    """Another gateway changed the same first; nothing was changed here."""


class DirectorySync:
    """One process's copy of the directory. A subclass computes rights from what is known."""

    def __init__(
        self,
        directory: Directory,
        clock: Callable[[], float],
        chance: Callable[[], float] = random.random,
    ) -> None:
        """`clock` monotonic, in seconds; `chance` gives [0, 1)."""
        self.lock = asyncio.Lock()
        self.known = Known()
        self.was_read = False
        """Whether the directory's content was read since the start."""
        self._directory = directory
        self._clock = clock
        self._chance = chance
        self._breaker = Breaker()
        self._away = False
        self._revision = 0
        """Newest that was read."""
        self._floor = 0
        """Newest that was read or written; later writes are above it, whatever was lost."""
        self._mark = ""
        """Name of the last write that this process knows."""
        self._replicated = True
        self._rows: set[RowId] = set()
        self._denied: set[str] = set()
        self._due = False
        """Whether `apply` is due for these, or that there are none."""
        self._background = BackgroundTasks()

    async def apply(self, rows: Iterable[RowId], denials: Iterable[str]) -> None:
        """Rows, and denials by id, are others now. Called under `lock`."""
        raise NotImplementedError

    async def settle(self) -> None:
        """Pass on what the store did not take yet. Called under `lock`."""
        raise NotImplementedError

    async def released(self) -> None:
        """Whatever takes other locks: a poll or a change is over, and `lock` is free again."""
        raise NotImplementedError

    @property
    def up(self) -> bool:
        """Whether the directory answers."""
        return self._breaker.closed

    def follow(self) -> None:
        """Poll from now on."""

        async def polling() -> None:
            while True:
                await asyncio.sleep(POLL_S * (0.9 + 0.2 * self._chance()))
                await self.poll()

        self._background.start(polling())

    async def close(self) -> None:
        """Stop polling and close the directory."""
        await self._background.close()
        await self._directory.close()

    async def poll(self) -> None:
        """Read other gateways' changes, and send the store what it missed. Never raises."""
        try:
            async with self.lock:
                with contextlib.suppress(StateFailure):  # it was logged
                    await self._refresh()
                await self._apply()
                await self.settle()
            await self.released()
        except Exception:  # noqa: BLE001 - a defect must not end the task
            _log.exception("keeping tenants in step failed")

    async def change(self, work: Callable[[], Awaitable[None]], *, reason: str) -> bool:
        """Run one change on the newest state, again if another gateway's came first.

        Returns whether a replica of the server, where there is one, has it.
        Raises Refusal: of `work`, Unavailable while the directory is away, Conflict with `reason`.
        """
        for _ in range(ATTEMPTS):
            try:
                async with self.lock:
                    self._replicated = True
                    await self._refresh()
                    await self._apply()
                    await work()
                    replicated = self._replicated
            except Raced:
                await asyncio.sleep(random.uniform(0.0, RACED_S))
            except StateFailure as error:
                raise Unavailable(
                    "The directory of tenants does not answer. Look whether the change was "
                    "made before you try again.",
                    reason="state_unavailable",
                    retry_after_s=RETRY_S,
                ) from error
            else:
                await self.released()
                return replicated
        raise Conflict(
            "Other gateways changed it at the same time, again and again. Nothing was changed: "
            "look at it, and try again.",
            reason=reason,
        )

    async def write(self, change: DirectoryChange) -> None:
        """Write a change and apply it (under `lock`). Raises Raced, StateFailure."""
        written = await self._ask(
            self._directory.write(change, floor=self._floor, after=self._mark), LIMIT_S
        )
        if written.conflict:
            raise Raced
        self._mark = written.mark
        self._floor = max(self._floor, written.revision)
        self._replicated = written.replicated
        if not written.replicated:
            _log.warning("no replica of Redis took a change in time: a failover now would lose it")

        def as_written(item: _T) -> _T:
            return msgspec.structs.replace(item, revision=written.revision)  # type: ignore[type-var]

        await self._take(map(as_written, change.puts), map(as_written, change.denials))
        await self._apply()

    async def _refresh(self) -> None:
        """Read other gateways' changes (under `lock`).

        Raises StateFailure, immediately while the breaker is open.
        """
        if not self._breaker.allows(self._clock()):
            raise StateFailure("the directory of tenants is away")
        limit_s = LIMIT_S if self._revision else LOAD_LIMIT_S
        state = await self._ask(self._directory.read(self._revision, self._mark), limit_s)
        if state is None:
            _log.warning("the directory of tenants lost writes: giving back what is known")
            known = self.known
            items = [*known.denials.values(), *known.rows.values()]
            for start in range(0, len(items), BATCH):
                some = items[start : start + BATCH]
                part = DirectoryState(
                    denials=tuple(item for item in some if isinstance(item, Denial)),
                    rows=tuple(item for item in some if isinstance(item, Row)),
                )
                written = await self._ask(
                    self._directory.give_back(part, floor=self._floor), LIMIT_S
                )
                self._floor = max(self._floor, written.revision)
            state = await self._ask(self._directory.read(0, ""), LOAD_LIMIT_S) or DirectoryState()
        await self._take(state.rows, state.denials)
        # Only now: what is cut off before is read again.
        self._revision, self._mark = state.revision, state.mark
        self._floor = max(self._floor, state.revision)
        self._due |= not self.was_read
        self.was_read = True

    async def _take(self, rows: Iterable[Row], denials: Iterable[Denial]) -> None:
        items: list[Row | Denial] = [*denials, *rows]
        async for item in paused(items):
            if isinstance(item, Row):
                changed, denied = self.known.take([item], ())
            else:
                changed, denied = self.known.take((), [item])
            self._rows |= changed
            self._denied |= denied
            self._due |= bool(changed or denied)

    async def _apply(self) -> None:
        """Have all that changed applied; what is cut off or fails is due again."""
        if not self._due:
            return
        rows, denied = self._rows, self._denied
        self._rows, self._denied, self._due = set(), set(), False
        try:
            await self.apply(rows, denied)
        except BaseException:
            self._rows |= rows
            self._denied |= denied
            self._due = True
            raise

    async def _ask(self, call: Awaitable[_T], limit_s: float) -> _T:
        """The result of a call. Raises StateFailure, also for time-outs."""
        try:
            async with asyncio.timeout(limit_s):
                answer = await call
        except (StateFailure, TimeoutError) as error:
            reason = str(error) or f"no answer within {limit_s:g} s"
            self._breaker.failed(self._clock(), self._chance())
            if not self._away:
                self._away = True
                _log.info("the directory of tenants is away: %s", reason)
            raise StateFailure(reason) from error
        self._breaker.succeeded()
        if self._away:
            self._away = False
            _log.info("the directory of tenants is back")
        return answer


async def paused(items: Iterable[_T]) -> AsyncIterator[_T]:
    """The items, with a pause for requests after every slice."""
    for number, item in enumerate(items):
        if number % SLICE == SLICE - 1:
            await asyncio.sleep(0)
        yield item
