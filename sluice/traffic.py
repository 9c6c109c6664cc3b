"""`sluice traffic`: the demo's sample traffic to a running gateway with the demo's tenants."""

import asyncio
import contextlib
import signal
from types import FrameType
from typing import Annotated, NoReturn

import httpx
import typer

from sluice.demo.command import OnceOption, PaceOption, display
from sluice.demo.story import ACTS, tell
from sluice.operate.admin_client import DEFAULT_URL, URL_VARIABLE
from sluice.terminal import stop

_ELSEWHERE = tuple(name for name in ACTS if name != "engine")
"""Acts that need no hand on the engines."""


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


def _stop(_signal: int, _frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt
