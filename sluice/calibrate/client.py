"""The engine's OpenAI API as `sluice calibrate` uses it: streams with timestamps."""

import asyncio
import contextlib
import random
import re
import time
from collections.abc import Mapping
from typing import Any, ClassVar, Final

import httpx
import msgspec

from planner.calibration.traces import StreamTrace
from planner.errors import PlanError
from sluice.calibrate.stream import read_stream, trace_of

_WORDS: Final = tuple(
    word
    for line in (
        "time year people way day man thing woman life child world school state family student",
        "country problem hand part place case week company system program question work number",
        "point home water room mother area money story fact month lot right study book eye job",
        "business issue side kind head house service friend father power hour game line end group",
    )
    for word in line.split()
)
_CONNECT_S: Final = 10.0
_SILENT_S: Final = 60.0
_OPTIONS: Final[tuple[dict[str, Any], ...]] = (
    {
        "ignore_eos": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    },
    {"ignore_eos": True, "stream_options": {"include_usage": True}},
    {"stream_options": {"include_usage": True}},
    {},
)
"""Engine-specific fields, most informative first; after a 400 the next set is tried."""
_INFO: Final = re.compile(r"^vllm:cache_config_info\{([^}]*)\}", re.MULTILINE)
_LABEL: Final = re.compile(r'(\w+)="([^"]*)"')
_RUNNING: Final = re.compile(
    r"^vllm:num_requests_(?:running|waiting)(?:\{[^}]*\})? ([\d.e+]+)", re.MULTILINE
)


class About(msgspec.Struct, frozen=True, kw_only=True):
    """The engine's own description; None for fields it does not state."""

    model: str
    window_tokens: int | None
    version: str | None
    kv_tokens: int | None
    block_tokens: int | None
    caches_prefixes: bool = False
    busy: int = 0
    """Sequences running or waiting before the measurement began."""


class EngineClient:
    """A client of one engine. Every request has a new prompt, so that no prefix is cached."""

    who: ClassVar[str] = "the engine"
    key_option: ClassVar[str] = "--api-key-file"

    def __init__(self, url: str, model: str | None, key: str | None) -> None:
        """`key` is the engine's bearer token."""
        headers = {"authorization": f"Bearer {key}"} if key else {}
        # No proxies and no .netrc from the environment: the key goes to the engine alone.
        self._http = httpx.AsyncClient(
            base_url=url.rstrip("/").removesuffix("/v1"),
            headers=headers,
            timeout=httpx.Timeout(_SILENT_S, connect=_CONNECT_S, pool=None),
            limits=httpx.Limits(keepalive_expiry=None),
            trust_env=False,
        )
        self.model = model or ""
        self.requests = 0
        self.failures: list[str] = []
        self._random = random.Random()  # an engine may still cache the prompts of an earlier run
        self._options = 0
        self._chat = False
        self._tokenizes = True
        self._per_word = 1.3
        self._fixed = 1.0

    @property
    def path(self) -> str:
        """Path of the completions endpoint in use."""
        return "/v1/chat/completions" if self._chat else "/v1/completions"

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def about(self) -> About:
        """Describe the engine; raises PlanError if it cannot be reached or lacks the model."""
        try:
            page = await self._http.get("/v1/models")
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise PlanError(f"{self.who} does not answer: {_words(error)}", "check --url") from None
        if page.status_code in {401, 403}:
            raise PlanError(f"{self.who} refuses the key", f"give {self.key_option}")
        models = _models(page)
        own = {model.root for model in models.values()}
        if not self.model and len(own) != 1:
            raise PlanError(f"{self.who} lists {len(own)} models", "give --model")
        (first,) = own if not self.model else {""}
        # Prefer the name that all others are aliases of, if it is served.
        self.model = self.model or (first if first in models else next(iter(models)))
        if models and self.model not in models:
            raise PlanError(f"{self.who} has no {self.model}", f"use one of {', '.join(models)}")
        info, busy = await self._metrics()
        blocks, size = _number(info.get("num_gpu_blocks")), _number(info.get("block_size"))
        return About(
            model=self.model,
            window_tokens=models[self.model].window_tokens if models else None,
            version=await self._version(),
            kv_tokens=blocks * size if blocks and size else None,
            block_tokens=size,
            caches_prefixes=info.get("enable_prefix_caching") == "True",
            busy=busy,
        )

    async def learn(self) -> StreamTrace:
        """Learn which fields the engine accepts and how it counts; PlanError if none work."""
        await self.tokens_of(self._text(64))
        for number in range(2 * len(_OPTIONS)):
            self._chat, self._options = number >= len(_OPTIONS), number % len(_OPTIONS)
            self.failures.clear()
            trace = await self.stream(64, 24)
            if trace is not None:
                await self._learn_words()
                return trace
        raise PlanError(f"no completion worked: {self.failures[-1]}", "check --model and its key")

    async def _learn_words(self) -> None:
        """Learn tokens per word, and a prompt's fixed tokens, from two lengths."""
        few, many = 16, 216
        counts = []
        for words in (few, many):
            text = self._text(words)
            count = await self.tokens_of(text)
            if count is None:
                trace = await self.stream(0, 2, text=text)
                count = trace.prompt_tokens if trace else round(1.3 * words)
            counts.append(count)
        self._per_word = max((counts[1] - counts[0]) / (many - few), 0.5)
        self._fixed = counts[0] - self._per_word * few

    async def tokens_of(self, text: str) -> int | None:
        """Count by the engine's own /tokenize; None if it has none."""
        if not self._tokenizes:
            return None
        body: dict[str, Any] = {"model": self.model}
        body |= {"messages": _message(text)} if self._chat else {"prompt": text}
        try:
            answer = await self._http.post("/tokenize", json=body)
            return int(answer.raise_for_status().json()["count"])
        except (httpx.HTTPError, ValueError, KeyError, TypeError):
            self._tokenizes = False
            return None

    async def prompt(self, tokens: int) -> str:
        """A text of about so many tokens; exact to the word if the engine counts for us."""
        words = max(1, round((tokens - self._fixed) / self._per_word))
        text = self._text(words)
        count = await self.tokens_of(text)
        if count is None or count == tokens:
            return text
        missing = round((tokens - count) / self._per_word)
        if missing > 0:
            return text + " " + self._text(missing)
        return " ".join(text.split(" ")[: max(1, words + missing)])

    async def stream(
        self,
        prompt_tokens: int,
        output_tokens: int,
        *,
        text: str | None = None,
        leave: asyncio.Event | None = None,
    ) -> StreamTrace | None:
        """Send one request; on failure note why in `failures`, return None. `leave`: end early."""
        body = self._body(text or await self.prompt(prompt_tokens), output_tokens)
        parts: list[tuple[float, bytes]] = []
        self.requests += 1
        request = self._http.build_request("POST", self.path, json=body)
        submit_s = time.perf_counter()
        try:
            async with contextlib.aclosing(await self._http.send(request, stream=True)) as answer:
                if answer.status_code != 200:
                    words = (await answer.aread())[:200].decode("utf-8", "replace")
                    self.failures.append(f"{answer.status_code} {words}")
                    return None
                async for part in answer.aiter_raw():
                    parts.append((time.perf_counter(), part))
                    if leave is not None and leave.is_set():
                        break
        except httpx.HTTPError as error:
            self.failures.append(_words(error))
            return None
        seen = read_stream(parts)
        trace = trace_of(seen, submit_s, prompt_tokens)
        if trace is None:
            self.failures.append(seen.error or "a stream without tokens")
        return trace

    def _body(self, text: str, output_tokens: int) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": output_tokens,
            "temperature": 0,
            "stream": True,
            **_OPTIONS[self._options],
        }
        if "ignore_eos" in body:
            body["min_tokens"] = output_tokens
        return body | ({"messages": _message(text)} if self._chat else {"prompt": text})

    def _text(self, words: int) -> str:
        return " ".join(self._random.choices(_WORDS, k=words))

    async def _metrics(self) -> tuple[Mapping[str, str], int]:
        try:
            page = (await self._http.get("/metrics")).raise_for_status().text
        except httpx.HTTPError:
            return {}, 0
        found = _INFO.search(page)
        busy = sum(float(number) for number in _RUNNING.findall(page))
        return dict(_LABEL.findall(found[1])) if found else {}, round(busy)

    async def _version(self) -> str | None:
        try:
            reported = (await self._http.get("/version")).raise_for_status().json()
            return str(reported["version"])
        except (httpx.HTTPError, ValueError, KeyError, TypeError):
            return None


class _Model(msgspec.Struct, frozen=True):
    root: str
    """The model that this one is an alias of; its own name if not stated."""
    window_tokens: int | None


def _models(page: httpx.Response) -> dict[str, _Model]:
    """Models by name; empty if the engine lists none."""
    try:
        entries = page.raise_for_status().json()["data"]
        return {
            str(e["id"]): _Model(str(e.get("root") or e["id"]), e.get("max_model_len"))
            for e in entries
        }
    except (httpx.HTTPError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _message(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def _number(text: str | None) -> int | None:
    return int(text) if text and text.isdecimal() else None


def _words(error: Exception) -> str:
    return str(error) or type(error).__name__
