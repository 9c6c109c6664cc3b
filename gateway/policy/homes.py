"""Where stored responses live: a `previous_response_id` goes back to the worker that has it.

Bounded: the oldest are forgotten first, and a forgotten one is bound like any request.
"""

MAX_HOMES = 10_000


class ResponseHomes:
    """response id -> (pool, worker), at most `MAX_HOMES`."""

    __slots__ = ("_homes",)

    def __init__(self) -> None:
        self._homes: dict[str, tuple[int, int]] = {}

    def __len__(self) -> int:
        return len(self._homes)

    def remember(self, response_id: str, pool: int, worker: int) -> None:
        """Note which worker made a response."""
        self._homes.pop(response_id, None)
        if len(self._homes) >= MAX_HOMES:
            self._homes.pop(next(iter(self._homes)))
        self._homes[response_id] = (pool, worker)

    def find(self, response_id: str | None) -> tuple[int, int] | None:
        """The (pool, worker) that made the response, if it is still known."""
        return None if response_id is None else self._homes.get(response_id)
