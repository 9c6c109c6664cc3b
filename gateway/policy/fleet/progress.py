"""Whether a pool's engines get on with what they were sent.

An engine gets on when any of its answers grows or is complete. A frozen one may still answer
its health checks: what tells is time in which somebody waits for a first byte, longer than his
own request may take, and nobody is given a byte. That time adds up, over clients that give up
too, until the engine shows some progress. A client that leaves early leaves no mark.

Times are arguments, in seconds of any monotonic clock.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final

PREFILL_TOKENS_PER_S: Final = 1000.0
"""Of a slow engine, where nothing predicts better."""
DECODE_TOKENS_PER_S: Final = 10.0
"""Of a slow engine: an answer that is not streamed shows nothing until it is whole."""
LEAST_ALLOWED_S: Final = 1.0


class Pending:
    """An attempt under way at a worker."""

    __slots__ = ("allowed_s", "emitted", "moving", "owner", "seen", "sent_s")

    def __init__(
        self, owner: Any, sent_s: float, allowed_s: float, emitted: Callable[[], int]
    ) -> None:
        """`allowed_s` to its first byte (see `allowed_s`); `emitted` counts what came of it."""
        self.owner = owner
        self.sent_s = sent_s
        self.allowed_s = allowed_s
        self.emitted = emitted
        self.seen = 0
        """What `emitted` said at the last look."""
        self.moving = False
        """Being taken to another worker."""


class Progress:
    """Of one pool's engines; by worker, the silence by the engine's first one."""

    __slots__ = (
        "_answers",
        "_looked_s",
        "_overdue",
        "_patience_s",
        "_siblings",
        "_silent_s",
        "pending",
    )

    def __init__(self, siblings: Sequence[Sequence[int]]) -> None:
        """`siblings`: by worker, those of its engine, itself included."""
        n = len(siblings)
        self._siblings = siblings
        self.pending: list[dict[Pending, None]] = [{} for _ in range(n)]
        self._silent_s = [0.0] * n
        """Overdue time since the engine last showed progress."""
        self._overdue = [False] * n
        """Whether somebody waited too long at the last look."""
        self._patience_s = [0.0] * n
        """The longest that anyone who waited in that time was allowed."""
        self._answers = [0] * n
        """Given since the last look."""
        self._looked_s = [0.0] * n

    def begin(self, worker: int, pending: Pending) -> None:
        """An attempt was sent."""
        self.pending[worker][pending] = None

    def end(self, worker: int, pending: Pending, *, answered: bool) -> None:
        """It has ended; `answered`: with the tokens that it asked the engine for."""
        self.pending[worker].pop(pending, None)
        if answered or pending.emitted() != pending.seen:
            self._answers[worker] += 1

    def look(self, worker: int, now_s: float, late_s: float = 0.0) -> bool:
        """Look at an engine now and then: whether it got on since the last time.

        `late_s`: how long this process has stood still so far; that time counts for nobody.
        """
        lived_s = now_s - late_s
        ranks = self._siblings[worker]
        head = ranks[0]
        moved, overdue_s, allowed_s = False, 0.0, 0.0
        for rank in ranks:
            if self._answers[rank]:
                self._answers[rank] = 0
                moved = True
            for pending in self.pending[rank]:
                count = pending.emitted()
                if count != pending.seen:
                    pending.seen = count
                    moved = True
                elif not count:
                    overdue_s = max(overdue_s, now_s - pending.sent_s - pending.allowed_s)
                    allowed_s = max(allowed_s, pending.allowed_s)
        self._overdue[head] = overdue_s > 0
        if moved:
            self.got_on(worker)
        elif overdue_s > 0:
            self._silent_s[head] += min(overdue_s, lived_s - self._looked_s[head])
            self._patience_s[head] = max(self._patience_s[head], allowed_s)
        self._looked_s[head] = lived_s
        return moved

    def got_on(self, worker: int) -> None:
        """The engine made progress."""
        head = self._siblings[worker][0]
        self._silent_s[head] = self._patience_s[head] = 0.0

    def silent_s(self, worker: int) -> float:
        """How long an engine has kept people waiting without any progress."""
        return self._silent_s[self._siblings[worker][0]]

    def frozen(self, worker: int, stall_s: float) -> bool:
        """Whether an engine has been silent longer than it may, and somebody waits too long now.

        Without the latter it may be tried again.
        """
        head = self._siblings[worker][0]
        return self._overdue[head] and self._silent_s[head] > stall_s + self._patience_s[head]

    def waiting(self, worker: int) -> list[Pending]:
        """Who waits at a worker's engine for a first byte."""
        ranks = self._siblings[worker]
        return [p for rank in ranks for p in self.pending[rank] if not p.emitted()]


def allowed_s(prompt_tokens: int, output_tokens: int, predicted_s: float) -> float:
    """Seconds to a first byte that nobody need wonder about; 0 output where it is streamed."""
    prefill_s = max(predicted_s, prompt_tokens / PREFILL_TOKENS_PER_S)
    return LEAST_ALLOWED_S + prefill_s + output_tokens / DECODE_TOKENS_PER_S
