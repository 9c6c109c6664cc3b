"""Formats of chat and plain completions.

Parts that repeat in a stream are encoded once per request; a token costs one formatting.
"""

from abc import abstractmethod
from typing import Any

from simulator.mock_server.api.dialects import FinishedSequence, ReportedUsage, StreamDialect, dumps

_DONE = b"data: [DONE]\n\n"


def _inline(usage: ReportedUsage | None) -> bytes:
    return b"" if usage is None else b',"usage":' + dumps(usage.openai())


class OpenAIStream(StreamDialect):
    """Common parts of chat and completions: chunks of one object kind, closed by [DONE]."""

    _kind: str
    _chunk_kind: str
    # The chunk's rest after the envelope: index, text, usage; the last one adds the reason.
    _token: bytes
    _last: bytes

    def __init__(self, request_id: str, model: str, created: int, *, stream_usage: bool) -> None:
        fields = {"id": request_id, "object": self._kind, "created": created, "model": model}
        chunk_fields = {**fields, "object": self._chunk_kind}
        self._fields = fields
        self.kv_transfer_params: dict[str, Any] | None = None
        """For the decode engine; only whole answers have them."""
        self._stream_usage = stream_usage
        self._open = b"data: " + dumps(chunk_fields)[:-1]

    @abstractmethod
    def _choice(self, index: int, part: FinishedSequence) -> dict[str, Any]:
        """One entry of `choices` in a whole answer."""

    def head(self, choices: int, usage: ReportedUsage | None) -> bytes:
        """Empty, unless a subclass overrides it."""
        return b""

    def token(self, choice: int, piece: bytes, usage: ReportedUsage | None = None) -> bytes:
        """A chunk without finish_reason."""
        return self._open + self._token % (choice, piece, _inline(usage))

    def last(
        self, choice: int, piece: bytes, reason: str, usage: ReportedUsage | None = None
    ) -> bytes:
        """The last content chunk carries finish_reason."""
        return self._open + self._last % (choice, piece, reason.encode(), _inline(usage))

    def tail(
        self, parts: list[FinishedSequence], usage: ReportedUsage | None, *, done: bool
    ) -> bytes:
        """The usage chunk without choices, if it was asked for, and [DONE]."""
        out = b""
        if self._stream_usage and usage is not None:
            out = self._open + b',"choices":[]%s}\n\n' % _inline(usage)
        return out + _DONE if done else out

    def whole(self, parts: list[FinishedSequence], usage: ReportedUsage | None) -> bytes:
        """The completion object."""
        counted = {} if usage is None else {"usage": usage.openai()}
        return dumps(
            {
                **self._fields,
                "choices": [self._choice(index, part) for index, part in enumerate(parts)],
                "service_tier": None,
                "system_fingerprint": None,
                **counted,
                "prompt_logprobs": None,
                "kv_transfer_params": self.kv_transfer_params,
            }
        )


class Chat(OpenAIStream):
    """/v1/chat/completions: a role chunk first."""

    _kind = "chat.completion"
    _chunk_kind = "chat.completion.chunk"
    _token = (
        b',"choices":[{"index":%d,"delta":{"content":%s},"logprobs":null,"finish_reason":null,'
        b'"token_ids":null}]%s}\n\n'
    )
    _last = (
        b',"choices":[{"index":%d,"delta":{"content":%s},"logprobs":null,"finish_reason":"%s",'
        b'"stop_reason":null,"token_ids":null}]%s}\n\n'
    )

    def head(self, choices: int, usage: ReportedUsage | None) -> bytes:
        """A role chunk for each choice."""
        return b"".join(
            self._open + b',"choices":[{"index":%d,"delta":{"role":"assistant","content":""},'
            b'"logprobs":null,"finish_reason":null}],"prompt_token_ids":null%s}\n\n'
            % (choice, _inline(usage))
            for choice in range(choices)
        )

    def _choice(self, index: int, part: FinishedSequence) -> dict[str, Any]:
        return {
            "index": index,
            "message": {
                "role": "assistant",
                "content": part.text,
                "refusal": None,
                "annotations": None,
                "audio": None,
                "function_call": None,
                "tool_calls": [],
                "reasoning": None,
            },
            "logprobs": None,
            "finish_reason": part.finish_reason,
            "stop_reason": None,
            "token_ids": None,
        }


class Completions(OpenAIStream):
    """/v1/completions."""

    _kind = _chunk_kind = "text_completion"
    _token = (
        b',"choices":[{"index":%d,"text":%s,"logprobs":null,"finish_reason":null,'
        b'"stop_reason":null,"token_ids":null}]%s}\n\n'
    )
    _last = (
        b',"choices":[{"index":%d,"text":%s,"logprobs":null,"finish_reason":"%s",'
        b'"stop_reason":null,"token_ids":null}]%s}\n\n'
    )

    def _choice(self, index: int, part: FinishedSequence) -> dict[str, Any]:
        return {
            "index": index,
            "text": part.text,
            "logprobs": None,
            "finish_reason": part.finish_reason,
            "stop_reason": None,
            "prompt_logprobs": None,
        }
