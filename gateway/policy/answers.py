"""What is read of an engine's whole answer: a few members, all others are skipped."""

from typing import Annotated, Any, Final

import msgspec


class _Choice(msgspec.Struct):
    finish_reason: Any = None


class _Answer(msgspec.Struct):
    """The few members read of a whole answer; all others are skipped."""

    usage: Any = None
    choices: list[_Choice] | None = None
    id: Any = None
    stop_reason: Any = None
    status: Any = None


_Count = Annotated[int, msgspec.Meta(ge=0)]


class _PlainDetails(msgspec.Struct):
    cached_tokens: _Count | None = None


class _PlainUsage(msgspec.Struct):
    prompt_tokens: _Count
    completion_tokens: _Count = 0
    prompt_tokens_details: _PlainDetails | None = None
    input_tokens_details: _PlainDetails | None = None
    cache_read_input_tokens: _Count | None = None


class _PlainChoice(msgspec.Struct):
    finish_reason: str | None = None


class _PlainAnswer(msgspec.Struct):
    """The same of nearly every answer, checked while it is decoded."""

    usage: _PlainUsage
    choices: Annotated[list[_PlainChoice], msgspec.Meta(min_length=1)]
    id: str | None = None


decode_answer: Final = msgspec.json.Decoder(_Answer).decode
decode_plain_answer: Final = msgspec.json.Decoder(_PlainAnswer).decode
