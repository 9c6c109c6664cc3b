"""Formats with named events: /v1/responses (OpenAI) and /v1/messages (Anthropic)."""

from typing import Any

from simulator.mock_server.api.dialects import FinishedSequence, ReportedUsage, StreamDialect, dumps
from simulator.mock_server.api.requests import Body


def _named_event(data: dict[str, Any]) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (str(data["type"]).encode(), dumps(data))


class Responses(StreamDialect):
    """/v1/responses: one output message with one text part."""

    def __init__(self, request_id: str, model: str, created: int, body: Body) -> None:
        self._item_id = "msg_" + request_id.removeprefix("resp_")
        self._number = 0
        self._response: dict[str, Any] = {
            "id": request_id,
            "object": "response",
            "created_at": created,
            "model": model,
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "instructions": body.get("instructions"),
            "max_output_tokens": body.get("max_output_tokens"),
            "metadata": body.get("metadata"),
            "output": [],
            "parallel_tool_calls": True,
            "previous_response_id": body.get("previous_response_id"),
            "temperature": body.get("temperature", 1.0),
            "text": {"format": {"type": "text"}},
            "tool_choice": "auto",
            "tools": [],
            "top_p": body.get("top_p", 1.0),
            "truncation": "disabled",
            "usage": None,
        }
        self._open = (
            b"event: response.output_text.delta\n"
            b'data: {"type":"response.output_text.delta","item_id":"%s","output_index":0,'
            b'"content_index":0,"logprobs":[],"delta":' % self._item_id.encode()
        )

    def _send(self, kind: str, **fields: Any) -> bytes:
        number, self._number = self._number, self._number + 1
        return _named_event({"type": kind, "sequence_number": number, **fields})

    def _item(self, text: str | None) -> dict[str, Any]:
        return {
            "id": self._item_id,
            "type": "message",
            "role": "assistant",
            "status": "in_progress" if text is None else "completed",
            "content": [] if text is None else [_text_part(text)],
        }

    def head(self, choices: int, usage: ReportedUsage | None) -> bytes:
        """Events before the first delta."""
        part = {"item_id": self._item_id, "output_index": 0, "content_index": 0}
        return b"".join(
            (
                self._send("response.created", response=self._response),
                self._send("response.in_progress", response=self._response),
                self._send("response.output_item.added", output_index=0, item=self._item(None)),
                self._send("response.content_part.added", **part, part=_text_part("")),
            )
        )

    def token(self, choice: int, piece: bytes, usage: ReportedUsage | None = None) -> bytes:
        """A delta event."""
        number, self._number = self._number, self._number + 1
        return self._open + b'%s,"sequence_number":%d}\n\n' % (piece, number)

    def last(
        self, choice: int, piece: bytes, reason: str, usage: ReportedUsage | None = None
    ) -> bytes:
        """Same as any other delta: the reason comes in the tail."""
        return self.token(choice, piece)

    def tail(
        self, parts: list[FinishedSequence], usage: ReportedUsage | None, *, done: bool
    ) -> bytes:
        """The done events and response.completed."""
        text = parts[0].text
        part = {"item_id": self._item_id, "output_index": 0, "content_index": 0}
        out = [
            self._send("response.output_text.done", **part, text=text, logprobs=[]),
            self._send("response.content_part.done", **part, part=_text_part(text)),
            self._send("response.output_item.done", output_index=0, item=self._item(text)),
        ]
        if done:
            final = self._final(parts, usage)
            out.append(self._send("response.completed", response=final))
        return b"".join(out)

    def whole(self, parts: list[FinishedSequence], usage: ReportedUsage | None) -> bytes:
        """The response object."""
        return dumps(self._final(parts, usage))

    def _final(self, parts: list[FinishedSequence], usage: ReportedUsage | None) -> dict[str, Any]:
        cut = parts[0].finish_reason == "length"
        return {
            **self._response,
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": [self._item(parts[0].text)],
            "usage": None if usage is None else usage.responses(),
        }


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


class Messages(StreamDialect):
    """/v1/messages."""

    usage_in_head = True

    def __init__(self, request_id: str, model: str) -> None:
        self._message: dict[str, Any] = {
            "id": request_id,
            "type": "message",
            "role": "assistant",
            "content": [],
            "model": model,
            "stop_reason": None,
            "stop_sequence": None,
        }

    def head(self, choices: int, usage: ReportedUsage | None) -> bytes:
        """Events before the first delta."""
        message = {**self._message, "usage": _anthropic_usage(usage)}
        block = {"type": "text", "text": ""}
        return _named_event({"type": "message_start", "message": message}) + _named_event(
            {"type": "content_block_start", "index": 0, "content_block": block}
        )

    def token(self, choice: int, piece: bytes, usage: ReportedUsage | None = None) -> bytes:
        """A delta event."""
        return (
            b"event: content_block_delta\n"
            b'data: {"type":"content_block_delta","index":0,'
            b'"delta":{"type":"text_delta","text":%s}}\n\n' % piece
        )

    def last(
        self, choice: int, piece: bytes, reason: str, usage: ReportedUsage | None = None
    ) -> bytes:
        """Same as any other delta: the reason comes in the tail."""
        return self.token(choice, piece)

    def tail(
        self, parts: list[FinishedSequence], usage: ReportedUsage | None, *, done: bool
    ) -> bytes:
        """The reason and the usage, then message_stop."""
        delta = {"stop_reason": _stop_reason(parts[0]), "stop_sequence": None}
        out = _named_event({"type": "content_block_stop", "index": 0}) + _named_event(
            {"type": "message_delta", "delta": delta, "usage": _anthropic_usage(usage)}
        )
        return out + _named_event({"type": "message_stop"}) if done else out

    def whole(self, parts: list[FinishedSequence], usage: ReportedUsage | None) -> bytes:
        """The message object."""
        return dumps(
            {
                **self._message,
                "content": [{"type": "text", "text": parts[0].text}],
                "stop_reason": _stop_reason(parts[0]),
                "usage": _anthropic_usage(usage),
            }
        )


def _anthropic_usage(usage: ReportedUsage | None) -> dict[str, Any]:
    """Clients require the object; without usage it is empty."""
    return {} if usage is None else usage.anthropic()


def _stop_reason(part: FinishedSequence) -> str:
    return "max_tokens" if part.finish_reason == "length" else "end_turn"
