"""Runs an administrator's change on the newest version of an entry, again if another came first."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from gateway.adapters.entitlements.following import ATTEMPTS, Following
from gateway.adapters.entitlements.known_directory import Raced
from gateway.errors import Conflict, PreconditionFailed, StateFailure, Unavailable
from gateway.ports import Entry, StoredEntry

_T = TypeVar("_T")
RACED_S: Final = 0.05
"""Longest wait after another gateway's change came first, so that not the same one always wins."""
RETRY_S: Final = 2.0
"""Retry-After of admin operations while the directory is away."""


async def changing(
    sync: Following[Entry], work: Callable[[], Awaitable[_T]], *, of: str, reason: str
) -> _T:
    """Run one change at a time. Raises Unavailable, and Conflict with a reason."""
    for _ in range(ATTEMPTS):
        async with sync.lock:
            try:
                await sync.refresh()
                return await work()
            except Raced:
                pass
            except StateFailure as error:
                raise Unavailable(
                    f"The directory of {of} does not answer. Look whether the change was made "
                    "before you try again.",
                    reason="state_unavailable",
                    code="state_unavailable",
                    retry_after_s=RETRY_S,
                ) from error
        await asyncio.sleep(random.uniform(0.0, RACED_S))
    raise Conflict(
        "Other gateways changed it at the same time, again and again. Nothing was changed: "
        "look at it, and try again.",
        reason=reason,
        code=reason,
    )


def check_version(entry: StoredEntry, version: int | None, *, reason: str) -> None:
    """Raises PreconditionFailed if the entry is at another version than the one asked for."""
    if version is not None and entry.version != version:
        raise PreconditionFailed(
            f"'{entry.name}' was changed since: it is at revision {entry.version}. Read it again.",
            reason=reason,
            code=reason,
            param="if-match",
        )
