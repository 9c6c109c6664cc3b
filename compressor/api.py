"""The public calls, one for each kind of body.

All take the token budget of the prompt and the bytes per token of its kind, and return the same
structure with less text, or a refusal. They are pure and deterministic, read no clock and keep
nothing between calls but tables; arguments and results can be pickled, for workers.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast, get_args

from compressor.extraction.extract import Counter, ExtractLimits, extract, size_bytes
from compressor.extraction.task import When
from compressor.messages import (
    PromptText,
    all_texts,
    read_anthropic,
    read_chat,
    read_prompt,
    read_responses,
    written,
)
from compressor.result import Body, Compressed, Reason, Refused
from compressor.scoring.score import PROFILES, Profile
from compressor.text.chars import hash_table, tables
from compressor.text.lexicon import ABBREVIATIONS, ASKING_WORDS, STOP_WORDS

SAFETY = 0.83
"""Share of the budget used if tokens are not counted; covers English, code and CJK as measured."""
MAX_CUT = 0.5
_CODE: dict[str, Reason] = {"code": "code", "json": "json"}


def compress(
    messages: Sequence[Mapping[str, Any]],
    budget_tokens: int,
    bytes_per_token: float,
    *,
    profile: Profile = "default",
    exact_counter: Counter | None = None,
    max_cut: float = MAX_CUT,
    safety: float = SAFETY,
    category: str | None = None,
    fixed_tokens: int = 0,
    when: When = "asked",
    mark: bool = True,
    tools: bool = False,
) -> Compressed[list[dict[str, Any]]] | Refused:
    """Compress OpenAI chat messages to `budget_tokens`, or say why not.

    `bytes_per_token` is the mean of the prompt's kind; the factor `safety` (0-1] allows for prompts
    that differ from it. With `exact_counter`, which counts a text's tokens, nothing is estimated.
    `max_cut` [0, 1) is the largest share of the estimated tokens that may be removed. `category` is
    the caller's knowledge of the prompt: `code` and `json` are refused. `fixed_tokens` are those
    that are no text here: chat template, tool definitions, images. `when`: `asked` compresses only
    a question over retrieved passages (`compressor.extraction.task`), `any` other tasks as well.
    `mark` puts `[...]` where text was cut. `tools`: the request defines tools; without, their
    results are never cut.
    """
    limits = _limits(
        budget_tokens - fixed_tokens,
        bytes_per_token,
        safety,
        max_cut,
        profile,
        exact_counter,
        when,
        mark=mark,
    )
    return _answered(
        cast("list[dict[str, Any]]", messages), partial(read_chat, tools=tools), limits, category
    )


def compress_prompt(
    prompt: str | Sequence[int],
    budget_tokens: int,
    bytes_per_token: float,
    *,
    profile: Profile = "default",
    exact_counter: Counter | None = None,
    max_cut: float = MAX_CUT,
    safety: float = SAFETY,
    category: str | None = None,
    fixed_tokens: int = 0,
    when: When = "asked",
    mark: bool = True,
) -> Compressed[str] | Refused:
    """Compress one completions prompt; arguments as for `compress`. Token ids are refused."""
    limits = _limits(
        budget_tokens - fixed_tokens,
        bytes_per_token,
        safety,
        max_cut,
        profile,
        exact_counter,
        when,
        mark=mark,
    )
    if not isinstance(prompt, str):
        return Refused("token_ids", "the prompt is no text", 0, limits.budget_bytes)
    return _answered(prompt, read_prompt, limits, category)


def compress_responses(
    request: Mapping[str, Any],
    budget_tokens: int,
    bytes_per_token: float,
    *,
    profile: Profile = "default",
    exact_counter: Counter | None = None,
    max_cut: float = MAX_CUT,
    safety: float = SAFETY,
    category: str | None = None,
    fixed_tokens: int = 0,
    when: When = "asked",
    mark: bool = True,
) -> Compressed[dict[str, Any]] | Refused:
    """Compress a responses request: `instructions` and `input`; arguments as for `compress`."""
    limits = _limits(
        budget_tokens - fixed_tokens,
        bytes_per_token,
        safety,
        max_cut,
        profile,
        exact_counter,
        when,
        mark=mark,
    )
    return _answered(cast("dict[str, Any]", request), read_responses, limits, category)


def compress_anthropic(
    request: Mapping[str, Any],
    budget_tokens: int,
    bytes_per_token: float,
    *,
    profile: Profile = "default",
    exact_counter: Counter | None = None,
    max_cut: float = MAX_CUT,
    safety: float = SAFETY,
    category: str | None = None,
    fixed_tokens: int = 0,
    when: When = "asked",
    mark: bool = True,
) -> Compressed[dict[str, Any]] | Refused:
    """Compress an Anthropic request: `system` and `messages`; arguments as for `compress`."""
    limits = _limits(
        budget_tokens - fixed_tokens,
        bytes_per_token,
        safety,
        max_cut,
        profile,
        exact_counter,
        when,
        mark=mark,
    )
    return _answered(cast("dict[str, Any]", request), read_anthropic, limits, category)


def warm() -> None:
    """Build tables and run every step once, so that the first prompt is as fast as later ones."""
    tables()
    for words in (STOP_WORDS, ASKING_WORDS, ABBREVIATIONS):
        hash_table(words)
    text = "".join(f"[{i}] Passage {i} says {i} things. It is one of many.\n\n" for i in range(40))
    compress([{"role": "user", "content": text + "What does passage 7 say?"}], 300, 4.0)


def _limits(
    tokens: int,
    bytes_per_token: float,
    safety: float,
    max_cut: float,
    profile: Profile,
    counter: Counter | None,
    when: When,
    *,
    mark: bool,
) -> ExtractLimits:
    if not bytes_per_token > 0:
        raise ValueError("bytes_per_token must be above 0")
    if not 0 < safety <= 1:
        raise ValueError("safety must be above 0 and at most 1")
    if not 0 <= max_cut < 1:
        raise ValueError("max_cut must be at least 0 and below 1")
    if profile not in PROFILES:
        raise ValueError(f"unknown profile {profile!r}; there are {', '.join(PROFILES)}")
    if when not in get_args(When):
        raise ValueError(f"unknown when {when!r}; there are {', '.join(get_args(When))}")
    return ExtractLimits(tokens, bytes_per_token, safety, max_cut, profile, counter, when, mark)


def _answered(
    body: Body, read: Callable[[Body], PromptText], limits: ExtractLimits, category: str | None
) -> Compressed[Body] | Refused:
    """Read, extract and write back; the result has the type of the caller's body."""
    try:
        prompt = read(body)
    except (AttributeError, TypeError, ValueError, RecursionError) as error:
        return Refused("malformed", f"the body is not what it should be: {error}", 0, 0)
    if reason := _CODE.get(category or ""):
        before = sum(map(size_bytes, all_texts(prompt)))
        return Refused(reason, f"the caller's category is {category}", before, limits.budget_bytes)
    found = extract(prompt, limits)
    if isinstance(found, Refused):
        return found
    return Compressed(
        body=written(body, found.texts),
        profile=limits.profile,
        bytes_before=found.bytes_before,
        bytes_after=found.bytes_after,
        budget_bytes=limits.budget_bytes,
        tokens_after=found.tokens_after,
        question=found.question,
        trace=found.trace,
    )
