"""Calm: each request goes where it fits, and a conversation stays where its prefix is cached."""

import asyncio
from collections.abc import Sequence

from sluice.demo import prompts
from sluice.demo.client import Answer
from sluice.demo.stage import Stage, counted, median_ms, ms, share

NAME = "calm"
CAPTION = "Light traffic: questions go short, documents go long."
_REQUESTS = 40
_EVERY_S = 0.4
_TURNS = 6
_DOCUMENT_CHARS = 60_000
_SYSTEM_CHARS = 12_000


async def play(stage: Stage) -> str:
    """Send the traffic; what was measured."""
    talk = asyncio.create_task(_conversation(stage))
    async with asyncio.TaskGroup() as running:
        asked = []
        for number in range(max(6, round(_REQUESTS * stage.pace))):
            asked.append(running.create_task(_one(stage, number)))
            await asyncio.sleep(_EVERY_S)
    return said([task.result() for task in asked], await talk)


async def _one(stage: Stage, number: int) -> Answer:
    who = ("guaranteed", "elastic", "spot")[number % 3]
    if number % 7 == 3:
        text = prompts.document(stage.rng, _DOCUMENT_CHARS)
        return await stage.ask(stage.gateway.ask(who, "document", text, max_tokens=64))
    text = prompts.question(stage.rng.choice(prompts.QUESTIONS))
    tokens = stage.rng.choice((16, 64, 128))
    return await stage.ask(stage.gateway.ask(who, "question", text, max_tokens=tokens))


async def _conversation(stage: Stage) -> list[Answer]:
    told = [prompts.system(stage.rng, _SYSTEM_CHARS)]
    answers = []
    for turn in range(_TURNS):
        told.append({"role": "user", "content": f"Step {turn}: {prompts.QUESTIONS[turn % 3]}"})
        asked = stage.gateway.ask("guaranteed", f"turn {turn + 1}", told, max_tokens=48)
        answers.append(await stage.ask(asked))
        told.append({"role": "assistant", "content": "Done; the next step follows from it."})
        await stage.wait(0.5)
    return answers


def said(answers: Sequence[Answer], talk: Sequence[Answer]) -> str:
    """The act's figures."""
    long = [a for a in answers if a.pool == "long"]
    short = [a for a in answers if a.pool == "short"]
    later = talk[1:]
    cached, asked = sum(a.cached_tokens for a in later), sum(a.prompt_tokens for a in later)
    return (
        f"{counted([*answers, *talk])}. First token: {ms(median_ms(short))} in the short pool, "
        f"{ms(median_ms(long))} for documents in the long one. A conversation found "
        f"{share(cached, asked)} of its prompts cached, on {len({a.worker for a in talk})} worker"
        f"{'s' if len({a.worker for a in talk}) > 1 else ''}."
    )
