"""Where stored responses live: a `previous_response_id` goes back to the worker that has it.

Bounded: the oldest are forgotten first, and a forgotten one is bound like any request.
"""

from collections.abc import Callable

MAX_HOMES = 10_000


class ResponseHomes:
    """response id -> (pool, worker), at most `MAX_HOMES`."""

    __slots__ = ("_homes", "tell")

    def __init__(self) -> None:
        self._homes: dict[str, tuple[int, int]] = {}
        self.tell: Callable[[str, int, int], None] | None = None
        """Hears what was remembered, for processes that serve the same clients."""

    def __len__(self) -> int:
        return len(self._homes)

    def remember(self, response_id: str, pool: int, worker: int) -> None:
        """Note which worker made a response."""
        self.learn(response_id, pool, worker)
        if self.tell is not None:
            self.tell(response_id, pool, worker)

    def learn(self, response_id: str, pool: int, worker: int) -> None:
        """The same, from another process."""
        self._homes.pop(response_id, None)
        if len(self._homes) >= MAX_HOMES:
            self._homes.pop(next(iter(self._homes)))
        self._homes[response_id] = (pool, worker)

    def find(self, response_id: str | None) -> tuple[int, int] | None:
        """The (pool, worker) that made the response, if it is still known."""
        return None if response_id is None else self._homes.get(response_id)
