"""One compression: reads the task's body, cuts its text, and puts the new text back.

Runs in a worker process; pure except for reading tokenizers. Rules:
- Only the cut strings are rewritten, in place in the client's own bytes: white space, number
  spellings, escapes and unknown members stay as they are.
- The same task gives the same bytes in every process.
- No body makes it raise: a body that cannot be compressed gives a result with a reason.
"""

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from traceback import walk_tb
from typing import Any, Final

import msgspec
from msgspec import UNSET, Struct

from compressor import (
    Refused,
    compress,
    compress_anthropic,
    compress_prompt,
    compress_responses,
    load_counter,
)
from compressor.result import Result
from gateway.errors import BadRequest
from gateway.payload.members import locate
from gateway.ports import CompressResult, CompressTask

Counter = Callable[[str], int]

_log = logging.getLogger("sluice.compress_work")


class _Members(Struct):
    """What may hold text, of all endpoints."""

    messages: Any = UNSET
    prompt: Any = UNSET
    instructions: Any = UNSET
    input: Any = UNSET
    system: Any = UNSET


_decode: Final = msgspec.json.Decoder(_Members).decode
_NAMES: Final[Mapping[str, Sequence[str]]] = {
    "chat": ("messages",),
    "completions": ("prompt",),
    "responses": ("instructions", "input"),
    "messages": ("system", "messages"),
}
"""Those of an endpoint."""
_ELEMENTS: Final = msgspec.json.Decoder(list[msgspec.Raw])
_BETWEEN: Final = re.compile(rb"[ \t\n\r,]*+")
_OPENING: Final = re.compile(rb"[ \t\n\r]*+\[")


@cache
def counter_of(path: str) -> Counter | None:
    """The exact counter of a tokenizer.json, which is loaded once; None if it cannot be.

    With None the budget is estimated, with a margin.
    """
    try:
        return load_counter(Path(path))
    except (ImportError, ValueError) as error:
        _log.warning("tokens are estimated, not counted: %s", error)
        return None


def work(task: CompressTask) -> CompressResult:
    """Compress the task's body, or give the reason why not; never raises.

    `tokens_after` covers the whole prompt: its counted texts plus `fixed_tokens`.
    """
    try:
        return _work(task)
    except (msgspec.DecodeError, UnicodeError, RecursionError, BadRequest):
        return CompressResult(reason="malformed")
    except Exception as error:  # noqa: BLE001 - one body must not end the worker for all others
        # Neither message nor traceback is logged: they may quote the prompt.
        *_, (frame, line) = walk_tb(error.__traceback__)
        what, where = type(error).__name__, frame.f_code.co_filename
        _log.error("a prompt could not be compressed: %s at %s:%d", what, where, line)
        return CompressResult(reason="failed")


def rewritten(raw: bytes, old: Any, new: Any) -> bytes:
    """Replace in the JSON `raw`, which decodes to `old`, the strings that differ in `new`.

    `old` and `new` have the same structure. Unchanged values are the same objects, and `new` may
    omit unchanged members. Without changes, returns `raw` itself. Raises msgspec.ValidationError
    if an object on the path to a changed string repeats a name, which makes it ambiguous.
    """
    if isinstance(new, str):
        return msgspec.json.encode(new)
    named = isinstance(new, dict)
    changed = {
        key
        for key in (list(new) if named else range(len(new)))
        if old[key] is not new[key] and not (isinstance(new[key], str) and old[key] == new[key])
    }
    if not changed:
        return raw
    places: list[tuple[Any, int, int]] = []
    if named:
        members = locate(raw)
        if len({member.name for member in members}) < len(members):
            raise msgspec.ValidationError("a name is repeated")
        places += ((name, start, end) for name, _, start, end in members)
    else:
        opening = _OPENING.match(raw)
        if opening is None:
            raise ValueError("not a JSON array")
        end = opening.end()
        for index, element in enumerate(_ELEMENTS.decode(raw)):
            start = _BETWEEN.match(raw, end).end()  # type: ignore[union-attr]  # or of nothing
            end = start + len(element)
            places.append((index, start, end))
    pieces: list[bytes] = []
    at = 0
    for key, start, end in places:
        if key in changed:
            changed.remove(key)
            pieces += (raw[at:start], rewritten(raw[start:end], old[key], new[key]))
            at = end
    if changed:
        raise ValueError("the places of changed strings were not found")
    pieces.append(raw[at:])
    return b"".join(pieces)


def _work(task: CompressTask) -> CompressResult:
    body, names = _decode(task.body), _NAMES[task.endpoint]
    old = {name: value for name in names if (value := getattr(body, name)) is not UNSET}
    call: Callable[..., Result]
    given: Any = old
    if task.endpoint == "chat":
        call, given = compress, old.get("messages")
    elif task.endpoint == "completions":
        texts: Any = old.get("prompt")
        texts = [texts] if isinstance(texts, str) else texts
        if not isinstance(texts, list):
            return CompressResult(reason="malformed")
        if len(texts) != 1 or not isinstance(texts[0], str):
            ids = any(not isinstance(text, str) for text in texts)
            none = "no_text" if not texts else "several_prompts"
            return CompressResult(reason="token_ids" if ids else none)
        call, given = compress_prompt, texts[0]
    else:
        call = compress_responses if task.endpoint == "responses" else compress_anthropic
    result = call(
        given,
        task.budget_tokens,
        task.bytes_per_token,
        exact_counter=None if task.tokenizer is None else counter_of(task.tokenizer),
        max_cut=task.max_cut,
        category=task.category,
        fixed_tokens=task.fixed_tokens,
        when=task.when,
        mark=task.mark,
    )
    if isinstance(result, Refused):
        return CompressResult(reason=result.reason, text_bytes_before=result.bytes_before)
    new, tokens = result.body, result.tokens_after
    if task.endpoint == "chat":
        new = {"messages": new}
    elif task.endpoint == "completions":
        new = {"prompt": new if isinstance(old["prompt"], str) else [new]}
    return CompressResult(
        body=rewritten(task.body, old, new),
        text_bytes_before=result.bytes_before,
        text_bytes_after=result.bytes_after,
        tokens_after=None if tokens is None else tokens + task.fixed_tokens,
    )
