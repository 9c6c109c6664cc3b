"""Is a limit as exact with two processes as with one, beside other load?

A model of its own, an entitlement that may run LIMIT requests at once, three times as many clients,
and an engine in this process, which knows how many run at any moment.
"""

import asyncio
import hashlib
from collections import Counter
from pathlib import Path
from typing import Final

import msgspec
import yaml

from bench.raw_client import RawClient

LIMITED: Final = "limited-model"
LIMITED_KEY: Final = "sk-limited"
LIMIT: Final = 8
CLIENTS: Final = 24
SERVICE_S: Final = 0.05
"""How long the engine takes for a request."""
PAUSE_S: Final = 0.01
"""Before a refused client asks again."""
_ANSWER: Final = (
    b'{"id":"c","object":"chat.completion","created":1,"model":"limited-model","choices":[{"index":'
    b'0,"message":{"role":"assistant","content":"Yes."},"finish_reason":"stop"}],"usage":'
    b'{"prompt_tokens":20,"completion_tokens":2,"total_tokens":22}}'
)


class Held(msgspec.Struct, frozen=True, kw_only=True):
    """What clients and the engine saw of the limit."""

    statuses: dict[int, int]
    most_at_engine: int
    reasons: dict[str, int]
    """Of refusals, as answered."""


def with_limited_model(file: Path, engine_url: str) -> Path:
    """Add the model and its entitlement to a configuration."""
    config = yaml.safe_load(file.read_text(encoding="utf-8"))
    pool = {"max_model_len": 8192, "max_num_seqs": 64, "workers": [engine_url]}
    config["models"].append({"name": LIMITED, "pools": {"only": pool}})
    config["entitlements"].append(
        {
            "name": "limited",
            "tenant": "limited",
            "model": LIMITED,
            "max_concurrency": LIMIT,
            "api_keys": ["sha256:" + hashlib.sha256(LIMITED_KEY.encode()).hexdigest()],
        }
    )
    file.write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
    return file


class CountingEngine:
    """Answers every POST after SERVICE_S, every GET at once, and counts who is being served."""

    def __init__(self) -> None:
        self.most = 0
        self._running = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection."""
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                if head.startswith(b"post"):
                    length = head.partition(b"content-length:")[2].partition(b"\r\n")[0]
                    await reader.readexactly(int(length))
                    await self._served()
                kind = b"application/json\r\ncontent-length: %d" % len(_ANSWER)
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\n\r\n%b" % (kind, _ANSWER))
        except (EOFError, ConnectionError, asyncio.CancelledError):
            pass  # the client, or the bench, has ended
        finally:
            writer.close()

    async def _served(self) -> None:
        self._running += 1
        self.most = max(self.most, self._running)
        try:
            await asyncio.sleep(SERVICE_S)
        finally:
            # Before the answer leaves: whoever is told of it may have the place.
            self._running -= 1


async def press(url: str, engine: CountingEngine, seconds: float) -> Held:
    """Ask for more than the limit for so long."""
    engine.most = 0
    statuses: Counter[int] = Counter()
    reasons: Counter[str] = Counter()
    end_s = asyncio.get_running_loop().time() + seconds
    await asyncio.gather(*(_client(url, end_s, statuses, reasons) for _ in range(CLIENTS)))
    return Held(statuses=dict(statuses), most_at_engine=engine.most, reasons=dict(reasons))


async def _client(url: str, end_s: float, statuses: Counter[int], reasons: Counter[str]) -> None:
    body = msgspec.json.encode(
        {
            "model": LIMITED,
            "max_tokens": 8,
            "messages": [{"role": "user", "content": "May one more come in?"}],
        }
    )
    async with RawClient(url, LIMITED_KEY) as client:
        while asyncio.get_running_loop().time() < end_s:
            answer = await client.post("/v1/chat/completions", body)
            statuses[answer.status] += 1
            if answer.status != 200:
                reasons[answer.headers.get("x-sluice-reason", "")] += 1
                await asyncio.sleep(PAUSE_S)
