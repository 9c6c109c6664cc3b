"""Data-parallel ranks are levelled, so that none waits long for the fullest at the barrier.

The same requests then go to the same ranks in turn, through a plain relay.
"""

import asyncio
import contextlib
import math
import random
import re
import time
from collections import Counter
from collections.abc import Sequence

import httpx
import msgspec

from sluice.demo import prompts
from sluice.demo.client import Answer, Client
from sluice.demo.config import LONG_MODEL, MODEL
from sluice.demo.stage import Stage, counted

NAME = "ranks"
CAPTION = "Unequal documents fill four ranks that step together."
_REQUESTS = 96
_CLIENTS = 40
_CHARS = (48_000, 200_000)
"""Log-uniform."""
_TOKENS = (30, 150)
_SAMPLE_S = 0.05
_KV = re.compile(r'^vllm:kv_cache_usage_perc\{engine="(\d+)".*\} (\S+)', re.MULTILINE)
_RUNNING = re.compile(r'^vllm:num_requests_running\{engine="(\d+)".*\} (\S+)', re.MULTILINE)


class Levels(msgspec.Struct, frozen=True, kw_only=True):
    """One run before the ranks."""

    answers: Sequence[Answer]
    fullest: float | None
    """KV of the fullest rank over the mean of all, averaged while all were busy."""
    tokens_per_s: float


async def play(stage: Stage) -> str:
    """The requests through the gateway, then in turn; what was measured."""
    count = max(16, round(_REQUESTS * stage.pace))
    work = [(_length(stage.rng), stage.rng.randint(*_TOKENS)) for _ in range(count)]
    levelled = await _run(stage, stage.gateway, MODEL, work)
    if stage.unmanaged is None:
        return said(levelled, None)
    return said(levelled, await _run(stage, stage.unmanaged, LONG_MODEL, work))


def _length(rng: random.Random) -> int:
    return round(math.exp(rng.uniform(*map(math.log, _CHARS))))


async def _run(stage: Stage, client: Client, model: str, work: Sequence[tuple[int, int]]) -> Levels:
    rest, answers = iter(work), list[Answer]()
    samples: list[float] = []
    watch = asyncio.create_task(_watch(stage, samples))
    begin_s = time.monotonic()

    async def one_client(who: str) -> None:
        for chars, tokens in rest:
            text = prompts.document(stage.rng, chars)
            while True:
                asked = client.ask(
                    who,
                    "document",
                    text,
                    max_tokens=tokens,
                    model=model,
                    stream=False,
                    compress=False,
                    whole_length=True,
                )
                answers.append(answer := await stage.ask(asked))
                if not answer.refused:
                    break
                await asyncio.sleep(min(1.0, answer.retry_after_s))

    try:
        async with asyncio.TaskGroup() as clients:
            for _ in range(_CLIENTS):
                clients.create_task(one_client("batch"))
    finally:
        watch.cancel()
    made = sum(answer.completion_tokens for answer in answers)
    return Levels(
        answers=answers,
        fullest=sum(samples) / len(samples) if samples else None,
        tokens_per_s=made / (time.monotonic() - begin_s),
    )


async def _watch(stage: Stage, samples: list[float]) -> None:
    """Sample the ranks' KV as their engine tells it."""
    if stage.engines is None:
        return
    async with httpx.AsyncClient(trust_env=False) as http:
        while True:
            with contextlib.suppress(httpx.HTTPError):
                page = (await http.get(f"{stage.engines.long}/metrics")).text
                if (found := imbalance(page)) is not None:
                    samples.append(found)
            await asyncio.sleep(_SAMPLE_S)


def imbalance(page: str) -> float | None:
    """KV of the fullest rank over the mean; None while a rank has nothing to do."""
    running = [float(value) for _, value in _RUNNING.findall(page)]
    used = [float(value) for _, value in _KV.findall(page)]
    if not used or min(running) < 1 or min(used) <= 0:
        return None
    return max(used) * len(used) / sum(used)


def said(levelled: Levels, in_turn: Levels | None) -> str:
    """The act's figures."""
    by_rank = Counter(a.worker.rpartition("#")[2] for a in levelled.answers if a.served)
    spread = "/".join(str(by_rank[rank]) for rank in sorted(by_rank))
    text = (
        f"{counted(levelled.answers)}, {spread} by rank; {levelled.tokens_per_s:,.0f} answer "
        "tokens/s"
    )
    if levelled.fullest is not None:
        text += f"; the fullest rank held {levelled.fullest:.2f} x the mean"
    if in_turn is None:
        return f"{text}."
    text += f". Ranks in turn: {in_turn.tokens_per_s:,.0f} tokens/s"
    return text + (f", {in_turn.fullest:.2f} x." if in_turn.fullest is not None else ".")
