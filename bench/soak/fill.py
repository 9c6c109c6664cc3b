"""Fill the gateway's bounded structures before the soak measures memory.

Bounded structures grow until they are full. At the soak's own rate that takes minutes for the
prefix index of the bulk's model, and longer than the soak for structures that only visitors fill.
So every bound is reached first, by prompts that differ from their beginning on:

- the bulk's model: 350,000 prefixes in 25,000 prompts of 17 points, and more conversations
  (20,000) and decisions (10,000) than are remembered;
- the visitors' model: as many conversations, half of them responses whose affinity is remembered
  (10,000); and long prompts for the index of its long pool. Its indexes have the smallest size
  (`bench.soak.gateway.PREFIXES`), since the mock engines cannot serve enough to fill larger ones.

Later growth is a leak, or a fragmented heap.
"""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec

from bench.common.everything_on import MODEL
from bench.common.tools import MARK, Figures, HttpLoad
from bench.soak.gateway import MOCKED, SoakGateway, key_of
from bench.soak.visits import CHAT, RESPONSES, Visit, Visitors

BULK_REQUESTS: Final = 25_000
BULK_TEXT_BYTES: Final = 24_000
"""For the short pool, as all of the bulk is."""
BULK_S: Final = 3.0
"""Of each part: a load generator numbers its prompts from 0, so each part has other texts."""
MAX_PARTS: Final = 100
CONVERSATIONS: Final = 22_000
TEXT_BYTES: Final = 300
"""Enough for a prefix, and so for a conversation."""
LONG_PROMPTS: Final = 400
LONG_TEXT_BYTES: Final = 80_000
"""For the long pool, and far beyond what is compressed."""
BATCH: Final = 64
_SENTENCE: Final = "Of what was said here before, nothing need be remembered for long. "
_encode: Final = msgspec.json.Encoder().encode


async def fill(gateway: SoakGateway, tool: Path, folder: Path, visitors: Visitors) -> list[Figures]:
    """Reach every bound; what the bulk's load generator found."""
    found: list[Figures] = []
    while sum(part["requests"] for part in found) < BULK_REQUESTS and len(found) < MAX_PARTS:
        load = HttpLoad(tool, gateway.port, bulk_body(folder, len(found)))
        found.append(await asyncio.to_thread(load.run, BATCH, BULK_S))
    due = visits()
    await asyncio.gather(*(_make(visitors, due) for _ in range(BATCH)))
    return found


def bulk_body(folder: Path, part: int) -> Path:
    """A body whose prompts have nothing in common, neither among them nor with other parts'."""
    text = f"{part} {MARK} {_text(BULK_TEXT_BYTES)}"
    file = folder / "fill.json"
    messages = [{"role": "user", "content": text}]
    file.write_text(json.dumps({"model": MODEL, "messages": messages, "max_tokens": 1}))
    return file


def visits() -> Iterator[Visit]:
    """One after the other, each with another beginning."""
    for number in range(CONVERSATIONS):
        yield _visit(number, TEXT_BYTES, RESPONSES if number % 2 else CHAT)
    for number in range(LONG_PROMPTS):
        yield _visit(CONVERSATIONS + number, LONG_TEXT_BYTES, CHAT)


def _visit(number: int, text_bytes: int, path: str) -> Visit:
    listed = [{"role": "user", "content": f"{number:08d} {_text(text_bytes)}"}]
    body: dict[str, Any] = {"model": MOCKED, "mock_output_tokens": 1}
    if path == RESPONSES:
        body |= {"input": listed, "max_output_tokens": 1}
    else:
        body |= {"messages": listed, "max_tokens": 1}
    return Visit(kind="filler", path=path, body=_encode(body), key=key_of("visitor"))


def _text(size: int) -> str:
    return (_SENTENCE * (size // len(_SENTENCE) + 1))[:size]


async def _make(visitors: Visitors, due: Iterator[Visit]) -> None:
    for visit in due:
        await visitors.make(visit)
