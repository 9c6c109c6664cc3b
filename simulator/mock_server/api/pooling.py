"""Answers without generated text: embeddings, scores, rankings."""

import base64
from array import array
from collections.abc import Sequence
from typing import Any

from simulator.mock_server import tokenizer
from simulator.mock_server.api import answers
from simulator.mock_server.api.dialects import FinishedSequence, ReportedUsage, dumps
from simulator.mock_server.api.requests import CheckedRequest

DEFAULT_DIMENSIONS = 64


def _vector(seed: int, dimensions: int) -> list[float]:
    """A unit vector that depends on the seed only."""
    values = [answers.uniform(seed * 4096 + i) - 0.5 for i in range(dimensions)]
    norm = sum(value * value for value in values) ** 0.5
    return [value / norm for value in values]


def similarity(first: str, second: str) -> float:
    """Share of common tokens of two texts, 0..1."""
    a, b = set(tokenizer.encode(first.lower())), set(tokenizer.encode(second.lower()))
    return len(a & b) / len(a | b) if a or b else 0.0


def _usage(usage: ReportedUsage | None) -> dict[str, Any]:
    if usage is None:
        return {}
    fields = {"prompt_tokens": usage.prompt, "total_tokens": usage.prompt, "completion_tokens": 0}
    return {"usage": {**fields, "prompt_tokens_details": None}}


class Embeddings:
    """/v1/embeddings."""

    def __init__(self, job: CheckedRequest, request_id: str, created: int, dimensions: int) -> None:
        self._job = job
        self._id = request_id
        self._created = created
        self._dimensions = dimensions

    def whole(self, parts: list[FinishedSequence], usage: ReportedUsage | None) -> bytes:
        """The list of vectors, as numbers or base64 of little-endian float32."""
        as_text = self._job.body.get("encoding_format") == "base64"
        data = []
        for index, choice in enumerate(self._job.choices):
            vector: Any = _vector(choice.seed, self._dimensions)
            if as_text:
                vector = base64.b64encode(array("f", vector).tobytes()).decode()
            data.append({"index": index, "object": "embedding", "embedding": vector})
        return dumps(
            {
                "id": self._id,
                "object": "list",
                "created": self._created,
                "model": self._job.model,
                "data": data,
                **_usage(usage),
            }
        )


class Scores:
    """/v1/score: one number for each pair."""

    def __init__(
        self, request_id: str, model: str, created: int, pairs: Sequence[tuple[str, str]]
    ) -> None:
        self._fields = {"id": request_id, "object": "list", "created": created, "model": model}
        self._pairs = pairs

    def whole(self, parts: list[FinishedSequence], usage: ReportedUsage | None) -> bytes:
        """The scores in the order of the pairs."""
        data = [
            {"index": index, "object": "score", "score": similarity(*pair)}
            for index, pair in enumerate(self._pairs)
        ]
        return dumps({**self._fields, "data": data, **_usage(usage)})


class Ranking:
    """/v1/rerank: documents by falling relevance."""

    def __init__(
        self, request_id: str, model: str, query: str, documents: Sequence[str], top_n: int
    ) -> None:
        self._fields = {"id": request_id, "model": model}
        self._query = query
        self._documents = documents
        self._top_n = top_n

    def whole(self, parts: list[FinishedSequence], usage: ReportedUsage | None) -> bytes:
        """The best `top_n` documents."""
        results = [
            {
                "index": index,
                "document": {"text": document, "multi_modal": None},
                "relevance_score": similarity(self._query, document),
            }
            for index, document in enumerate(self._documents)
        ]
        results.sort(key=lambda result: -float(str(result["relevance_score"])))
        counted = (
            {}
            if usage is None
            else {"usage": {"prompt_tokens": usage.prompt, "total_tokens": usage.prompt}}
        )
        return dumps({**self._fields, **counted, "results": results[: self._top_n]})
