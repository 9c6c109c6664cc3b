"""`python -m bench real-engine`: Sluice before vLLM itself (docs/develop/benches/real-engine.md).

Two engines on the CPU with a tiny model of random weights. Their answers are nonsense; how
they schedule, answer, refuse and report is the real thing. Skipped, with the reason, where the
wheel cannot be had.
"""

import asyncio
import contextlib
import json
import os
import random
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, Final

import httpx
from openai import AsyncOpenAI, OpenAIError

from bench.common.fleet import read_metrics
from bench.common.report import Row, at_least, at_most, equals
from bench.real_engine.engines import (
    ADAPTER,
    API_KEY,
    BASE,
    NAMES,
    VERSION,
    Phase,
    RealEngine,
    Unavailable,
    add_transfer,
    completion,
    default_folder,
    engine_python,
    gateway,
    sluice,
    suite_of_openai,
    suite_scene,
    written,
)
from bench.real_engine.phases import phases_scene
from sluice.children import Children

# -- every system on before two real engines: short and long pool, tenants, compression, QUARTZ


MIXED_REQUESTS: Final = 1000
TOGETHER: Final = 6
"""Requests in flight: fewer than the smallest pool has slots, so none has to be refused."""
KEYS: Final = {"chat": API_KEY, "batch": "sk-batch"}
_PROSE: Final = "\n\n".join(topics.values()).encode("ascii", "ignore").decode()
_KV_BYTES: Final = 2 * 4 * 4 * 32 * 2
"""Per token: keys and values of four layers with four heads of 32 values of two bytes."""


def everything_on(short: RealEngine, long: RealEngine) -> dict[str, Any]:
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


def all_on_scene(url: str) -> Iterator[Row]:
    """A thousand mixed requests through the official client."""
    failures = asyncio.run(_send(url))
    told = ", ".join(f"{count}x {text}" for text, count in failures.most_common(3))
    yield equals(f"failed requests of {MIXED_REQUESTS:,}, all on", failures.total(), 0, told)
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
    todo = iter([(number, drawn.random(), drawn.random()) for number in range(MIXED_REQUESTS)])

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


# -- a LoRA adapter on one real engine: base and adapter requests go right


TEXTS = tuple(f"question {number}: what is {number} times seven?" for number in range(8))


def adapters_scene(having: RealEngine, lacking: RealEngine) -> Iterator[Row]:
    """Asks both names, directly and through a gateway before both engines."""
    wanted = {
        (name, text): _text(having.ask(name, text)) for name in (BASE, ADAPTER) for text in TEXTS
    }
    differ = sum(wanted[BASE, text] != wanted[ADAPTER, text] for text in TEXTS)
    yield equals("prompts that base and adapter answer differently", differ, len(TEXTS))
    pool = {"max_model_len": having.window, "max_num_seqs": having.slots}
    workers = [having.url, lacking.url]
    model = {"name": BASE, "discover_loras": True, "pools": {"all": {**pool, "workers": workers}}}
    with gateway({"models": [model], "health": {"interval_s": 0.5}}) as url:
        cards = httpx.get(f"{url}/v1/models", trust_env=False).json()["data"]
        parents = {card["id"]: card.get("parent") for card in cards}
        yield equals("the adapter is listed with its base", parents.get(ADAPTER) == BASE, True)
        for name in (BASE, ADAPTER):
            found = [completion(url, name, text) for text in TEXTS]
            right = sum(_text(a) == wanted[name, t] for a, t in zip(found, TEXTS, strict=True))
            yield equals(f"right answers through the gateway, {name}", right, len(TEXTS))
            told = sum(answer.get("model") == name for answer in found)
            yield equals(f"answers under their own name, {name}", told, len(TEXTS))
            if name == ADAPTER:
                there = sum(answer["worker"] == having.id for answer in found)
                yield equals("adapter requests at the engine that has it", there, len(TEXTS))
        body = {"lora_name": ADAPTER}
        httpx.post(f"{having.url}/v1/unload_lora_adapter", json=body, trust_env=False)
        first = completion(url, ADAPTER, TEXTS[0])["status"]
        later = completion(url, ADAPTER, TEXTS[0])["status"]
        yield equals("unloaded: 503 while it is noticed, then 404", first * 1000 + later, 503_404)


def _text(answer: dict[str, object]) -> object:
    choices = answer.get("choices")
    return choices[0]["text"] if isinstance(choices, list) else answer.get("error")


# -- `sluice check --live` against a real engine: what people get wrong, each with its fix


MISTAKES: Final = {
    "wrong name": ("it serves 'tiny'", "set the worker's `model`"),
    "wrong window": ("max_model_len", "set it to the engine's"),
    "`/v1` at the end of the URL": ("is read as", "remove /v1"),
    "`/v1/...` in the URL": ("404", "without /v1"),
    "no key": ("it wants a key", "set the worker's `api_key`"),
    "wrong key": ("refuses the key", "set the worker's `api_key`"),
}
"""What is wrong -> words of the finding and of its fix."""


def mistakes_scene(folder: Path, engine: RealEngine, key: str) -> Iterator[Row]:
    """Checks one good file and one file for each mistake."""
    yield _row("a good file", folder, _file(engine, key), None)
    files = {
        "wrong name": _file(engine, key, name="tinny"),
        "wrong window": _file(engine, key, window=engine.window * 2),
        "`/v1` at the end of the URL": _file(engine, key, "/v1"),
        "`/v1/...` in the URL": _file(engine, key, "/v1/chat/completions"),
        "no key": _file(engine, None),
        "wrong key": _file(engine, "sk-other"),
    }
    for mistake, config in files.items():
        yield _row(mistake, folder, config, MISTAKES[mistake])


def _row(metric: str, folder: Path, config: dict[str, Any], words: tuple[str, str] | None) -> Row:
    code, found = sluice("check", "-c", written(folder, config), "--live")
    said = [f"{each['problem']}: {each['fix']}" for each in found["workers"] if each["problem"]]
    said += found["remarks"]
    holds = not said if words is None else any(all(w in text for w in words) for text in said)
    return Row(
        f"check --live: {metric}",
        "; ".join(said) or "nothing",
        target="nothing" if words is None else " ... ".join(words),
        holds=holds,
        note=f"exit {code}",
    )


def _file(
    engine: RealEngine,
    key: str | None,
    path: str = "",
    *,
    name: str = BASE,
    window: int | None = None,
) -> dict[str, Any]:
    worker = {"url": engine.url + path, **({"api_key": key} if key else {})}
    pool = {
        "max_model_len": window or engine.window,
        "max_num_seqs": engine.slots,
        "workers": [worker],
    }
    return {"models": [{"name": name, "pools": {"all": pool}}]}


# -- one real engine: calibrated, planned from its profile, and replayed at half of its capacity


CALIBRATE_S: Final = 120.0
REQUESTS: Final = 1500
"""To replay: in virtual time the 99th percentile of 300 varies by a third either way."""
MIN_S, MAX_S = 60.0, 900.0
"""Shortest and longest replay, seconds."""
SHARE: Final = 0.5
"""Of the capacity that the plan gives the engine."""
TRACE: Final = 400
FIELDS: Final = "prompt=prompt_tokens,answer=completion_tokens"
MIN_ENGINES: Final = 2
"""Engines that every plan has at least: it is made for so many, and one of them is replayed."""
_MAX_RATE, _STEPS = 64.0, 10


def planned_scene(folder: Path, engine: RealEngine) -> Iterator[Row]:
    """Calibrates, plans and replays; nobody else may use the engine."""
    profile, trace = folder / "profile.json", folder / "trace.jsonl"
    longest = engine.window - 128
    found = _calibrated(engine, profile, longest)
    if not profile.exists():
        yield Row(
            "calibrate wrote a profile", str(found.get("problem")), target="a profile", holds=False
        )
        return
    checks = json.loads(profile.read_text("utf-8"))["provenance"]["held_out"]
    close = [check for check in checks if abs(check["off"]) <= 0.1]
    off = ", ".join(f"{check['name']} {check['off']:+.1%}" for check in checks)
    yield at_least(f"held-out figures within 10 %, of {len(checks)}", len(close), 6, off)
    _write_trace(trace, longest)
    capacity = _capacity(trace, profile, engine.window)
    rate = SHARE * capacity
    (pool,) = _plan(trace, profile, MIN_ENGINES * rate, engine.window)["pools"].values()
    planned_s = pool["ttft_p99_s"]
    measured_s = _replayed(trace, engine, rate)
    yield Row("capacity of one engine, requests/s", capacity)
    yield at_most(
        f"P99 TTFT at {SHARE:g} of it: measured against planned, difference",
        abs(measured_s / planned_s - 1),
        0.4,
        f"planned {1000 * planned_s:.0f} ms, measured {1000 * measured_s:.0f} ms, aim 0.2",
    )


def _calibrated(engine: RealEngine, profile: Path, longest: int) -> dict[str, Any]:
    _, found = sluice(
        *("calibrate", "--url", engine.url, "--model", BASE, "-o", profile),
        *("--budget-s", CALIBRATE_S, "--max-prompt", longest),
        *("--most-concurrency", 2 * engine.slots),
    )
    said: dict[str, Any] = found
    return said


def _write_trace(file: Path, longest: int) -> None:
    """Requests with prompts over the whole window."""
    drawn = random.Random(1)
    rows = [
        {
            "prompt_tokens": drawn.randint(64, longest - 64),
            "completion_tokens": drawn.randint(8, 64),
        }
        for _ in range(TRACE)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")


def _plan(trace: Path, profile: Path, rate: float, window: int) -> dict[str, Any]:
    """A fleet for a rate, whatever the SLO."""
    _, found = sluice(
        *("plan", "--workload", trace, "--rate", rate, "--profile", profile),
        *("--max-model-len", window, "--max-pools", 1, "--slo-ttft-ms", 600_000),
        *("--fields", FIELDS),
    )
    plan: dict[str, Any] = found
    return plan


def _capacity(trace: Path, profile: Path, window: int) -> float:
    """The highest rate of one engine, by bisection: beyond it the plan has one engine more."""
    low, high = 0.0, _MAX_RATE
    for _ in range(_STEPS):
        middle = (low + high) / 2
        fits = _plan(trace, profile, MIN_ENGINES * middle, window)["total_nodes"] <= MIN_ENGINES
        low, high = (middle, high) if fits else (low, middle)
    return low


def _replayed(trace: Path, engine: RealEngine, rate: float) -> float:
    """P99 time to first token through a gateway before the engine."""
    pool = {"max_model_len": engine.window, "max_num_seqs": engine.slots, "workers": [engine.url]}
    duration_s = min(MAX_S, max(MIN_S, REQUESTS / rate))
    with gateway({"models": [{"name": BASE, "pools": {"all": pool}}]}) as url:
        _, found = sluice(
            *("replay", "--url", url, "--workload", trace, "--rate", rate, "--model", BASE),
            *("--duration", duration_s, "--slo-ttft-ms", 600_000, "--arrivals", "poisson"),
            *("--fields", FIELDS),
            timeout_s=duration_s + 300,
        )
    return float(found["all"]["ttft_s"]["p99"])


WINDOW, SLOTS = 4096, 8
SHORT_WINDOW, SHORT_SLOTS = 1024, 16
KEY = "sk-engine"
MAX_TOKENS = 32
"""Of an answer where clients set no limit: the model ends none by itself."""
_SMALL = (512, 8)
"""Width and layers of a model that computes for longer than the rest of the engine takes for a
request, as on a GPU: for times."""
_BUSY = 1.0
"""Load of the machine above which figures of time are said to be busy."""


@contextlib.contextmanager
def _lab(rows: list[Row], hidden: int = 256, layers: int = 4) -> Iterator["_Lab | None"]:
    """Engines that end with the block; None, and a row that says why, where they cannot be had."""
    folder, load = default_folder(), os.getloadavg()[0]
    folder.mkdir(parents=True, exist_ok=True)
    busy = "busy: figures of time are worth little" if load > _BUSY else ""
    rows.append(Row("load of the machine before", load, busy))
    try:
        python = engine_python(folder)
    except Unavailable as reason:
        rows.append(Row("skipped", str(reason)))
        yield None
        return
    rows.append(Row("engine", f"vLLM {VERSION} on the CPU"))
    with Children() as children:
        yield _Lab(python, folder, (hidden, layers), children)


class _Lab:
    """Starts engines."""

    def __init__(
        self, python: Path, folder: Path, size: tuple[int, int], children: Children
    ) -> None:
        self.python, self.folder = python, folder
        self._children = children
        self.model = folder / f"model-{size[0]}"
        if not (self.model / "lora" / "adapter_model.safetensors").exists():
            script = Path(__file__).with_name("tiny_model.py")
            words = [str(python), str(script), str(self.model), *map(str, (WINDOW, *size))]
            subprocess.run(words, check=True)

    def engine(
        self,
        window: int = WINDOW,
        slots: int = SLOTS,
        *,
        lora: bool = False,
        api_key: str | None = None,
        most_tokens: int | None = None,
        phase: Phase | None = None,
    ) -> RealEngine:
        """One more engine, which starts meanwhile: `wait` for it."""
        return RealEngine(
            self._children,
            self.python,
            self.model,
            self.folder / f"engine-{window}.log",
            window=window,
            slots=slots,
            adapter=self.model / "lora" if lora else None,
            api_key=api_key,
            most_tokens=most_tokens,
            phase=phase,
        )


def planned() -> list[Row]:
    """A plan made from one engine's own log, and what it does."""
    rows: list[Row] = []
    with _lab(rows, *_SMALL) as lab, tempfile.TemporaryDirectory() as there:
        if lab:
            engine = lab.engine()
            engine.wait()
            rows += planned_scene(Path(there), engine)
    return rows


def adapters() -> list[Row]:
    """A LoRA adapter that one of two engines has."""
    rows: list[Row] = []
    with _lab(rows) as lab:
        if lab:
            engines = lab.engine(lora=True), lab.engine()
            for engine in engines:
                engine.wait()
            rows += adapters_scene(*engines)
    return rows


def mistakes() -> list[Row]:
    """What `sluice check --live` says of a wrong file."""
    rows: list[Row] = []
    with _lab(rows) as lab, tempfile.TemporaryDirectory() as there:
        if lab:
            engine = lab.engine(api_key=KEY)
            engine.wait()
            rows += mistakes_scene(Path(there), engine, KEY)
    return rows


def phases() -> list[Row]:
    """Prefill and decode on engines of their own, over NIXL."""
    rows: list[Row] = []
    with _lab(rows) as lab:
        if lab:
            try:
                add_transfer(lab.python)
            except Unavailable as reason:
                return [*rows, Row("skipped", str(reason))]
            prefill, *decode = (lab.engine(phase=p) for p in ("prefill", "decode", "decode"))
            for engine in (prefill, *decode):
                engine.wait()
            rows += phases_scene(prefill, *decode)
    return rows


def all_on() -> list[Row]:
    """All five systems before two engines, then openai-python's own tests."""
    rows: list[Row] = []
    with _lab(rows) as lab:
        if lab:
            short = lab.engine(SHORT_WINDOW, SHORT_SLOTS, lora=True, most_tokens=MAX_TOKENS)
            long = lab.engine(lora=True, most_tokens=MAX_TOKENS)
            for engine in (short, long):
                engine.wait()
            with gateway(everything_on(short, long)) as url:
                rows += all_on_scene(url)
                try:
                    source = suite_of_openai(lab.python, lab.folder / "openai")
                except Unavailable as reason:
                    rows.append(Row("openai-python's tests: skipped", str(reason)))
                else:
                    rows += suite_scene(lab.python, source, long.url, url)
    return rows
