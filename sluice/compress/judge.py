"""Compare a model's answers to the compressed prompt with its answers to the full prompt.

Each sample asks both and compares the answers word by word. Comparing the full prompt's own
answers with one another shows how much of the difference is the model's randomness.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import httpx

AGREE_F1: Final = 0.6
"""Least word F1 at which answers agree; an answer that contains the other agrees too."""
_Z: Final = 1.959964
_WORD: Final = re.compile(r"\w+")
Messages = Sequence[Mapping[str, Any]]


class JudgeError(Exception):
    """The model could not be asked."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """Agreement over the samples, with a 95 % interval (Wilson)."""

    samples: int
    agreed: int
    low: float
    high: float
    self_agreement: float | None
    """Share of successive answers to the full prompt that agree; None with one sample."""
    full_tokens: int
    compressed_tokens: int
    """Prompt tokens as the engine reports them; 0 if it reports none."""
    answers: tuple[tuple[str, str], ...]
    """Each sample's answers to the full and to the compressed prompt."""

    @property
    def agreement(self) -> float:
        """Share of samples that agree."""
        return self.agreed / self.samples


def judge(
    ask: Callable[[Messages, int], tuple[str, int]],
    full: Messages,
    compressed: Messages,
    samples: int,
) -> Agreement:
    """Ask both prompts `samples` times; `ask` takes messages and a seed, gives text and tokens."""
    answers = []
    tokens = (0, 0)
    for seed in range(samples):
        (whole, before), (part, after) = ask(full, seed), ask(compressed, seed)
        answers.append((whole, part))
        tokens = (before, after)
    agreed = sum(agree(whole, part) for whole, part in answers)
    low, high = wilson(agreed, samples)
    own = [agree(a, b) for (a, _), (b, _) in pairwise(answers)]
    return Agreement(
        samples=samples,
        agreed=agreed,
        low=low,
        high=high,
        self_agreement=sum(own) / len(own) if own else None,
        full_tokens=tokens[0],
        compressed_tokens=tokens[1],
        answers=tuple(answers),
    )


def agree(first: str, second: str) -> bool:
    """Whether two answers agree, by their words."""
    a, b = _WORD.findall(first.lower()), _WORD.findall(second.lower())
    if not a or not b:
        return a == b
    shared = sum((Counter(a) & Counter(b)).values())
    return shared == min(len(a), len(b)) or 2 * shared / (len(a) + len(b)) >= AGREE_F1


def wilson(hits: int, total: int) -> tuple[float, float]:
    """95 % interval of a share (Wilson, 1927)."""
    share, square = hits / total, _Z * _Z
    middle = (share + square / (2 * total)) / (1 + square / total)
    half = (
        _Z / (1 + square / total) * math.sqrt(share * (1 - share) / total + square / (4 * total**2))
    )
    return max(middle - half, 0.0), min(middle + half, 1.0)


def asker(
    client: httpx.Client, base_url: str, model: str | None, key: str | None, temperature: float
) -> Callable[[Messages, int], tuple[str, int]]:
    """A function that asks an OpenAI-compatible server; `model` None takes the first it lists."""
    root = base_url.rstrip("/")
    headers = {"authorization": f"Bearer {key}"} if key else {}
    chosen = model or _first_model(client, root, headers)

    def ask(messages: Messages, seed: int) -> tuple[str, int]:
        body = {
            "model": chosen,
            "messages": list(messages),
            "temperature": temperature,
            "seed": seed,
        }
        answer = _json(client, "POST", f"{root}/chat/completions", headers, body)
        try:
            text = answer["choices"][0]["message"]["content"] or ""
            usage = answer.get("usage") or {}
            return str(text), int(usage.get("prompt_tokens") or 0)
        except (LookupError, TypeError, AttributeError, ValueError) as error:
            raise JudgeError(f"{root} gave no chat completion: {error!r}") from None

    return ask


def _first_model(client: httpx.Client, root: str, headers: dict[str, str]) -> str:
    found = _json(client, "GET", f"{root}/models", headers, None)
    try:
        return str(found["data"][0]["id"])
    except (LookupError, TypeError) as error:
        raise JudgeError(f"{root}/models lists no model; name one with --model") from error


def _json(
    client: httpx.Client, method: str, url: str, headers: dict[str, str], body: object
) -> dict[str, Any]:
    try:
        response = client.request(method, url, headers=headers, json=body)
        response.raise_for_status()
        found: dict[str, Any] = response.json()
    except httpx.HTTPStatusError as error:
        text = error.response.text[:200]
        raise JudgeError(f"{url} answered {error.response.status_code}: {text}") from None
    except (httpx.HTTPError, ValueError) as error:
        raise JudgeError(f"{url}: {error}") from None
    return found
