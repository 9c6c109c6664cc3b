"""Texts that are hard to split; each must quickly fit or be refused."""

import json
import time
from dataclasses import dataclass

import compressor

_BYTES = 50_000


@dataclass(frozen=True, slots=True)
class TextOutcome:
    """What became of one text."""

    name: str
    outcome: str
    holds: bool
    ms: float


def texts() -> dict[str, str]:
    """About 50 KB each."""
    seeds = {
        "no punctuation": "word ",
        "one sentence": "clause, ",
        "one word": "a",
        "stops": ". ",
        "blank lines": "a\n\n",
        "brackets": "[",
        "open JSON": '{"a":',
        "fences": "```\n",
        "RST headings": "Title\n~~~~~\nA line of text.\n",
        "rules": "-|-\n",
        "headers": "[1] A\n",
        "emoji": "👨‍👩‍👧‍👦",
        "combining marks": "e\u0301a\u0308 ",
        "lone surrogates": "text \ud83d more. ",
        "Thai": "ภาษาไทยเขียนติดกัน",
    }
    found = {
        name: seed * (_BYTES // len(seed.encode("utf-8", "surrogatepass")))
        for name, seed in seeds.items()
    }
    found["minified JSON"] = json.dumps({f"k{i}": i for i in range(4000)}, separators=(",", ":"))
    return found


def hostile() -> list[TextOutcome]:
    """Each text cut to 70 % of its bytes, a question after it."""
    return [_tried(name, text) for name, text in texts().items()]


def _tried(name: str, text: str) -> TextOutcome:
    messages = [{"role": "user", "content": f"{text}\n\nQuestion: What does it say?"}]
    size = len(text.encode("utf-8", "surrogatepass"))
    started = time.perf_counter()
    found = compressor.compress(messages, int(size * 0.7), 1.0, safety=1.0, when="any")
    ms = 1000 * (time.perf_counter() - started)
    if isinstance(found, compressor.Refused):
        return TextOutcome(name, found.reason, True, ms)
    after = found.messages[0]["content"]
    kept = len(after.encode("utf-8", "surrogatepass"))
    holds = 0.5 * found.budget_bytes <= kept <= found.budget_bytes
    return TextOutcome(name, f"{100 * found.cut:.0f} % cut", holds, ms)
