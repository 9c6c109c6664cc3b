"""A client of the token-pool experiments: one thread that asks, waits, and asks again."""

from collections.abc import Callable

from bench.token_pools.lab import Lab
from bench.token_pools.records import AdmittedJob

RETRY_AFTER_S = 60.0
"""No cap on waits: Retry-After is never longer."""


class Thread:
    """A client that asks, waits for the answer, and asks again."""

    def __init__(
        self,
        lab: Lab,
        tenant: str,
        draw: Callable[[], tuple[int, int]],
        *,
        until_s: float,
        wait_cap_s: float,
    ) -> None:
        self._lab, self._tenant, self._draw = lab, tenant, draw
        self._until_s, self._wait_cap_s = until_s, wait_cap_s

    def ask(self) -> None:
        """A new request."""
        self._send(*self._draw())

    def _send(self, prompt: int, output: int) -> None:
        if self._lab.now_s >= self._until_s:
            return
        refused = self._lab.offer(self._tenant, prompt, output, done=self._answered)
        if refused is not None:
            wait_s = min(refused.retry_after_s, self._wait_cap_s)
            self._lab.at(self._lab.now_s + wait_s, lambda: self._send(prompt, output))

    def _answered(self, _: AdmittedJob) -> None:
        self._lab.at(self._lab.now_s, self.ask)
