"""Detect frozen engines: those that make no progress on the requests they were sent.

An engine makes progress when any of its answers grows or completes. A frozen engine may still
answer its health checks. Its sign is silence: time in which some request waits for its first byte
longer than allowed while no answer grows. Silence adds up, even if the waiting clients give up,
until the engine makes progress. A client that leaves within its allowed time adds none.

Times are arguments, in seconds of any monotonic clock.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final

PREFILL_TOKENS_PER_S: Final = 1000.0
"""Prefill rate of a slow engine, used without a better prediction."""
DECODE_TOKENS_PER_S: Final = 10.0
"""Decode rate of a slow engine, for answers that are not streamed: they arrive only when whole."""
MIN_ALLOWED_S: Final = 1.0


class Pending:
    """A running attempt at a worker."""

    __slots__ = ("allowed_s", "emitted", "moving", "owner", "seen", "sent_s")

    def __init__(
        self, owner: Any, sent_s: float, allowed_s: float, emitted: Callable[[], int]
    ) -> None:
        """`allowed_s`: time to its first byte (see `allowed_s`); `emitted` counts its output."""
        self.owner = owner
        self.sent_s = sent_s
        self.allowed_s = allowed_s
        self.emitted = emitted
        self.seen = 0
        """`emitted` at the last look."""
        self.moving = False
        """Whether it is being moved to another worker."""


class Progress:
    """Progress of one pool's engines. Arrays are by worker; silence is at the engine's first."""

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
        """`siblings`: by worker, the workers of its engine, itself included."""
        n = len(siblings)
        self._siblings = siblings
        self.pending: list[dict[Pending, None]] = [{} for _ in range(n)]
        self._silent_s = [0.0] * n
        """Silence: overdue time since the engine last made progress."""
        self._overdue = [False] * n
        """Whether a request was overdue at the last look."""
        self._patience_s = [0.0] * n
        """The longest allowed time of any request that waited during the silence."""
        self._answers = [0] * n
        """Attempts that ended with progress since the last look."""
        self._looked_s = [0.0] * n

    def join(self, ranks: Sequence[int], now_s: float) -> None:
        """A new engine's ranks take these places; `siblings` lists them already."""
        for rank in ranks:
            while rank >= len(self.pending):
                self.pending.append({})
                for values in (self._silent_s, self._patience_s, self._looked_s):
                    values.append(0.0)
                self._overdue.append(False)
                self._answers.append(0)
            self._silent_s[rank] = self._patience_s[rank] = 0.0
            self._looked_s[rank] = now_s
            self._overdue[rank] = False
            self._answers[rank] = 0

    def begin(self, worker: int, pending: Pending) -> None:
        """Note that an attempt was sent."""
        self.pending[worker][pending] = None

    def end(self, worker: int, pending: Pending, *, answered: bool) -> None:
        """Note that an attempt ended; `answered`: with the tokens that it asked for."""
        self.pending[worker].pop(pending, None)
        if answered or pending.emitted() != pending.seen:
            self._answers[worker] += 1

    def look(self, worker: int, now_s: float, late_s: float = 0.0) -> bool:
        """Check an engine periodically; True if it made progress since the last look.

        `late_s`: total time that this process has stood still so far; it adds no silence.
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
        """Note progress of the worker's engine: its silence ends."""
        head = self._siblings[worker][0]
        self._silent_s[head] = self._patience_s[head] = 0.0

    def silent_s(self, worker: int) -> float:
        """Seconds of silence of a worker's engine."""
        return self._silent_s[self._siblings[worker][0]]

    def frozen(self, worker: int, stall_s: float) -> bool:
        """Whether an engine was silent for too long and a request is overdue now.

        Without an overdue request the engine may be tried again.
        """
        head = self._siblings[worker][0]
        return self._overdue[head] and self._silent_s[head] > stall_s + self._patience_s[head]

    def waiting(self, worker: int) -> list[Pending]:
        """Attempts that wait for a first byte from a worker's engine."""
        ranks = self._siblings[worker]
        return [p for rank in ranks for p in self.pending[rank] if not p.emitted()]


def allowed_s(prompt_tokens: int, output_tokens: int, predicted_s: float) -> float:
    """Allowed seconds to a first byte; pass `output_tokens` 0 for a streamed answer."""
    prefill_s = max(predicted_s, prompt_tokens / PREFILL_TOKENS_PER_S)
    return MIN_ALLOWED_S + prefill_s + output_tokens / DECODE_TOKENS_PER_S
