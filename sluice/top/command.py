"""`sluice top`: pools, entitlements, workers and the last decisions of a running gateway."""

import contextlib
import os
import queue
import select
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Final

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from sluice.operate.gateway_client import (
    DEFAULT_URL,
    GatewayClient,
    KeyFileOption,
    KeyOption,
    NotRead,
    UrlOption,
)
from sluice.terminal import JsonOption, console, echo_json, stop
from sluice.top.screen import screen

ENTITLEMENT_ORDERS: Final = ("load", "refused", "debt", "priority", "name")
WORKER_ORDERS: Final = ("state", "load", "name")
"""Those that are out come first."""
_LOOK_S: Final = 0.1
_AGAIN_S: Final = 2.0
_REFUSED: Final = frozenset({400, 401, 403, 404})
_MAX_TEXT: Final = 64


@dataclass(slots=True)
class Controls:
    """The state that keys change; `press` takes one key at a time."""

    entitlements_order: str = ENTITLEMENT_ORDERS[0]
    workers_order: str = WORKER_ORDERS[0]
    text: str = ""
    typing: bool = False
    """Whether keys are letters of the filter."""
    paused: bool = False
    done: bool = False

    def press(self, key: str) -> bool:
        """Apply a key; returns whether the gateway must be asked anew."""
        if self.typing:
            return self._type(key)
        if key in {"q", "\x03"}:
            self.done = True
        elif key == "s":
            self.entitlements_order = _next(ENTITLEMENT_ORDERS, self.entitlements_order)
            return True
        elif key == "w":
            self.workers_order = _next(WORKER_ORDERS, self.workers_order)
            return True
        elif key == "/":
            self.typing = True
        elif key == " ":
            self.paused = not self.paused
        elif key == "\x1b" and self.text:
            self.text = ""
            return True
        return False

    def _type(self, key: str) -> bool:
        if key in {"\r", "\n"}:
            self.typing = False
        elif key in {"\x1b", "\x03"}:
            self.typing, self.text = False, ""
        elif key in {"\x7f", "\b"}:
            self.text = self.text[:-1]
        elif key.isprintable() and len(self.text) < _MAX_TEXT:
            self.text += key
        else:
            return False
        return True

    def query(self) -> dict[str, str]:
        """The view to ask for."""
        found = {"entitlements_order": self.entitlements_order, "workers_order": self.workers_order}
        if self.text:
            found |= dict.fromkeys(("entitlements", "workers", "decisions"), self.text)
        return found

    def help(self) -> str:
        """The keys, and the orders that two of them change."""
        return (
            f"q quit  s entitlements by {self.entitlements_order}  "
            f"w workers by {self.workers_order}  / filter  space pause"
        )

    def note(self) -> str:
        """What is in force, for the first line."""
        parts = []
        if self.text or self.typing:
            parts.append(f"/{self.text}{'_' if self.typing else ''}")
        if self.paused:
            parts.append("paused")
        return " ".join(parts)


def _next(orders: tuple[str, ...], now: str) -> str:
    return orders[(orders.index(now) + 1) % len(orders)]


def top(
    url: UrlOption = DEFAULT_URL,
    key: KeyOption = None,
    admin_key_file: KeyFileOption = None,
    once: Annotated[bool, typer.Option("--once", help="Print the figures once.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Pools, entitlements, workers and the last decisions of a gateway, once a second."""
    client = GatewayClient(url, key, admin_key_file)
    out = console()
    live = sys.stdout.isatty() and sys.stdin.isatty()
    if once or as_json or not live:
        figures = once_of(client)
        if as_json:
            echo_json(figures)
        else:
            out.print(screen(figures, out.width, None))
        return
    _watch(client, out)


def once_of(client: GatewayClient) -> dict[str, Any]:
    """The figures after a second, when there are rates."""
    found: dict[str, Any] = {}
    try:
        for number, found in enumerate(client.events({})):  # noqa: B007 - the last one is wanted
            if number:
                break
    except NotRead as error:
        client.give_up(error)
    if not found:
        stop(f"{client.url}: the gateway is shutting down", 1)
    return found


def _watch(client: GatewayClient, out: Console) -> None:
    """Draw until q or Ctrl-C; reading and drawing never wait for each other."""
    controls, reader = Controls(), _Reader(client)
    reader.ask(controls.query())
    with _keys(), Live(console=out, screen=True, auto_refresh=False) as live:
        figures: dict[str, Any] | None = None
        while not controls.done:
            pressed = _pressed()
            changed = bool(pressed)
            asks = [controls.press(key) for key in pressed]
            if any(asks):
                reader.ask(controls.query())
            newest = reader.newest()
            if newest is not None and not controls.paused:
                figures, changed = newest, True
            if changed or reader.problem:
                live.update(_drawn(out, figures, controls, reader.problem), refresh=True)
            if reader.refused is not None:
                break
            time.sleep(_LOOK_S)
    reader.stop()
    if reader.refused is not None:
        client.give_up(reader.refused)


def _drawn(
    out: Console, figures: dict[str, Any] | None, controls: Controls, problem: str
) -> Group | Text:
    note = " ".join(part for part in (controls.note(), problem) if part)
    if figures is None:
        return Text(note or "asking the gateway ...")
    foot = Text(controls.help(), style="dim", no_wrap=True, overflow="ellipsis")
    return Group(screen(figures, out.width, out.height - 1, note), foot)


class _Reader:
    """Reads figures in a thread of its own, so that keys are heard at once."""

    def __init__(self, client: GatewayClient) -> None:
        self._client = client
        self._found: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._turn = 0
        self.problem = ""
        self.refused: NotRead | None = None
        """Why it is useless to try again."""

    def ask(self, query: dict[str, str]) -> None:
        """Read another view from now on."""
        self._turn += 1
        threading.Thread(target=self._read, args=(self._turn, query), daemon=True).start()

    def stop(self) -> None:
        """Let the thread end at its next figures."""
        self._turn += 1

    def newest(self) -> dict[str, Any] | None:
        """The newest figures since the last call, if there are any."""
        found = None
        with contextlib.suppress(queue.Empty):
            while True:
                found = self._found.get_nowait()
        return found

    def _read(self, turn: int, query: dict[str, str]) -> None:
        while turn == self._turn:
            try:
                for figures in self._client.events(query):
                    if turn != self._turn:
                        return
                    self.problem = ""
                    self._found.put(figures)
            except NotRead as error:
                if turn == self._turn:
                    self.problem = str(error)
                    self.refused = error if error.status in _REFUSED else None
            time.sleep(_AGAIN_S)


@contextlib.contextmanager
def _keys() -> Iterator[None]:
    """Single keys from the terminal, without echo; it is put back at the end."""
    import termios  # not on Windows
    import tty

    before = termios.tcgetattr(sys.stdin)
    try:
        tty.setcbreak(sys.stdin)
        yield
    except KeyboardInterrupt:
        pass
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _pressed() -> str:
    """The keys pressed since the last call; of arrows and the like nothing."""
    if not select.select([sys.stdin], [], [], 0)[0]:
        return ""
    found = os.read(sys.stdin.fileno(), 256).decode(errors="ignore")
    return "" if found.startswith("\x1b") and len(found) > 1 else found
