"""Input of `sluice compress`: a text, chat messages, or a request to any endpoint."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from compressor import Compressed, Refused

Kind = Literal["chat", "completions", "responses", "messages"]
_TEXTS = ("text", "input_text", "output_text")


@dataclass(frozen=True, slots=True)
class Given:
    """A prompt in the form of its endpoint."""

    kind: Kind
    body: Any
    """chat: messages; completions: the text; responses and messages: the members of the request
    that hold text.
    """
    plain: bool = False
    """Whether the input was a text, with or without a question; it is the only message."""

    def compressor(self) -> Callable[..., "Compressed[Any] | Refused"]:
        """The compressor's function for this body."""
        import compressor

        by_kind: Mapping[Kind, Callable[..., Compressed[Any] | Refused]] = {
            "chat": compressor.compress,
            "completions": compressor.compress_prompt,
            "responses": compressor.compress_responses,
            "messages": compressor.compress_anthropic,
        }
        return by_kind[self.kind]


def given_of(text: str, question: str | None) -> Given:
    """Parse the prompt in `text` and add a question; raises ValueError saying what to change."""
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    given = _request(found)
    if given is None:
        chat = _is_chat(found)
        messages = found if chat else [{"role": "user", "content": text}]
        given = Given("chat", messages, plain=not chat)
    if not question:
        return given
    if given.kind != "chat":
        raise ValueError("--question is for a text or chat messages; this request has its own")
    return Given("chat", _asked(given.body, question), plain=given.plain)


def as_chat(kind: Kind, body: Any) -> list[dict[str, Any]]:
    """The body's text as chat messages for a judge, since every engine has that endpoint."""
    if kind == "chat":
        return list(body)
    if kind == "completions":
        return [{"role": "user", "content": body}]
    first = body.get("instructions" if kind == "responses" else "system")
    rest = body.get("input" if kind == "responses" else "messages")
    chat = [{"role": "system", "content": _flat(first)}] if first else []
    if isinstance(rest, str):
        return [*chat, {"role": "user", "content": rest}]
    turns = [turn for turn in rest if isinstance(turn, dict) and "role" in turn]
    return [*chat, *({"role": t["role"], "content": _flat(t.get("content"))} for t in turns)]


def _request(found: object) -> Given | None:
    """A request's prompt; None if the value is no request."""
    if not isinstance(found, dict):
        return None
    if _is_chat(found.get("messages")):
        if "system" in found:
            return Given("messages", {k: found[k] for k in ("system", "messages")})
        return Given("chat", found["messages"])
    if isinstance(found.get("input"), str | list):
        return Given("responses", {k: found[k] for k in ("instructions", "input") if k in found})
    if isinstance(found.get("prompt"), str):
        return Given("completions", found["prompt"])
    return None


def _is_chat(found: object) -> bool:
    return isinstance(found, list) and all(isinstance(m, dict) and "role" in m for m in found)


def _asked(messages: list[dict[str, Any]], question: str) -> list[dict[str, Any]]:
    last = messages[-1] if messages else {}
    if isinstance(last.get("content"), str) and last["role"] == "user":
        joined = f"{last['content'].rstrip()}\n\nQuestion: {question}"
        return [*messages[:-1], {**last, "content": joined}]
    return [*messages, {"role": "user", "content": question}]


def _flat(content: object) -> str:
    """The text of a content that may consist of parts."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    texts = [p.get("text", "") for p in parts if isinstance(p, dict) and p.get("type") in _TEXTS]
    return "\n\n".join(texts)
