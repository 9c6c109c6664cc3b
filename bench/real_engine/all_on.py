"""Every system on before two real engines: short and long pool, tenants, compression, QUARTZ."""

import asyncio
import random
from collections import Counter
from collections.abc import Iterator
from hashlib import sha256
from pydoc_data.topics import topics
from typing import Any, Final

import httpx
from openai import AsyncOpenAI, OpenAIError

from bench.common.fleet import read_metrics
from bench.common.report import Row, equals
from bench.real_engine.engines import ADAPTER, BASE, NAMES, RealEngine
from bench.real_engine.suite import API_KEY

REQUESTS: Final = 1000
TOGETHER: Final = 6
"""Requests in flight: fewer than the smallest pool has slots, so none has to be refused."""
KEYS: Final = {"chat": API_KEY, "batch": "sk-batch"}
_PROSE: Final = "\n\n".join(topics.values()).encode("ascii", "ignore").decode()
_KV_BYTES: Final = 2 * 4 * 4 * 32 * 2
"""Per token: keys and values of four layers with four heads of 32 values of two bytes."""


def config(short: RealEngine, long: RealEngine) -> dict[str, Any]:
    """The gateway's file, with everything on."""
    rates = {"tokens_per_second": 100_000, "kv_cache_gib": 1}
    return {
        "models": [
            {
                "name": BASE,
                "aliases": list(NAMES[1:]),
                "loras": [ADAPTER],
                "kv_bytes_per_token": _KV_BYTES,
                "boundary": {"b_short": short.window - 200, "gamma": 1.5, "auto": True},
                "compression": {"enabled": True, "only_when_busy": False},
                "scheduling": {"policy": "quartz"},
                "admission": {"mode": "enforce"},
                "pools": {
                    name: {
                        "max_model_len": engine.window,
                        "max_num_seqs": engine.slots,
                        "workers": [engine.url],
                        **rates,
                    }
                    for name, engine in (("short", short), ("long", long))
                },
            }
        ],
        "entitlements": [
            {
                "name": name,
                "tenant": name,
                "model": BASE,
                "service_class": service_class,
                "tokens_per_second": 20_000,
                "api_keys": [f"sha256:{sha256(KEYS[name].encode()).hexdigest()}"],
            }
            for name, service_class in (("chat", "elastic"), ("batch", "spot"))
        ],
    }


def scene(url: str) -> Iterator[Row]:
    """A thousand mixed requests through the official client."""
    failures = asyncio.run(_send(url))
    told = ", ".join(f"{count}x {text}" for text, count in failures.most_common(3))
    yield equals(f"failed requests of {REQUESTS:,}, all on", failures.total(), 0, told)
    metrics = read_metrics(url)
    for series, value in metrics.items():
        if series.startswith("sluice_predictor_coverage"):
            yield Row(series, value, "aim: .90 to .98")
    compressed = sum(
        value
        for series, value in metrics.items()
        if series.startswith("sluice_compression_total") and 'result="compressed"' in series
    )
    yield Row("compressed prompts", compressed)


async def _send(url: str) -> Counter[str]:
    drawn, failures = random.Random(2), Counter[str]()
    clients = {
        name: AsyncOpenAI(
            base_url=f"{url}/v1",
            api_key=key,
            max_retries=0,
            timeout=120,
        )
        for name, key in KEYS.items()
    }
    todo = iter([(number, drawn.random(), drawn.random()) for number in range(REQUESTS)])

    async def work() -> None:
        for number, kind, size in todo:
            client = clients["batch" if kind < 0.2 else "chat"]
            model = ADAPTER if 0.2 <= kind < 0.3 else BASE
            try:
                failure = await _one(client, model, number, size, stream=kind < 0.6)
            except (OpenAIError, httpx.HTTPError) as error:
                failure = f"{type(error).__name__} {str(error)[:120]}"
            if failure:
                failures[failure] += 1

    await asyncio.gather(*(work() for _ in range(TOGETHER)))
    for client in clients.values():
        await client.close()
    return failures


async def _one(client: AsyncOpenAI, model: str, number: int, size: float, *, stream: bool) -> str:
    """What is wrong with an answer; "" if nothing is."""
    start, length = 997 * number % (len(_PROSE) // 2), int(30 + 3400 * size**3)
    text = f"{_PROSE[start : start + length]}\n\nQuestion {number}: which names occur above?"
    messages: Any = [{"role": "user", "content": text}]
    if not stream:
        whole = await client.chat.completions.create(
            model=model, messages=messages, max_completion_tokens=16
        )
        usage = whole.usage
        return "" if usage is not None and usage.completion_tokens == 16 else "cut short"
    finish = None
    async for chunk in await client.chat.completions.create(
        model=model, messages=messages, max_completion_tokens=16, stream=True
    ):
        if chunk.choices:
            finish = chunk.choices[0].finish_reason or finish
    return "" if finish else "a stream without a finish reason"
