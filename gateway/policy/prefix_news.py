"""Which prompts were sent where, told to the other processes that share the workers.

A process that knows only its own prompts expects a fraction of the hits there are: of four
gateways each would know a quarter. So each tells the others what it sent, and enters what they
tell into its index.

Rules:
- Digests of prompts are Python's own keyed hash, so processes understand one another only if
  they were given the same key (`PYTHONHASHSEED`); a check value says whether they were.
- Notes are numbered, and each is heard once, however often it is told.
- What was told as often as it is, is forgotten; and where nobody listens nothing is kept.
- A prompt's points are kept and told as one run of bytes: lists of numbers would take a listener
  ten times as long to decode, and its garbage collector would look at each.
- At most `MOST_POINTS` points are told at a time, the newest prompts first: beyond that the
  others know less, which costs hits and nothing else.
"""

import struct
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, Final

from gateway.policy.prefix_index import PrefixIndex
from gateway.policy.scheduling import Points

MOST_POINTS: Final = 4_000
"""Told at a time: some 50 KB, and 2 ms of each listener's time."""
KEPT_PROMPTS: Final = 2_000
_TELLS: Final = 2
"""So many times each prompt is told: notes replace one another, and one may not be seen."""
CHECK: Final = hash(b"sluice prefixes")

_Sent = tuple[int, int, float, bytes]
"""Number, worker, tokens per byte, points."""
_POINT: Final = struct.Struct("<qq")


class PrefixNews:
    """One pool's: what this process sent lately, and what it has heard of the others."""

    __slots__ = ("_heard", "_marks", "_number", "_sent", "wanted")

    def __init__(self) -> None:
        self.wanted = False
        """Whether others share the workers; see `listened`."""
        self._sent: deque[_Sent] = deque(maxlen=KEPT_PROMPTS)
        self._number = 0
        self._marks: deque[int] = deque([0] * _TELLS, maxlen=_TELLS)
        """Numbers of the last prompts at the last tellings."""
        self._heard: dict[str, int] = {}

    def sent(self, points: Points, worker: int, tokens_per_byte: float) -> None:
        """A prompt was sent to a worker."""
        if not self.wanted:
            return
        self._number += 1
        packed = struct.pack(f"<{2 * len(points)}q", *chain.from_iterable(points))
        self._sent.append((self._number, worker, tokens_per_byte, packed))

    def listened(self, *, by_others: bool) -> None:
        """Say whether there is anybody to tell."""
        self.wanted = by_others
        if not by_others:
            self._sent.clear()

    def __len__(self) -> int:
        return len(self._sent)

    def tell(self) -> dict[str, Any]:
        """Plain values for the other processes."""
        since = self._marks[0]
        while self._sent and self._sent[0][0] <= since:
            self._sent.popleft()
        self._marks.append(self._number)
        left = MOST_POINTS
        told: list[_Sent] = []
        for prompt in reversed(self._sent):
            left -= len(prompt[3]) // _POINT.size
            if prompt[0] <= since or left < 0:
                break
            told.append(prompt)
        return {"check": CHECK, "prompts": told[::-1]}

    def hear(self, states: Mapping[str, Mapping[str, Any]], index: PrefixIndex) -> int:
        """Enter what the others, by their names, have sent; how many prompts were new.

        A name stands for one process from its start to its end. What is malformed, or was
        digested with another key, is ignored.
        """
        new = 0
        heard = {}
        for name, state in states.items():
            last = self._heard.get(name, 0)
            prompts = state.get("prompts")
            if state.get("check") == CHECK and isinstance(prompts, Sequence):
                for prompt in prompts:
                    found = _read(prompt, index.workers, last)
                    if found is not None:
                        last = found[0]
                        index.insert(tuple(_POINT.iter_unpack(found[3])), found[1], found[2])
                        new += 1
            heard[name] = last
        self._heard = heard
        return new


def _read(prompt: Any, workers: int, last: int) -> _Sent | None:
    """A told prompt, if it is one that comes after the last."""
    if not isinstance(prompt, Sequence) or len(prompt) != 4:
        return None
    number, worker, tokens_per_byte, packed = prompt
    if not isinstance(number, int) or number <= last:
        return None
    if not isinstance(worker, int) or not 0 <= worker < workers:
        return None
    if not isinstance(tokens_per_byte, float) or not 0 < tokens_per_byte < 64:
        return None
    if not isinstance(packed, bytes) or not packed or len(packed) % _POINT.size:
        return None
    return number, worker, tokens_per_byte, packed
