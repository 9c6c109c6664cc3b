"""Detect frozen engines: those that make no progress on the requests they were sent.

An engine makes progress when any of its answers grows or completes. A frozen engine may still
answer its health checks. Its sign is silence: time in which some request waits for its first byte
longer than allowed while no answer grows. Silence adds up, even if the waiting clients give up,
until the engine makes progress. A client that leaves within its allowed time adds none.

Times are arguments, in seconds of any monotonic clock.
"""

from collections.abc import Callable
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
    """Progress of one engine, over all its ranks."""

    __slots__ = ("_answered", "_looked_s", "_overdue", "_patience_s", "pending", "silent_s")

    def __init__(self, now_s: float = 0.0) -> None:
        self.pending: dict[Pending, None] = {}
        """Running attempts."""
        self.silent_s = 0.0
        """Silence: overdue time since the engine last made progress."""
        self._overdue = False
        """Whether a request was overdue at the last look."""
        self._patience_s = 0.0
        """The longest allowed time of any request that waited during the silence."""
        self._answered = False
        """Whether an attempt ended with progress since the last look."""
        self._looked_s = now_s

    def begin(self, pending: Pending) -> None:
        """Note that an attempt was sent."""
        self.pending[pending] = None

    def end(self, pending: Pending, *, answered: bool) -> None:
        """Note that an attempt ended; `answered`: with the tokens that it asked for."""
        self.pending.pop(pending, None)
        if answered or pending.emitted() != pending.seen:
            self._answered = True

    def look(self, now_s: float, late_s: float = 0.0) -> bool:
        """Check the engine periodically; True if it made progress since the last look.

        `late_s`: total time that this process has stood still so far; it adds no silence.
        """
        lived_s = now_s - late_s
        moved, self._answered = self._answered, False
        overdue_s, allowed_s = 0.0, 0.0
        for pending in self.pending:
            count = pending.emitted()
            if count != pending.seen:
                pending.seen = count
                moved = True
            elif not count:
                overdue_s = max(overdue_s, now_s - pending.sent_s - pending.allowed_s)
                allowed_s = max(allowed_s, pending.allowed_s)
        self._overdue = overdue_s > 0
        if moved:
            self.got_on()
        elif overdue_s > 0:
            self.silent_s += min(overdue_s, lived_s - self._looked_s)
            self._patience_s = max(self._patience_s, allowed_s)
        self._looked_s = lived_s
        return moved

    def got_on(self) -> None:
        """Note progress: the silence ends."""
        self.silent_s = self._patience_s = 0.0

    def frozen(self, stall_s: float) -> bool:
        """Whether the engine was silent for too long and a request is overdue now.

        Without an overdue request the engine may be tried again.
        """
        return self._overdue and self.silent_s > stall_s + self._patience_s

    def waiting(self) -> list[Pending]:
        """Attempts that wait for a first byte."""
        return [pending for pending in self.pending if not pending.emitted()]


def allowed_s(prompt_tokens: int, output_tokens: int, predicted_s: float) -> float:
    """Allowed seconds to a first byte; pass `output_tokens` 0 for a streamed answer."""
    prefill_s = max(predicted_s, prompt_tokens / PREFILL_TOKENS_PER_S)
    return MIN_ALLOWED_S + prefill_s + output_tokens / DECODE_TOKENS_PER_S
