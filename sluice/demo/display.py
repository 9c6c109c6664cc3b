"""Shows the story: in a terminal as one live table, in a pipe as plain lines.

Requests of a flood that end alike share a line with a count.
"""

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from itertools import islice
from math import ceil
from typing import Final, Self, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from sluice.demo.client import Answer

_KEPT: Final = 200
_LOOKED_BACK: Final = 5
"""Lines of the table that a flood's request may still join, so that it hides no other tenant."""
_HELD_S: Final = 2.0
"""How long a plain line waits for more of its kind."""
_NAME_WIDTH: Final = 11
_STYLES: Final = {"served": "", "refused": "yellow", "failed": "bold red"}
_COLUMNS: Final = {
    "tenant": 10,
    "asked": 9,
    "tokens": 7,
    "pool": 5,
    "worker": 7,
    "first token": 11,
    "": None,
}
"""Name -> width; the last takes what is left."""


class Line:
    """One request, or some that ended alike."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.count = 1

    @property
    def outcome(self) -> str:
        """served, refused or failed."""
        answer = self.answer
        return "served" if answer.served else "refused" if answer.refused else "failed"

    def takes(self, other: Answer) -> bool:
        """Whether the other request may share this line."""
        mine = self.answer
        return (mine.refused or mine.what == "flood") and (
            (mine.who, mine.what, mine.status, mine.reason, mine.whole, mine.pool)
            == (other.who, other.what, other.status, other.reason, other.whole, other.pool)
        )

    def cells(self) -> tuple[str, ...]:
        """The columns' texts."""
        answer = self.answer
        first = "" if answer.ttft_s is None else f"{answer.ttft_s * 1000:,.0f} ms"
        tokens = f"{answer.prompt_tokens:,}" if answer.prompt_tokens else ""
        worker = answer.worker.rpartition(":")[2]
        return (answer.who, answer.what, tokens, answer.pool, worker, first, self.note())

    def note(self) -> str:
        """What was special."""
        answer = self.answer
        said = []
        if self.count > 1:
            said.append(f"x {self.count}")
        if answer.refused:
            said.append(f"429 {answer.reason}")
        elif answer.failed:
            status = f"{answer.status} " if answer.status else ""
            said.append(f"failed: {status}{answer.reason}")
        if answer.prefill_worker:
            said.append(f"prefill at {answer.prefill_worker.rpartition(':')[2]}")
        if answer.compressed != "none":
            said.append(f"cut {answer.compressed}")
        if answer.cached_tokens >= max(64, answer.prompt_tokens // 4):
            said.append(f"{100 * answer.cached_tokens / answer.prompt_tokens:.0f} % cached")
        if answer.queue_ms:
            said.append(f"queued {answer.queue_ms / 1000:.1f} s")
        if answer.served and answer.ttft_s is None and self.count == 1:
            said.append(f"whole in {answer.took_s:.1f} s")
        return ", ".join(said)


class Plain:
    """One line after another; a flood has one a kind of answer every two seconds."""

    def __init__(
        self,
        names: tuple[str, ...] = (),
        out: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`names`: the acts, in order."""
        self._names = names
        self._out = out or sys.stdout
        self._clock = clock
        self._held: list[Line] = []
        self._held_s = 0.0
        """Since when the first of them waits."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._flush()

    def act(self, name: str, caption: str) -> None:
        self._flush()
        place = ""
        if len(self._names) > 1:
            place = f" (act {self._names.index(name) + 1} of {len(self._names)})"
        self._say(f"{name}: {caption}{place}")
        self._row(*_COLUMNS)

    def line(self, answer: Answer) -> None:
        if self._held and self._clock() - self._held_s > _HELD_S:
            self._flush()
        for held in self._held:
            if held.takes(answer):
                held.count += 1
                return
        line = Line(answer)
        if not line.takes(answer):  # nothing else is of its kind
            self._row(*line.cells())
            return
        if not self._held:
            self._held_s = self._clock()
        self._held.append(line)

    def result(self, name: str, text: str) -> None:
        self._flush()
        self._say(f"{name} = {text}")

    def _flush(self) -> None:
        for line in self._held:
            self._row(*line.cells())
        self._held = []

    def _row(self, *cells: str) -> None:
        who, what, tokens, pool, worker, first, note = cells
        row = (
            f"  {who:<10} {what:<10} {tokens or '-':>7}  {pool:<5} {worker:<8} {first:>11}  {note}"
        )
        self._say(row.rstrip())

    def _say(self, text: str) -> None:
        self._out.write(f"{text}\n")
        self._out.flush()


class Shown:
    """A live table of the last requests, above it the act, below it what each act measured."""

    def __init__(self, console: Console, title: str, names: tuple[str, ...]) -> None:
        self._console = console
        self._title = title
        self._lock = threading.Lock()
        self._lines: deque[Line] = deque(maxlen=_KEPT)
        self._results = dict.fromkeys(names, "")
        self._name = self._caption = ""
        self._live = Live(
            console=console, get_renderable=self.render, refresh_per_second=4, transient=False
        )

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def act(self, name: str, caption: str) -> None:
        with self._lock:
            self._name, self._caption = name, caption
            self._lines.clear()

    def line(self, answer: Answer) -> None:
        with self._lock:
            for line in islice(reversed(self._lines), _LOOKED_BACK):
                if line.takes(answer):
                    line.count += 1
                    return
            self._lines.append(Line(answer))

    def result(self, name: str, text: str) -> None:
        with self._lock:
            self._results[name] = text

    def render(self) -> RenderableType:
        """As much as fits the terminal."""
        with self._lock:
            results = self._results_table()
            room = self._console.size.height - 4 - self._height_of(self._title.split("\n")[1:])
            room -= self._height_of(self._results.values())
            lines = list(self._lines)[-max(3, room) :]
            head = Text.assemble((f"{self._name}  ", "bold cyan"), (self._caption, "bold"))
            return Group(Text(self._title, style="dim"), head, _table(lines, room), results)

    def _results_table(self) -> Table:
        found = Table.grid(padding=(0, 1))
        found.add_column(width=_NAME_WIDTH - 1)
        found.add_column(ratio=1)
        for name, text in self._results.items():
            now = name == self._name
            style = "bold cyan" if now else "" if text else "dim"
            found.add_row(Text(name, style=style), text or ("..." if now else ""))
        return found

    def _height_of(self, texts: Iterable[str]) -> int:
        width = max(20, self._console.size.width - _NAME_WIDTH - 4)
        return sum(max(1, ceil(len(text) / width)) for text in texts)


def _table(lines: list[Line], room: int) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), expand=True, header_style="dim")
    for name, width in _COLUMNS.items():
        table.add_column(
            name,
            justify="right" if name in {"tokens", "first token"} else "left",
            no_wrap=True,
            overflow="ellipsis",
            width=width,
            ratio=None if width else 1,
        )
    for line in lines:
        table.add_row(*line.cells(), style=_STYLES[line.outcome])
    for _ in range(room - len(lines)):
        table.add_row()
    return table
