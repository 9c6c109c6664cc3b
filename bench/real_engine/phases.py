"""Prefill and decode on engines of their own: handed-over KV gives the answers of one engine."""

import asyncio
import contextlib
import itertools
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pydoc_data.topics import topics
from threading import Event
from typing import Any, Final

import httpx
from openai import AsyncOpenAI, OpenAIError

from bench.common.fleet import read_metrics
from bench.common.report import Row, at_least, at_most, equals
from bench.real_engine.engines import BASE, RealEngine, completion, gateway

REQUESTS: Final = 200
TOGETHER: Final = 3
ANSWER: Final = 16
"""Tokens of each answer."""
LEAVERS: Final = 20
"""Requests whose clients leave, each a little later than the one before."""
_LOADED_S: Final = 3.0
"""Seconds of load before an engine is killed."""
_DEAD_S: Final = 10.0
"""How long a killed engine stays away before it starts again."""
_BACK_S: Final = 90.0
"""Seconds for an engine that serves again to be used again."""
_RELEASE_S: Final = 15.0
"""Seconds in which KV must be free: half of the time after which the engine frees it itself."""
_CUT: Final = "a stream that had begun was cut"
_PROSE: Final = "\n\n".join(topics.values()).encode("ascii", "ignore").decode()

Results = list[tuple[int, str, str]]
"""Of each request its number, its answer, and how it failed."""


def phases_scene(prefill: RealEngine, decode: RealEngine, alone: RealEngine) -> Iterator[Row]:
    """`alone` answers by itself first, and is a second decode engine while others are killed."""
    results = asyncio.run(_results(alone.url, range(REQUESTS)))
    yield _failed("failed requests of one engine alone", results)
    wanted = {number: text for number, text, _ in results}
    yield Row(f"different answers of {REQUESTS}", len(set(wanted.values())))
    with gateway(_config(prefill, [decode])) as url:
        yield from _handed_over(url, prefill, decode, wanted)
        yield from _several_prompts(url, alone)
        yield from _left(url, prefill, decode)
    with gateway(_config(prefill, [decode, alone])) as url:
        yield from _killed(url, "prefill", prefill, "prompt_tokens_total", wanted)
        yield from _killed(url, "decode", decode, "external_prefix_cache_hits_total", wanted)


def _config(prefill: RealEngine, decode: list[RealEngine]) -> dict[str, Any]:
    engines = {
        name: {"max_num_seqs": found[0].slots, "workers": [engine.url for engine in found]}
        for name, found in (("prefill", [prefill]), ("decode", decode))
    }
    pool = {"max_model_len": prefill.window, **engines, "transfer": {"kind": "vllm"}}
    return {"models": [{"name": BASE, "pools": {"all": pool}}], "health": {"interval_s": 0.5}}


def _handed_over(
    url: str, prefill: RealEngine, decode: RealEngine, wanted: dict[int, str]
) -> Iterator[Row]:
    results = asyncio.run(_results(url, range(REQUESTS)))
    yield _failed(f"failed of {REQUESTS} requests", results)
    yield equals("answers equal to one engine's", REQUESTS - _wrong(results, wanted), REQUESTS)
    counted = sum(
        value
        for series, value in read_metrics(url).items()
        if series.startswith("sluice_prefills_total{") and 'result="ok"' in series
    )
    yield equals("first phases that the gateway counts", counted, REQUESTS)
    prompt = decode.metric("prompt_tokens_total")
    hits = decode.metric("external_prefix_cache_hits_total")
    yield at_least("external prefix hits of prompt tokens", hits / prompt, 0.95, f"{prompt:,.0f}")
    yield equals("failed transfers", decode.metric("nixl_num_failed_transfers_total"), 0)
    moved_s = decode.metric("nixl_xfer_time_seconds_sum")
    yield Row("mean transfer, ms", 1000 * moved_s / decode.metric("nixl_xfer_time_seconds_count"))
    yield from _none_held("after these requests", prefill, decode)


def _several_prompts(url: str, alone: RealEngine) -> Iterator[Row]:
    """Several prompts have one KV in the protocol: they must not be handed over."""
    prompts = [_text(number) for number in (REQUESTS, REQUESTS + 1)]
    found = [
        [choice["text"] for choice in completion(there, BASE, "", prompt=prompts)["choices"]]
        for there in (alone.url, url)
    ]
    yield equals("two prompts in one request: the answers of one engine", found[0] == found[1], 1)


def _left(url: str, prefill: RealEngine, decode: RealEngine) -> Iterator[Row]:
    for number in range(LEAVERS):
        body = {"model": BASE, "prompt": _text(REQUESTS + 2 + number, 3000), "max_tokens": 200}
        with contextlib.suppress(httpx.TimeoutException):
            httpx.post(
                f"{url}/v1/completions", json=body, timeout=0.04 * (number + 1), trust_env=False
            )
    yield from _none_held(f"after {LEAVERS} clients that left", prefill, decode)


def _none_held(when: str, prefill: RealEngine, decode: RealEngine) -> Iterator[Row]:
    def held() -> float:
        return sum(engine.metric("kv_cache_usage_perc") for engine in (prefill, decode))

    end_s = time.monotonic() + _RELEASE_S
    while held() and time.monotonic() < end_s:
        time.sleep(0.2)
    yield equals(f"share of KV held {when}", held(), 0)
    expired = prefill.metric("nixl_num_kv_expired_reqs_total")
    yield equals(f"KV that expired {when}", expired, 0)


def _killed(
    url: str, phase: str, engine: RealEngine, used: str, wanted: dict[int, str]
) -> Iterator[Row]:
    """Kills an engine under load; `used` is a counter that shows that it works again."""
    over = Event()
    numbers = itertools.takewhile(lambda _: not over.is_set(), itertools.cycle(range(REQUESTS)))
    # The load in a thread: a child ends with the thread that started it, so that is this one.
    with ThreadPoolExecutor(1) as pool:
        load = pool.submit(asyncio.run, _results(url, numbers))
        try:
            count = _kill_and_start(engine, used)
        finally:
            over.set()
        results = load.result()
    cut = sum(failure == _CUT for *_, failure in results)
    name = f"{phase} engine killed and back"
    yield _failed(f"{name}: failed of {len(results)} requests", results, but=_CUT)
    yield at_most(f"{name}: streams cut that had begun", cut, TOGETHER)
    yield equals(f"{name}: answers unlike one engine's", _wrong(results, wanted), 0)
    yield at_least(f"{name}: tokens since it is back", count, 1)


def _kill_and_start(engine: RealEngine, used: str) -> float:
    time.sleep(_LOADED_S)
    engine.kill()
    time.sleep(_DEAD_S)
    engine.start()
    engine.wait()
    end_s = time.monotonic() + _BACK_S
    while not (count := engine.metric(used)) and time.monotonic() < end_s:
        time.sleep(0.5)
    return count


# -- clients


async def _results(url: str, numbers: Iterable[int]) -> Results:
    """(number, answer, failure) of each request, some at a time."""
    todo, results = iter(numbers), Results()
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)

    async def work() -> None:
        for number in todo:
            results.append((number, *await _one(client, number)))

    async with client:
        await asyncio.gather(*(work() for _ in range(TOGETHER)))
    return results


async def _one(client: AsyncOpenAI, number: int) -> tuple[str, str]:
    """A request's answer, and how it failed; "" where it did not."""
    parts = list[str]()
    try:
        async for part in _parts(client, number):
            parts.append(part)
    except (OpenAIError, httpx.HTTPError) as error:
        return "", _CUT if parts else f"{type(error).__name__} {str(error)[:120]}"
    return "".join(parts), ""


async def _parts(client: AsyncOpenAI, number: int) -> AsyncIterator[str]:
    """The parts of an answer in the likeliest tokens: chat and completions, streams too."""
    chat, stream = number % 4 < 2, number % 2 == 1
    text: Any = _text(number)
    asked = {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}
    create: Any = client.chat.completions.create if chat else client.completions.create
    answer = await create(model=BASE, max_tokens=ANSWER, temperature=0, stream=stream, **asked)
    finish = None
    async for chunk in answer if stream else _only(answer):
        for choice in chunk.choices:
            finish = choice.finish_reason or finish
            said = choice.text if not chat else (choice.delta if stream else choice.message).content
            if said:
                yield said
    if finish is None:
        raise OpenAIError("no finish reason")


async def _only(answer: Any) -> AsyncIterator[Any]:
    yield answer


def _text(number: int, length: int | None = None) -> str:
    start = 997 * number % (len(_PROSE) // 2)
    return _PROSE[start : start + (length or 100 + 53 * number % 2400)]


def _failed(metric: str, results: Results, but: str = "") -> Row:
    failures = Counter(failure for *_, failure in results if failure not in {"", but})
    told = ", ".join(f"{count}x {text}" for text, count in failures.most_common(3))
    return equals(metric, failures.total(), 0, told)


def _wrong(results: Results, wanted: dict[int, str]) -> int:
    return sum(text != wanted[number] for number, text, failure in results if not failure)
