"""Read texts from the four endpoints' bodies and write them back; structure never changes.

Rules:
- Every text the engine sees is a slot (it may be extracted from) or fixed (it stays).
- Fixed: names and arguments of calls, refusals, reasoning, unknown items.
- Parts that are not text (images, audio, files) cost nothing here: the caller's
  `fixed_tokens` includes them.
- A turn begins with each user message that follows another role's.
- Some bodies promise more than their words: the client or a cache relies on every byte, or the
  model continues the last message. `PromptText.promise` names the first such promise.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, cast

Path = tuple[str | int, ...]

SYSTEM_ROLES: Final = frozenset({"system", "developer"})
TOOL_ROLES: Final = frozenset({"tool", "function"})
_TEXT_PARTS: Final = frozenset({"text", "input_text", "output_text"})
_OTHER_TEXT: Final = ("refusal", "reasoning_content", "reasoning", "name", "annotations", "audio")
"""Fixed fields of a message, besides its content and calls."""
_MEDIA_PARTS: Final = frozenset(
    {
        *("image_url", "input_image", "image", "input_audio", "audio", "audio_url", "video"),
        *("video_url", "file", "input_file", "document", "container_upload", "image_file"),
    }
)


Promise = Literal["prefill", "cache_control", "tool_results"]
"""prefill: the model continues the last message. cache_control: a cache holds the texts up to a
mark. tool_results: without definitions of tools, their results are all that the model knows."""


@dataclass(frozen=True, slots=True)
class Slot:
    """One text, its place in the body, and its message's role."""

    path: Path
    role: str
    text: str
    turn: int
    """0 for the first user message and everything before the second."""


@dataclass(slots=True)
class PromptText:
    """All text of a body, in order."""

    slots: list[Slot] = field(default_factory=list)
    fixed: list[str] = field(default_factory=list)
    turn: int = -1
    role: str = ""
    """Of the latest message."""
    promise: Promise | None = None
    """Why the texts must not change, whatever they say."""

    def begin(self, role: str) -> None:
        """Start a message of `role`."""
        self.turn += role == "user" and self.role != "user"
        self.role = role

    def promised(self, promise: Promise) -> None:
        """Note a promise; the first one stays."""
        self.promise = self.promise or promise

    def add(self, path: Path, role: str, text: str) -> None:
        """Add a text that may be extracted from."""
        self.slots.append(Slot(path, role, text, max(self.turn, 0)))

    def keep(self, *values: object) -> None:
        """Add text that stays: strings unchanged, anything else as compact JSON."""
        for value in values:
            if isinstance(value, str):
                self.fixed.append(value)
            elif value is not None:
                self.fixed.append(json.dumps(value, ensure_ascii=False, separators=(",", ":")))


def read_prompt(text: str) -> PromptText:
    """A completions prompt: one user message."""
    prompt = PromptText(turn=0)
    prompt.add((), "user", text)
    return prompt


def read_chat(messages: Sequence[Mapping[str, Any]], *, tools: bool = False) -> PromptText:
    """OpenAI chat messages; `tools`: the request defines tools."""
    prompt = PromptText()
    for index, message in enumerate(messages):
        role = str(message.get("role", "user"))
        prompt.begin(role)
        if role in TOOL_ROLES and not tools:
            prompt.promised("tool_results")
        if message.get("cache_control"):
            prompt.promised("cache_control")
        _content(prompt, (index, "content"), role, message.get("content"))
        prompt.keep(*(message.get(name) for name in _OTHER_TEXT))
        for call in message.get("tool_calls") or ():
            function = call.get("function") or call.get("custom") or {}
            prompt.keep(function.get("name"), function.get("arguments"), function.get("input"))
        if call := message.get("function_call"):
            prompt.keep(call.get("name"), call.get("arguments"))
    _continued(prompt, messages[-1] if messages else {})
    return prompt


def _continued(prompt: PromptText, last: Mapping[str, Any]) -> None:
    """Note a last message of the assistant's, which the model is to continue."""
    if last.get("role") == "assistant" and last.get("content"):
        prompt.promised("prefill")


def read_anthropic(request: Mapping[str, Any]) -> PromptText:
    """`system` and `messages` of an Anthropic request; `tools` if it defines some."""
    prompt = PromptText()
    if request.get("cache_control"):
        prompt.promised("cache_control")
    _content(prompt, ("system",), "system", request.get("system"))
    for index, message in enumerate(request.get("messages") or ()):
        role, content = str(message.get("role", "user")), message.get("content")
        results = isinstance(content, list) and any(
            part.get("type") == "tool_result" for part in content
        )
        # Tool results arrive as user messages and begin no turn.
        prompt.begin("tool" if results else role)
        if results and not request.get("tools"):
            prompt.promised("tool_results")
        _content(prompt, ("messages", index, "content"), role, content)
    _continued(prompt, (request.get("messages") or [{}])[-1])
    return prompt


def read_responses(request: Mapping[str, Any]) -> PromptText:
    """`instructions` and `input` of a responses request; `tools` if it defines some."""
    prompt = PromptText()
    _content(prompt, ("instructions",), "system", request.get("instructions"))
    given = request.get("input")
    if isinstance(given, str):
        prompt.begin("user")
        prompt.add(("input",), "user", given)
        return prompt
    for index, item in enumerate(given or ()):
        kind = item.get("type", "message")
        if kind == "message":
            role = str(item.get("role", "user"))
            prompt.begin(role)
            _content(prompt, ("input", index, "content"), role, item.get("content"))
        elif kind.endswith("_call_output"):
            if not request.get("tools"):
                prompt.promised("tool_results")
            prompt.begin("tool")
            _content(prompt, ("input", index, "output"), "tool", item.get("output"))
        elif kind.endswith("_call"):
            prompt.keep(item.get("name"), item.get("arguments"), item.get("input"))
        elif kind != "item_reference":
            prompt.keep(item)
    _continued(prompt, (given or [{}])[-1])
    return prompt


def _content(prompt: PromptText, path: Path, role: str, content: object) -> None:
    if isinstance(content, str):
        prompt.add(path, role, content)
        return
    for index, part in enumerate(content if isinstance(content, list) else ()):
        if isinstance(part, str):
            prompt.add((*path, index), role, part)
        elif isinstance(part, Mapping):
            _part(prompt, (*path, index), role, part)


def _part(prompt: PromptText, path: Path, role: str, part: Mapping[str, Any]) -> None:
    kind = part.get("type", "text")
    if part.get("cache_control"):
        prompt.promised("cache_control")
    if kind in _TEXT_PARTS and isinstance(part.get("text"), str):
        prompt.add((*path, "text"), role, part["text"])
    elif kind == "tool_result":
        _content(prompt, (*path, "content"), "tool", part.get("content"))
    elif kind in {"tool_use", "server_tool_use", "mcp_tool_use"}:
        prompt.keep(part.get("name"), part.get("input"))
    elif kind in {"thinking", "refusal"}:
        prompt.keep(part.get(kind))
    elif kind not in _MEDIA_PARTS:
        prompt.keep(part)


def written(body: Any, texts: Mapping[Path, str]) -> Any:
    """`body` with the texts at some paths replaced; unchanged parts are shared with it."""
    if not texts:
        return body
    if () in texts:
        return texts[()]
    below: dict[str | int, dict[Path, str]] = {}
    for path, text in texts.items():
        below.setdefault(path[0], {})[path[1:]] = text
    copied: Any = list(body) if isinstance(body, Sequence) else dict(body)
    for key, inner in below.items():
        copied[key] = written(copied[cast("Any", key)], inner)
    return copied


def all_texts(prompt: PromptText) -> Iterator[str]:
    """Every text that the engine sees."""
    yield from (slot.text for slot in prompt.slots)
    yield from prompt.fixed
