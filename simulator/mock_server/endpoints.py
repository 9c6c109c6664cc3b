"""One method per endpoint: turns a body into a job and the dialect of its answer."""

import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from itertools import count
from typing import Any

from simulator.mock_server import tokenizer
from simulator.mock_server.api import problems
from simulator.mock_server.api.completions import Chat, Completions
from simulator.mock_server.api.config import MockConfig
from simulator.mock_server.api.dialects import StreamDialect
from simulator.mock_server.api.events import Messages, Responses
from simulator.mock_server.api.pooling import DEFAULT_DIMENSIONS, Embeddings, Ranking, Scores
from simulator.mock_server.api.problems import ApiError
from simulator.mock_server.api.requests import (
    COMPLETIONS_LIMIT,
    Body,
    CheckedRequest,
    RequestReader,
    field_int,
    field_list,
    missing,
    token_prompts,
)
from simulator.mock_server.generation import Whole

Headers = Mapping[str, str]
Prepared = tuple[CheckedRequest, StreamDialect | Whole]
Handler = Callable[[Body, Headers, str], Prepared]
_STORED_RESPONSES = 1024
_MAX_SEQUENCES = 128
_NATURAL = "x-mock-output-tokens"


class Endpoints:
    """The endpoints that run on the engine. `model_name` is what answers echo."""

    def __init__(self, config: MockConfig) -> None:
        self._config = config
        self._reader = RequestReader(config)
        # Response ids differ between engines: an id leads back to its engine.
        self._prefix = secrets.token_hex(8)
        self._numbers = count(1)
        self._responses: OrderedDict[str, list[Any]] = OrderedDict()
        self.handlers: dict[str, Handler] = {
            "/v1/chat/completions": self.chat,
            "/v1/completions": self.completions,
            "/v1/responses": self.responses,
            "/v1/messages": self.messages,
            "/v1/embeddings": self.embeddings,
            "/v1/score": self.score,
            "/score": self.score,
            "/v1/rerank": self.rerank,
            "/v2/rerank": self.rerank,
            "/rerank": self.rerank,
        }

    def _request_id(self, prefix: str, headers: Headers) -> str:
        """The caller's X-Request-Id under the endpoint's prefix, as vLLM builds it."""
        given = headers.get("x-request-id")
        return f"{prefix}-{given or self._unique()}"

    def _unique(self) -> str:
        return f"{self._prefix}{next(self._numbers):016x}"

    def chat(self, body: Body, headers: Headers, model_name: str) -> Prepared:
        """/v1/chat/completions."""
        prompt = tokenizer.encode_chat(_messages(body), _list(body, "tools"))
        limit, field = self._reader.limit(body, "max_completion_tokens", "max_tokens")
        job = self._reader.job(
            body,
            [prompt],
            limit=limit,
            limit_field=field,
            natural_header=headers.get(_NATURAL),
            sequences=_sequences(body),
        )
        request_id = self._request_id("chatcmpl", headers)
        created = int(time.time())
        return job, Chat(request_id, model_name, created, stream_usage=job.include_usage)

    def completions(self, body: Body, headers: Headers, model_name: str) -> Prepared:
        """/v1/completions: one prompt or many, texts or token ids."""
        if body.get("prompt") is None:
            raise missing("prompt")
        limit, field = self._reader.limit(body, "max_tokens")
        job = self._reader.job(
            body,
            token_prompts(body["prompt"]),
            limit=COMPLETIONS_LIMIT if limit is None else limit,
            limit_field=field,
            natural_header=headers.get(_NATURAL),
            sequences=_sequences(body),
        )
        request_id = self._request_id("cmpl", headers)
        created = int(time.time())
        return job, Completions(request_id, model_name, created, stream_usage=job.include_usage)

    def responses(self, body: Body, headers: Headers, model_name: str) -> Prepared:
        """/v1/responses; `previous_response_id` recalls earlier turns."""
        messages = self._earlier(body) + _input_messages(body)
        instructions = body.get("instructions")
        system = [{"role": "system", "content": instructions}] if instructions else []
        limit, field = self._reader.limit(body, "max_output_tokens")
        job = self._reader.job(
            body,
            [tokenizer.encode_chat([*system, *messages], _list(body, "tools"))],
            limit=limit,
            limit_field=field,
            natural_header=headers.get(_NATURAL),
        )
        request_id = f"resp_{self._unique()}"
        if body.get("store") is not False:
            self._responses[request_id] = messages
            if len(self._responses) > _STORED_RESPONSES:
                self._responses.popitem(last=False)
        return job, Responses(request_id, model_name, int(time.time()), body)

    def _earlier(self, body: Body) -> list[Any]:
        previous = body.get("previous_response_id")
        if previous is None:
            return []
        messages = self._responses.get(str(previous))
        if messages is None:
            raise ApiError(
                404,
                f"Response with id '{previous}' not found.",
                kind="invalid_request_error",
                param="response_id",
            )
        return messages

    def messages(self, body: Body, headers: Headers, model_name: str) -> Prepared:
        """/v1/messages."""
        prompt = _anthropic_prompt(body)
        if body.get("max_tokens") is None:
            raise missing("max_tokens")
        limit, field = self._reader.limit(body, "max_tokens")
        job = self._reader.job(
            body,
            [prompt],
            limit=limit,
            limit_field=field,
            natural_header=headers.get(_NATURAL),
        )
        return job, Messages(self._request_id("chatcmpl", headers), model_name)

    def embeddings(self, body: Body, headers: Headers, model_name: str) -> Prepared:
        """/v1/embeddings."""
        if body.get("input") is None:
            raise missing("input")
        job = self._reader.pooled(body, token_prompts(body["input"]))
        dimensions = field_int(body, "dimensions", DEFAULT_DIMENSIONS) or DEFAULT_DIMENSIONS
        if not 1 <= dimensions <= 4096:
            raise ApiError(400, "dimensions must be in [1, 4096].", param="dimensions")
        request_id = self._request_id("embd", headers)
        return job, Embeddings(job, request_id, int(time.time()), dimensions)

    def score(self, body: Body, headers: Headers, model_name: str) -> Prepared:
        """/v1/score: one text against many, or pair by pair."""
        first = _texts(body, "text_1", "data_1", "queries")
        second = _texts(body, "text_2", "data_2", "documents")
        if len(first) == 1:
            first = first * len(second)
        if len(first) != len(second):
            raise ApiError(400, "Input lengths must be either 1:1, 1:N or N:N")
        pairs = list(zip(first, second, strict=True))
        job = self._reader.pooled(body, [tokenizer.encode_prompt(a + b) for a, b in pairs])
        request_id = self._request_id("score", headers)
        return job, Scores(request_id, model_name, int(time.time()), pairs)

    def rerank(self, body: Body, headers: Headers, model_name: str) -> Prepared:
        """/v1/rerank."""
        query = _texts(body, "query")[0]
        documents = _texts(body, "documents")
        top_n = field_int(body, "top_n", 0) or len(documents)
        prompts = [tokenizer.encode_prompt(query + document) for document in documents]
        job = self._reader.pooled(body, prompts)
        return job, Ranking(
            self._request_id("rerank", headers), model_name, query, documents, top_n
        )

    def count_tokens(self, body: Body) -> dict[str, Any]:
        """/v1/messages/count_tokens."""
        return {"input_tokens": len(_anthropic_prompt(body))}

    def tokenize(self, body: Body) -> dict[str, Any]:
        """/tokenize: tokens of a prompt, or of messages under the chat template."""
        if body.get("messages") is not None:
            ids = tokenizer.encode_chat(_messages(body), _list(body, "tools"))
        elif isinstance(body.get("prompt"), str):
            special = body.get("add_special_tokens") is not False
            encode = tokenizer.encode_prompt if special else tokenizer.encode
            ids = encode(body["prompt"])
        else:
            raise missing("prompt")
        return {
            "count": len(ids),
            "max_model_len": self._config.profile.max_model_len,
            "tokens": ids,
            "token_strs": None,
        }


def _anthropic_prompt(body: Body) -> list[int]:
    messages, system = _messages(body), body.get("system")
    if system:
        messages = [{"role": "system", "content": system}, *messages]
    return tokenizer.encode_chat(messages, _list(body, "tools"))


def _messages(body: Body) -> list[Any]:
    messages = field_list(body, "messages")
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise problems.invalid(
                f"[{{'type': 'missing', 'loc': ('body', 'messages', {index}, 'role'), 'msg': "
                "'Field required'}]"
            )
    return messages


def _input_messages(body: Body) -> list[Any]:
    """The `input` of /v1/responses as chat messages."""
    given = body.get("input")
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    return [
        item if isinstance(item, dict) and "role" in item else {"role": "user", "content": [item]}
        for item in field_list(body, "input")
    ]


def _list(body: Body, name: str) -> list[Any]:
    value = body.get(name)
    return value if isinstance(value, list) else []


def _texts(body: Body, *names: str) -> list[str]:
    """The first of the fields present: a text or a list of texts."""
    for name in names:
        value = body.get(name)
        if value is None:
            continue
        items = value if isinstance(value, list) else [value]
        texts = [item.get("text") if isinstance(item, dict) else item for item in items]
        if not texts or not all(isinstance(text, str) for text in texts):
            raise problems.invalid(f"{name} must be a string or a list of strings")
        return [str(text) for text in texts]
    raise missing(names[0])


def _sequences(body: Body) -> int:
    n = field_int(body, "n", 1) or 1
    if not 1 <= n <= _MAX_SEQUENCES:
        raise ApiError(400, f"n must be in [1, {_MAX_SEQUENCES}], got {n}.", param="n")
    return n
