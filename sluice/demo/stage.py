"""What an act has at hand, and figures that several acts state."""

import asyncio
import random
from collections.abc import Awaitable, Iterable, Sequence
from statistics import median
from typing import Protocol

import msgspec

from sluice.demo.client import Answer, Client


class Display(Protocol):
    """Shows the story; every line is one request."""

    def act(self, name: str, caption: str) -> None:
        """An act begins."""

    def line(self, answer: Answer) -> None:
        """A request ended."""

    def result(self, name: str, text: str) -> None:
        """What was measured in an act."""


class Engines(Protocol):
    """The engines behind the gateway, where this process may look at them and end them."""

    @property
    def short(self) -> Sequence[str]:
        """URLs of the short pool's engines."""

    def kill(self, url: str) -> None:
        """End an engine at once, as a crash does."""

    def start(self, url: str) -> None:
        """Start it again."""


class Stage(msgspec.Struct, frozen=True, kw_only=True):
    """Gateway, comparison and display of one telling."""

    gateway: Client
    show: Display
    unmanaged: Client | None = None
    """A plain relay before the same engines."""
    engines: Engines | None = None
    pace: float = 1.0
    """Length of an act relative to its usual one."""
    rng: random.Random = msgspec.field(default_factory=random.Random)

    async def ask(self, asked: Awaitable[Answer]) -> Answer:
        """Await a request and show it."""
        answer = await asked
        self.show.line(answer)
        return answer

    async def wait(self, usual_s: float) -> None:
        """A pause of an act."""
        await asyncio.sleep(usual_s * self.pace)


def median_ms(answers: Iterable[Answer]) -> float | None:
    """Median time to the first token, ms; None without a stream that was served."""
    found = [a.ttft_s * 1000 for a in answers if a.served and a.ttft_s is not None]
    return median(found) if found else None


def high_ms(answers: Iterable[Answer]) -> float | None:
    """The .95 quantile of times to the first token, ms."""
    found = sorted(a.ttft_s * 1000 for a in answers if a.served and a.ttft_s is not None)
    return found[min(len(found) - 1, int(0.95 * len(found)))] if found else None


def ms(value: float | None) -> str:
    """In words."""
    return "none" if value is None else f"{value:,.0f} ms"


def counted(answers: Sequence[Answer]) -> str:
    """How requests ended: `40 of 42 answered, 2 refused, 0 failed`."""
    served, refused = sum(a.served for a in answers), sum(a.refused for a in answers)
    failed = len(answers) - served - refused
    said = f", {refused} refused (429)" if refused else ""
    return f"{served} of {len(answers)} answered{said}, {failed} failed"


def share(part: float, whole: float) -> str:
    """Per cent."""
    return f"{100 * part / whole:.0f} %" if whole else "none"
