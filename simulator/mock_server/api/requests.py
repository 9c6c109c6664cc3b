"""Turn a request body into sequences for the engine, with vLLM's checks."""

import json
from array import array
from collections.abc import Sequence
from typing import Any
from zlib import crc32

import msgspec
import orjson

from simulator.mock_server import tokenizer
from simulator.mock_server.api import answers, problems
from simulator.mock_server.api.config import MockConfig
from simulator.mock_server.api.problems import ApiError

Body = dict[str, Any]
COMPLETIONS_LIMIT = 16
"""max_tokens of /v1/completions if the body sets none, as in vLLM and OpenAI."""


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence to run, and its answer."""

    prompt_tokens: int
    output_tokens: int
    block_hashes: tuple[int, ...]
    seed: int
    """Selects the answer: same prompt, same answer."""
    finish_reason: str
    """`stop` if the answer ends by itself within its limit, else `length`."""


class CheckedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A checked request."""

    model: str
    choices: tuple[Choice, ...]
    """Sequences prompt by prompt, n each."""
    per_prompt: int = 1
    limit: int | None = None
    priority: int = 0
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    body: Body

    @property
    def prompt_tokens(self) -> int:
        """Sum over the prompts, each counted once."""
        return sum(choice.prompt_tokens for choice in self.choices[:: self.per_prompt])


def parse_json(data: bytes, content_type: str) -> Body:
    """The body as an object; raises vLLM's 400 otherwise."""
    if content_type.partition(";")[0].strip().lower() != "application/json":
        raise problems.invalid("['Unsupported Media Type: Only \\'application/json\\' is allowed']")
    try:
        body = orjson.loads(data)
    except orjson.JSONDecodeError:
        body = _parse_leniently(data)
    if not isinstance(body, dict):
        raise problems.invalid(
            "[{'type': 'model_attributes_type', 'loc': ('body',), 'msg': 'Input should be a "
            "valid dictionary or object to extract fields from'}]"
        )
    return body


def _parse_leniently(data: bytes) -> object:
    """The standard parser accepts lone surrogates and NaN, as vLLM's does."""
    try:
        return json.loads(data)
    except RecursionError:
        raise problems.invalid("the body is nested too deep") from None
    except ValueError as error:
        raise problems.invalid(
            f"[{{'type': 'json_invalid', 'loc': ('body', 0), 'msg': 'JSON decode error', "
            f"'input': {{}}, 'ctx': {{'error': {str(error)!r}}}}}]"
        ) from None


def field_int(body: Body, name: str, default: int | None = None) -> int | None:
    """An optional integer field."""
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int):
        raise problems.invalid(
            f"[{{'type': 'int_type', 'loc': ('body', {name!r}), 'msg': 'Input should be a valid "
            f"integer', 'input': {value!r}}}]"
        )
    return value


def field_list(body: Body, name: str) -> list[Any]:
    """A required, non-empty list field."""
    value = body.get(name)
    if value is None:
        raise missing(name)
    if not isinstance(value, list):
        raise problems.invalid(
            f"[{{'type': 'list_type', 'loc': ('body', {name!r}), 'msg': 'Input should be a valid "
            "list'}]"
        )
    if not value:
        raise ApiError(400, f"{name} must not be empty.", param=name)
    return value


def missing(name: str) -> ApiError:
    """The error for an absent required field."""
    return problems.invalid(
        f"[{{'type': 'missing', 'loc': ('body', {name!r}), 'msg': 'Field required'}}]"
    )


def seed_of(ids: Sequence[int]) -> int:
    """A prompt's hash, which determines the answer and its natural length."""
    return crc32(array("q", ids).tobytes())


def _known_tokens(ids: list[int]) -> list[int]:
    highest = max(ids)
    if min(ids) < 0 or highest >= 1 << 32:
        raise ApiError(400, f"Token id {highest} is out of vocabulary")
    return ids


def token_prompts(prompt: object) -> list[list[int]]:
    """The prompts of /v1/completions or /v1/embeddings: texts or token ids, one or many."""
    if isinstance(prompt, str):
        return [tokenizer.encode_prompt(prompt)]
    if isinstance(prompt, list) and prompt:
        if all(type(item) is int for item in prompt):
            return [_known_tokens(prompt)]
        if all(isinstance(item, str) for item in prompt):
            return [tokenizer.encode_prompt(item) for item in prompt]
        if all(
            isinstance(item, list) and item and all(type(token) is int for token in item)
            for item in prompt
        ):
            return [_known_tokens(item) for item in prompt]
    raise problems.invalid("prompt must be a string, a list of strings, or token ids")


class RequestReader:
    """Reads bodies for one engine: its window and scheduling."""

    def __init__(self, config: MockConfig) -> None:
        self._config = config
        self._window = config.profile.max_model_len

    def limit(self, body: Body, *names: str) -> tuple[int | None, str]:
        """The first output limit present, and its field; 400 if below 1."""
        for name in names:
            value = field_int(body, name)
            if value is None:
                continue
            if value < 1:
                raise ApiError(400, f"{name} must be at least 1, got {value}.", param=name)
            return value, name
        return None, names[-1]

    def job(
        self,
        body: Body,
        prompts: list[list[int]],
        *,
        limit: int | None,
        limit_field: str = "max_tokens",
        natural_header: str | None = None,
        sequences: int = 1,
    ) -> CheckedRequest:
        """Check the lengths and determine each sequence's output."""
        # Engines keep the prefixes of each adapter, and of each salt, apart.
        salt = crc32(
            f"{body.get('model')}\0{body.get('cache_salt') or ''}".encode("utf-8", "surrogatepass")
        )
        natural = self._fixed_length(body, natural_header)
        choices = []
        for ids in prompts:
            if len(ids) + (limit or 1) > self._window:
                raise problems.overflow(self._config, len(ids), limit, limit_field)
            hashes = tokenizer.block_hashes(ids, salt)
            seed = seed_of(ids)
            choices += [
                self._choice(body, len(ids), hashes, seed + number * 331, limit, natural)
                for number in range(sequences)
            ]
        options = body.get("stream_options")
        options = options if isinstance(options, dict) else {}
        return CheckedRequest(
            model=self._config.model,
            choices=tuple(choices),
            per_prompt=sequences,
            limit=limit,
            priority=self._priority(body),
            stream=body.get("stream") is True,
            include_usage=options.get("include_usage") is True,
            continuous_usage=options.get("continuous_usage_stats") is True,
            body=body,
        )

    def pooled(self, body: Body, prompts: list[list[int]]) -> CheckedRequest:
        """A job without output: each prompt is computed, one step ends it."""
        for ids in prompts:
            if len(ids) >= self._window:
                raise problems.overflow(self._config, len(ids), None)
        return CheckedRequest(
            model=self._config.model,
            choices=tuple(
                Choice(
                    prompt_tokens=len(ids),
                    output_tokens=1,
                    block_hashes=tokenizer.block_hashes(ids),
                    seed=seed_of(ids),
                    finish_reason="stop",
                )
                for ids in prompts
            ),
            priority=self._priority(body),
            body=body,
        )

    def _priority(self, body: Body) -> int:
        priority = field_int(body, "priority", 0) or 0
        if priority and self._config.profile.scheduling != "priority":
            raise ApiError(400, f"Got priority {priority} but Priority scheduling is not enabled.")
        return priority

    def _fixed_length(self, body: Body, header: str | None) -> int | None:
        """The natural length that a test requests by header or body field."""
        if header is None:
            value = field_int(body, "mock_output_tokens")
        elif header.isdecimal():
            value = int(header)
        else:
            raise problems.invalid(f"x-mock-output-tokens must be a number, not {header!r}")
        if value is not None and value < 1:
            raise problems.invalid("the natural length must be at least 1")
        return value

    def _choice(
        self,
        body: Body,
        prompt_tokens: int,
        hashes: tuple[int, ...],
        seed: int,
        limit: int | None,
        natural: int | None,
    ) -> Choice:
        room = self._window - prompt_tokens if limit is None else limit
        if natural is None:
            natural = answers.natural_length(seed, self._config.mean_output_tokens)
        natural = max(natural, field_int(body, "min_tokens", 0) or 0)
        ends = natural <= room and body.get("ignore_eos") is not True
        return Choice(
            prompt_tokens=prompt_tokens,
            output_tokens=natural if ends else room,
            block_hashes=hashes,
            seed=seed,
            finish_reason="stop" if ends else "length",
        )
