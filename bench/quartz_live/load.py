"""Load of `bench quartz-live`: workloads with shared prefixes, routers, a client.

Lengths are approximate tokens of the mock engine's tokenizer. Texts are generated from numbers,
so that two requests share exactly the intended beginning.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from random import Random
from typing import Any, Final

import msgspec
import orjson

from bench.common.fleet import MODEL
from bench.common.redis_server import redis_program
from bench.overhead.peers import PEERS
from sluice.children import free_ports

SEVERAL: Final = "quartz x 2"
"""Two gateways on one Redis; a client's requests go to each by turns."""
SYSTEMS: Final = (
    "quartz",
    SEVERAL,
    "least-loaded",
    "sglang-router",
    "vllm-router",
)
PEER_SYSTEMS: Final = frozenset({"sglang-router", "vllm-router"})
_WORDS: Final = (
    "river", "road", "night", "lower", "bridge", "water", "morning", "letter", "harbour",
    "engine", "stone", "garden", "winter", "market", "paper", "signal", "window", "mountain",
    "captain", "question", "answer", "history", "council", "record", "number", "valley",
)  # fmt: skip
_WORD_TOKENS: Final = 1.27
"""Of the mock's tokenizer, a word of this list and its space."""


class TimedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request: when it is due (seconds of the run), what it says, what it may take."""

    at_s: float
    client: str
    body: bytes
    slo_s: float


class TimedAnswer(msgspec.Struct, kw_only=True):
    """How it went. `first_s` is the time to the first byte of the answer; None without one."""

    ask: TimedRequest
    status: int = 0
    first_s: float | None = None
    whole: bool = False


@cache
def text(name: str, tokens: int) -> str:
    """About so many tokens, always the same for a name."""
    draw = Random(name)
    return " ".join(draw.choices(_WORDS, k=max(1, round(tokens / _WORD_TOKENS))))


def _body(messages: Sequence[tuple[str, str]], output_tokens: int) -> bytes:
    return orjson.dumps(
        {
            "model": MODEL,
            "messages": [{"role": role, "content": said} for role, said in messages],
            "max_tokens": output_tokens,
            "mock_output_tokens": output_tokens,
            "stream": True,
        }
    )


def mixed(number: int, rate_per_s: float, count: int, speed: float) -> list[TimedRequest]:
    """Chat in turns (55 %) and retrieval over shared documents (45 %), of 28 clients; Poisson.

    The objectives are 2 s and 4 s of model time (QUARTZ, section 5.2).
    """
    draw = Random(f"mixed/{number}")
    turns: dict[int, list[tuple[str, str]]] = {}
    out = []
    at_s = 0.0
    for serial in range(count):
        at_s += draw.expovariate(rate_per_s)
        client = draw.randrange(28)
        if draw.random() < 0.55:
            told = turns.get(client)
            if told is None or len(told) > 16:
                told = [("system", text("chat system", 300))]
            asked = text(f"chat {number} {serial}", draw.randrange(40, 300))
            told = [*told, ("user", asked)]
            output = draw.randrange(30, 150)
            turns[client] = [*told, ("assistant", text(f"answer {number} {serial}", output))]
            body, slo_s = _body(told, output), 2.0
        else:
            documents = [draw.randrange(40) for _ in range(4)]
            passages = "\n\n".join(text(f"document {d}", 500 + 60 * d) for d in documents)
            question = text(f"question {number} {serial}", 40)
            told = [
                ("system", text("rag system", 200)),
                ("user", f"Context:\n{passages}\n\nQuestion: {question}"),
            ]
            body, slo_s = _body(told, draw.randrange(20, 90)), 4.0
        out.append(TimedRequest(at_s=at_s, client=f"c{client}", body=body, slo_s=slo_s / speed))
    return out


def agents(number: int, count: int, turns: int, speed: float) -> list[list[TimedRequest]]:
    """Agents whose every prompt has 30,000 tokens, 80 % of them the same in each of its turns."""
    out = []
    for agent in range(count):
        kept = text(f"agent {number} {agent}", 24_000)
        out.append(
            [
                TimedRequest(
                    at_s=0.0,
                    client=f"a{agent}",
                    body=_body(
                        [
                            ("system", kept),
                            ("user", text(f"seen {number} {agent} {turn}", 6_000)),
                        ],
                        40,
                    ),
                    slo_s=4.0 / speed,
                )
                for turn in range(turns)
            ]
        )
    return out


def router(name: str, engines: Sequence[str]) -> tuple[list[str], str]:
    """How to start a peer's router before these engines, and its URL."""
    port, metrics = free_ports(2)
    common = [
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--worker-urls", *engines, "--policy", "cache_aware"),
        *("--prometheus-port", str(metrics)),
    ]
    if name == "sglang-router":
        python = str(PEERS / name / "bin" / "python")
        command = [python, "-m", "sglang_router.launch_router", *common, "--log-level", "warn"]
    else:
        command = [str(PEERS / name / "bin" / name), *common, "--log-level", "warning"]
    return command, f"http://127.0.0.1:{port}"


def installed(name: str) -> bool:
    """Whether a system can be started here."""
    if name == SEVERAL:
        return redis_program() is not None
    return name not in PEER_SYSTEMS or (PEERS / name / "bin").is_dir()


class TimedLoad:
    """Sends requests over connections of their own and notes when their answers begin."""

    def __init__(self, urls: Sequence[str]) -> None:
        """Each client's requests go to the `urls` by turns."""
        self._addresses = [url.removeprefix("http://").partition(":")[::2] for url in urls]
        self._turns: Counter[str] = Counter()
        self.seen: list[TimedAnswer] = []
        self.late_s = 0.0
        """The latest that a request was sent after it was due."""

    async def open_loop(self, asks: Sequence[TimedRequest]) -> None:
        """Each when it is due, whatever became of earlier ones."""
        begin_s = time.monotonic()

        async def one(ask: TimedRequest) -> None:
            await asyncio.sleep(begin_s + ask.at_s - time.monotonic())
            self.late_s = max(self.late_s, time.monotonic() - begin_s - ask.at_s)
            await self._send(ask)

        await asyncio.gather(*(one(ask) for ask in asks))

    async def closed_loops(self, loops: Sequence[Sequence[TimedRequest]], pause_s: float) -> None:
        """Each loop's requests one after the other, a pause in between."""

        async def one(place: int, asks: Sequence[TimedRequest]) -> None:
            await asyncio.sleep(pause_s * place / max(1, len(loops)))
            for ask in asks:
                await self._send(ask)
                await asyncio.sleep(pause_s)

        await asyncio.gather(*(one(place, asks) for place, asks in enumerate(loops)))

    async def _send(self, ask: TimedRequest) -> None:
        seen = TimedAnswer(ask=ask)
        self.seen.append(seen)
        host, port = self._addresses[self._turns[ask.client] % len(self._addresses)]
        self._turns[ask.client] += 1
        begin_s = time.monotonic()
        try:
            async with asyncio.timeout(120):
                reader, writer = await asyncio.open_connection(host, int(port))
                try:
                    writer.write(_head(ask, f"{host}:{port}") + ask.body)
                    head = await reader.readuntil(b"\r\n\r\n")
                    seen.status = int(head[9:12])
                    tail = b""
                    while data := await reader.read(65536):
                        if seen.first_s is None and b"data:" in data:
                            seen.first_s = time.monotonic() - begin_s
                        tail = (tail + data)[-64:]
                    seen.whole = b"[DONE]" in tail
                finally:
                    writer.close()
        except (OSError, EOFError, TimeoutError):
            seen.whole = False


def _head(ask: TimedRequest, host: str) -> bytes:
    return (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: {host}\r\n"
        f"content-type: application/json\r\nauthorization: Bearer sk-{ask.client}\r\n"
        f"connection: close\r\ncontent-length: {len(ask.body)}\r\n\r\n"
    ).encode()


def write_profile(folder: Path, profile: Any) -> Path:
    """An engine profile as `sluice mock --profile-file` reads it."""
    file = folder / "engine.json"
    file.write_bytes(msgspec.json.encode(profile))
    return file
