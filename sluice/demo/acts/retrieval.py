"""Retrieval prompts a little too long for the short pool are compressed into it."""

import asyncio
from collections.abc import Mapping, Sequence

import httpx
import msgspec

from sluice.demo import prompts
from sluice.demo.client import Answer
from sluice.demo.stage import Stage, counted, median_ms, ms

NAME = "retrieval"
CAPTION = "Borderline prompts lose what their question does not need."
_PROMPTS = 8
_CHARS = 38_000
_TOKENS = 48


async def play(stage: Stage) -> str:
    """Each prompt compressed, then as it is; what was measured.

    In this order: a prompt that an engine has cached as it is would not be compressed.
    """
    asked = prompts.retrieval(stage.rng, max(2, round(_PROMPTS * stage.pace)), _CHARS)
    as_they_are, shortened = [], []
    for prompt in asked:
        cut = stage.gateway.ask("elastic", "retrieval", prompt.messages, max_tokens=_TOKENS)
        shortened.append(await stage.ask(cut))
        await stage.wait(0.3)
        whole = stage.gateway.ask(
            "elastic", "retrieval", prompt.messages, max_tokens=_TOKENS, compress=False
        )
        as_they_are.append(await stage.ask(whole))
        await stage.wait(0.3)
    kept = None
    if stage.engines is not None:
        received = await _received(stage.engines.short)
        kept = sum(
            prompt.answer in received.get(_question(prompt.messages), "") for prompt in asked
        )
    return said(as_they_are, shortened, kept)


async def _received(engines: Sequence[str]) -> Mapping[str, str]:
    """Question -> the prompt as an engine got it; the gateway's ids there are its own."""
    async with httpx.AsyncClient(trust_env=False) as http:
        pages = await asyncio.gather(
            *(http.get(f"{url}/mock/last", params={"n": 100}) for url in engines)
        )
    found = {}
    for page in pages:
        for request in page.raise_for_status().json():
            if request["path"] == "/v1/chat/completions":
                body = msgspec.json.decode(request["body"])
                found[_question(body["messages"])] = str(body["messages"][-1]["content"])
    return found


def _question(messages: Sequence[Mapping[str, object]]) -> str:
    return str(messages[-1]["content"]).rpartition("Question: ")[2]


def said(as_they_are: Sequence[Answer], shortened: Sequence[Answer], kept: int | None) -> str:
    """The act's figures; `kept`: prompts whose answering sentence reached the engine."""
    cut = [a for a in shortened if a.compressed != "none" and a.pool == "short"]
    sizes = [tuple(map(int, a.compressed.split("->"))) for a in cut]
    text = f"{len(cut)} of {len(shortened)} fitted into the short pool"
    if sizes:
        before, after = (sum(column) / len(sizes) for column in zip(*sizes, strict=True))
        text += f", {before:,.0f} -> {after:,.0f} tokens on average"
    if kept is not None:
        text += f"; the sentence with the answer was kept in {kept}"
    return (
        f"{text}. First token: {ms(median_ms(cut))}; as they were, in the long pool: "
        f"{ms(median_ms(as_they_are))}. {counted([*as_they_are, *shortened])}."
    )
