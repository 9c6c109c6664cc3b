"""The interface of answer formats; `completions` and `events` implement them."""

import json
from abc import ABC, abstractmethod
from typing import Any

import msgspec
import orjson


def dumps(value: object) -> bytes:
    """JSON as the engines write it: UTF-8, with ASCII escapes if it holds a lone surrogate."""
    try:
        return orjson.dumps(value)
    except orjson.JSONEncodeError:
        return json.dumps(value, separators=(",", ":")).encode()


class ReportedUsage(msgspec.Struct, frozen=True):
    """Token counts as reported."""

    prompt: int
    completion: int
    cached: int

    def openai(self) -> dict[str, Any]:
        """The usage object of chat and completions."""
        return {
            "prompt_tokens": self.prompt,
            "total_tokens": self.prompt + self.completion,
            "completion_tokens": self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }

    def responses(self) -> dict[str, Any]:
        """The usage object of /v1/responses."""
        return {
            "input_tokens": self.prompt,
            "input_tokens_details": {"cached_tokens": self.cached},
            "output_tokens": self.completion,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": self.prompt + self.completion,
        }

    def anthropic(self) -> dict[str, Any]:
        """The usage object of /v1/messages: what the cache held is no part of the input."""
        return {
            "input_tokens": self.prompt - self.cached,
            "output_tokens": self.completion,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": self.cached,
        }


class FinishedSequence(msgspec.Struct, frozen=True):
    """A finished sequence: its text and why it ended."""

    text: str
    finish_reason: str


class StreamDialect(ABC):
    """Writes an endpoint's streams and whole answers. Usage None: none is reported."""

    usage_in_head = False
    """Whether a stream's head reports the prompt's tokens."""

    @abstractmethod
    def head(self, choices: int, usage: ReportedUsage | None) -> bytes:
        """Bytes before the first token."""

    @abstractmethod
    def token(self, choice: int, piece: bytes, usage: ReportedUsage | None = None) -> bytes:
        """One token's chunk; `piece` is its text as JSON. Usage only if it is part of chunks."""

    @abstractmethod
    def last(
        self, choice: int, piece: bytes, reason: str, usage: ReportedUsage | None = None
    ) -> bytes:
        """A sequence's last chunk."""

    @abstractmethod
    def tail(
        self, parts: list[FinishedSequence], usage: ReportedUsage | None, *, done: bool
    ) -> bytes:
        """The stream's end after the last chunk; `done`: whether to send the end marker."""

    @abstractmethod
    def whole(self, parts: list[FinishedSequence], usage: ReportedUsage | None) -> bytes:
        """The answer in one piece."""
