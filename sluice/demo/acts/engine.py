"""An engine is killed under traffic; nobody's request fails, and the engine comes back."""

import asyncio
import re
import time
from collections.abc import Sequence

from sluice.demo import prompts
from sluice.demo.client import Answer, Client
from sluice.demo.stage import Stage, counted

NAME = "engine"
CAPTION = "An engine is killed while it answers, and started again."
_EVERY_S = 0.1
_BEFORE_S, _DOWN_S = 2.0, 4.0
_BACK_LIMIT_S = 30.0
_TOKENS = 200


async def play(stage: Stage) -> str:
    """Traffic over the death and return of an engine; what was measured."""
    engines = stage.engines
    if engines is None:
        raise RuntimeError("this act needs engines that may be ended")
    victim = engines.short[0]
    before = await retries(stage.gateway)
    asked: list[asyncio.Task[Answer]] = []
    traffic = asyncio.create_task(_traffic(stage, asked))
    try:
        await stage.wait(_BEFORE_S)
        engines.kill(victim)
        await stage.wait(_DOWN_S)
        started_s = time.monotonic()
        engines.start(victim)
        back_s = await _back(stage.gateway, victim, started_s)
    finally:
        traffic.cancel()
    answers = await asyncio.gather(*asked)
    return said(victim, answers, await retries(stage.gateway) - before, back_s)


async def _traffic(stage: Stage, asked: list[asyncio.Task[Answer]]) -> None:
    """Whole answers: until its first byte a request can move to another engine."""
    while True:
        who = ("guaranteed", "elastic")[len(asked) % 2]
        text = prompts.question(f"{len(asked)}: {stage.rng.choice(prompts.QUESTIONS)}")
        request = stage.gateway.ask(
            who, "question", text, max_tokens=_TOKENS, stream=False, whole_length=True
        )
        asked.append(asyncio.create_task(stage.ask(request)))
        await asyncio.sleep(_EVERY_S)


async def _back(gateway: Client, engine: str, since_s: float) -> float | None:
    """Seconds until the gateway sends to the engine again; None: not within the limit."""
    worker = re.escape(engine.partition("://")[2])
    while time.monotonic() - since_s < _BACK_LIMIT_S:
        page = await gateway.page("/metrics")
        if re.search(rf'^sluice_worker_up\{{.*worker="{worker}"\}} 1', page, re.MULTILINE):
            return time.monotonic() - since_s
        await asyncio.sleep(0.1)
    return None


async def retries(gateway: Client) -> int:
    """Attempts that the gateway repeated on another engine, so far."""
    page = await gateway.page("/metrics")
    found = re.findall(r"^sluice_retries_total\{.*\} (\S+)", page, re.MULTILINE)
    return round(sum(map(float, found)))


def said(engine: str, answers: Sequence[Answer], repeated: int, back_s: float | None) -> str:
    """The act's figures."""
    back = "it is not back yet" if back_s is None else f"back in the rotation after {back_s:.1f} s"
    return (
        f"{engine.partition('://')[2]} killed: {counted(answers)}; {repeated} sent again to "
        f"another engine; {back}."
    )
