"""`sluice demo`: mock engines, a gateway on embedded state, sample tenants, a story in acts.

Real processes over real sockets, from a real configuration file.
`sluice traffic` tells the story to a gateway that runs already.
"""

import asyncio
import contextlib
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, NoReturn

import httpx
import typer
from rich.console import Console

from sluice.children import ChildDied, Children
from sluice.demo.config import ADMIN_KEY, KEYS, MODEL
from sluice.demo.display import Plain, Shown
from sluice.demo.fleet import DemoFleet
from sluice.demo.story import ACTS, tell
from sluice.operate.admin_client import DEFAULT_URL, URL_VARIABLE
from sluice.terminal import PlainConsole, stop


def _known(name: str | None) -> str | None:
    if name is not None and name not in ACTS:
        raise typer.BadParameter(f"there are {', '.join(ACTS)}")
    return name


PaceOption = Annotated[
    float, typer.Option(min=0.05, help="Length of an act relative to its usual one.")
]
StoryOption = Annotated[
    str | None,
    typer.Option(
        help=f"Play this act only: {', '.join(ACTS)}.", show_default=False, callback=_known
    ),
]
OnceOption = Annotated[bool, typer.Option("--once", help="Play each act once, then end.")]
_ELSEWHERE = tuple(name for name in ACTS if name not in {"engine", "phases"})
"""Acts that need no hand on the engines, and none apart."""


def demo(
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port of the gateway; 0 takes a free one.")
    ] = 8080,
    traffic: Annotated[bool, typer.Option(help="Send sample traffic: a story in acts.")] = True,
    duration: Annotated[
        float | None, typer.Option(min=0.0, help="Stop after this many seconds.")
    ] = None,
    speed: Annotated[
        float, typer.Option(min=0.001, help="Speed of the mock engines, 1 = an A100.")
    ] = 4.0,
    story: StoryOption = None,
    once: OnceOption = False,
    pace: PaceOption = 1.0,
) -> None:
    """Run a whole fleet on this machine: 5 mock engines of 3 pools, and the gateway."""
    console = PlainConsole(stderr=True)
    signal.signal(signal.SIGTERM, _stop)
    _need_free(port, console)
    names = tuple(ACTS) if story is None else (story,)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sluice-demo-")))
        children = stack.enter_context(Children())
        fleet = DemoFleet(children, folder, port, speed)
        stack.enter_context(_exit_on_death(console, fleet))
        with console.status("starting 5 mock engines and the gateway"):
            fleet.run(compare=traffic)
        _welcome(console, fleet)
        print(f"SLUICE READY {fleet.url}", flush=True)  # noqa: T201 - the line scripts wait for
        with contextlib.suppress(KeyboardInterrupt):
            if traffic:
                _tell(children, fleet, names, duration, once=once, pace=pace)
            else:
                children.watch(duration)


def _tell(
    children: Children,
    fleet: DemoFleet,
    names: tuple[str, ...],
    duration: float | None,
    *,
    once: bool,
    pace: float,
) -> None:
    """Play the acts until the time is over, the last one has ended, or Ctrl-C."""
    title = (
        f"Sluice demo  page {fleet.url}/dashboard  Ctrl-C ends it\n"
        f"base_url {fleet.url}/v1  keys {' '.join(KEYS.values())}"
    )
    with display(title, names) as show:
        telling = partial(tell, unmanaged=fleet.unmanaged, engines=fleet, pace=pace, once=once)
        teller = Teller(partial(telling, fleet.url, show, names))
        teller.start()
        try:
            children.watch(duration, until=lambda: teller.over)
        finally:
            teller.end()
    if teller.failure is not None:
        raise teller.failure


def display(title: str, names: tuple[str, ...]) -> Plain | Shown:
    """A live table in a terminal, plain lines elsewhere."""
    if sys.stdout.isatty():
        return Shown(PlainConsole(), title, names)
    return Plain(names)


def _need_free(port: int, console: Console) -> None:
    """Exit 1 if the port is taken: that process would be mistaken for the demo's gateway."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            console.print(f"[red]port {port}: {error.strerror}[/]; give --port, or --port 0")
            raise typer.Exit(1) from None


@contextlib.contextmanager
def _exit_on_death(console: Console, fleet: DemoFleet) -> Iterator[None]:
    try:
        yield
    except ChildDied as died:
        console.print(fleet.last_words(), markup=False, highlight=False)
        console.print(f"[red]{died}")
        raise typer.Exit(1) from died


def _stop(_signal: int, _frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def _welcome(console: Console, fleet: DemoFleet) -> None:
    url = fleet.url
    console.print()
    console.print("A real gateway before 5 mock engines: answers are timed, not computed.")
    console.print(f"[bold]page[/]  {url}/dashboard   (needs no key here)")
    console.print(f"[bold]OpenAI base_url[/]  {url}/v1   model [bold]{MODEL}[/]")
    for service_class, key in KEYS.items():
        console.print(f"[bold]key[/]  {key}   ({service_class})")
    console.print(f"[bold]admin key[/]  {ADMIN_KEY}   GET {url}/admin/pools")
    console.print(f"[bold]configuration[/]  {fleet.config}   [bold]metrics[/]  {url}/metrics")
    console.print()
    console.print(
        f"curl {url}/v1/chat/completions -H 'authorization: Bearer {KEYS['elastic']}' "
        "-H 'content-type: application/json' "
        f'-d \'{{"model": "{MODEL}", "messages": [{{"role": "user", "content": "Hello"}}], '
        '"max_tokens": 32}\'',
        soft_wrap=True,
        highlight=False,
    )
    console.print()


class Teller:
    """One telling; `end` cancels it."""

    def __init__(self, story: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._story = story
        self._loop = asyncio.new_event_loop()
        self._task: asyncio.Task[None] | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.failure: Exception | None = None
        """Why it ended before its end."""

    def start(self) -> None:
        """Begin to tell."""
        self._thread.start()

    @property
    def over(self) -> bool:
        """Whether the story has ended."""
        return not self._thread.is_alive()

    def end(self) -> None:
        """Stop telling, and wait until its requests are given up."""
        if not self.over:
            self._loop.call_soon_threadsafe(self._cancel)
            self._thread.join(10.0)

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._tell())
        except asyncio.CancelledError:
            pass
        except Exception as error:  # noqa: BLE001 - the main thread reports it
            self.failure = error
        finally:
            self._loop.close()

    async def _tell(self) -> None:
        self._task = asyncio.current_task()
        await self._story()


def traffic(
    url: Annotated[
        str,
        typer.Option(envvar=URL_VARIABLE, help="The gateway; its tenants are those of the demo."),
    ] = DEFAULT_URL,
    once: OnceOption = False,
    pace: PaceOption = 1.0,
) -> None:
    """Send sample traffic with the demo's keys to a running gateway, in a loop."""
    signal.signal(signal.SIGTERM, _stop)
    base = url.rstrip("/").removesuffix("/v1")
    with contextlib.suppress(KeyboardInterrupt):
        try:
            httpx.get(f"{base}/health", timeout=5.0, trust_env=False).raise_for_status()
            with display(f"Sluice traffic  {base}", _ELSEWHERE) as show:
                asyncio.run(tell(base, show, _ELSEWHERE, pace=pace, once=once))
        except httpx.HTTPError as error:
            stop(f"{base}: {error}", 1)
