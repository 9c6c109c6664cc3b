"""Long prompts between running answers: on engines apart from them, and on the same engines."""

import asyncio
from collections.abc import Iterable, Sequence

from sluice.demo import prompts
from sluice.demo.client import Answer
from sluice.demo.config import MODEL, PHASES_MODEL
from sluice.demo.stage import Stage, counted, median_ms, ms, share

NAME = "phases"
CAPTION = "Long prompts flood; computed apart, they do not slow down answers."
_WRITERS, _READERS = 4, 6
_CALM_S, _FLOOD_S = 1.5, 4.0
_ANSWER_TOKENS = 100
_DOCUMENT_CHARS = 22_000


async def play(stage: Stage) -> str:
    """Answers alone, then beside long prompts, then the same on as many engines together."""
    calm, _ = await _measured(stage, PHASES_MODEL, _CALM_S, readers=0)
    apart, documents = await _measured(stage, PHASES_MODEL, _FLOOD_S, readers=_READERS)
    together, whole = await _measured(stage, MODEL, _FLOOD_S, readers=_READERS)
    return said(calm, apart, documents, together, whole)


async def _measured(
    stage: Stage, model: str, usual_s: float, *, readers: int
) -> tuple[list[Answer], list[Answer]]:
    """What was answered at length, and what was asked about documents meanwhile."""
    written: list[Answer] = []
    read: list[Answer] = []
    over = asyncio.Event()
    async with asyncio.TaskGroup() as running:
        for _ in range(readers):
            running.create_task(_reads(stage, model, read, over))
        for _ in range(_WRITERS):
            running.create_task(_writes(stage, model, written, over))
        await stage.wait(usual_s)
        over.set()
    return written, read


async def _writes(stage: Stage, model: str, ended: list[Answer], over: asyncio.Event) -> None:
    """A client of short questions with long answers."""
    while not over.is_set():
        text = prompts.question(stage.rng.choice(prompts.QUESTIONS))
        asked = stage.gateway.ask(
            "elastic", "answer", text, max_tokens=_ANSWER_TOKENS, whole_length=True, model=model
        )
        ended.append(await stage.ask(asked))


async def _reads(stage: Stage, model: str, ended: list[Answer], over: asyncio.Event) -> None:
    """A client that asks twice about each document, and wants few words."""
    while not over.is_set():
        told = prompts.document(stage.rng, _DOCUMENT_CHARS)
        for what in ("document", "again"):
            asked = stage.gateway.ask("spot", what, told, max_tokens=16, model=model)
            ended.append(await stage.ask(asked))
            told.append({"role": "assistant", "content": "It is about Python."})
            told.append({"role": "user", "content": "And what does it leave out?"})


def said(
    calm: Sequence[Answer],
    apart: Sequence[Answer],
    documents: Sequence[Answer],
    together: Sequence[Answer],
    whole: Sequence[Answer],
) -> str:
    """The act's figures; `documents` and `whole`: asked beside `apart` and `together`."""
    later = [answer for answer in documents if answer.what == "again"]
    cached, asked = sum(a.cached_tokens for a in later), sum(a.prompt_tokens for a in later)
    first = [[a for a in read if a.what == "document"] for read in (documents, whole)]
    return (
        f"Time per token of answers (p95): {_pace(calm)} alone, {_pace(apart)} while long prompts "
        f"are computed apart, {_pace(together)} on as many engines that do both. First token of "
        f"the long prompts: {ms(median_ms(first[0]))} and {ms(median_ms(first[1]))}; asked about "
        f"again, {share(cached, asked)} of them was cached. "
        f"{counted([*calm, *apart, *documents, *together, *whole])}."
    )


def _pace(answers: Iterable[Answer]) -> str:
    """The .95 quantile of times per token, in words."""
    found = sorted(answer.tpot_ms for answer in answers if answer.tpot_ms is not None)
    return f"{found[min(len(found) - 1, int(0.95 * len(found)))]:.1f} ms" if found else "none"
