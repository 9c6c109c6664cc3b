"""Prompts with known answers, generated when the bench runs; deterministic.

English: passages of Python's own documentation, among them the sentence with the answer. Other
languages: the facts of `bench.compressor.languages`. Passages are separated in the ways that
retrieval does it, or only by blank lines.
"""

import importlib
import random
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import cycle
from pydoc_data.topics import topics
from typing import Any, Final, Literal

from bench.common.texts import ARABIC, CHINESE, HINDI, JAPANESE, RUSSIAN
from bench.compressor.languages import ENGLISH, HOPS, LANGUAGES, AskedSentence

Place = Literal["start", "middle", "end"]
PLACES: Final[tuple[Place, ...]] = ("start", "middle", "end")
Kind = Literal["qa", "multi-hop", "cross-lingual"]
Messages = list[dict[str, Any]]

_SYSTEM: Final = "Answer the question from the passages. Say so if they do not hold the answer."
_PASSAGE_CHARS: Final = (500, 1400)
PROMPT_CHARS: Final = (38_000, 52_000)
"""8K to 12K tokens of English."""
_FORMS: Final = ("number", "document", "tag", "heading", "blank")
_FILLER: Final = {
    "Chinese": CHINESE,
    "Japanese": JAPANESE,
    "Russian": RUSSIAN,
    "Arabic": ARABIC,
    "Hindi": HINDI,
}


@dataclass(frozen=True, slots=True)
class PromptCase:
    """A prompt, and the sentences it cannot be answered without."""

    kind: Kind
    language: str
    place: Place
    messages: Messages
    gold: tuple[str, ...]
    form: str
    """How its passages are separated."""


@dataclass(frozen=True, slots=True)
class Passage:
    """A titled text."""

    title: str
    text: str


def prompts() -> list[PromptCase]:
    """Every prompt: questions and answers in eight languages, multi-hop, cross-lingual."""
    return [*english(), *multi_hop(), *other_languages()]


def english(chars: tuple[int, int] = PROMPT_CHARS) -> list[PromptCase]:
    """Each English question with its passage at three places, among `chars` of others."""
    found = []
    rng = random.Random(1)
    forms = cycle(_FORMS)
    for asked in ENGLISH:
        located = _located(asked)
        if located is None:
            continue
        passage, gold = located
        for place in PLACES:
            others = _distractors(gold, rng, chars)
            wrap = rng.random() < 0.5
            form = next(forms)
            text = _laid_out([passage], others, place, form, asked.question, rng, wrap=wrap)
            messages = _messages(text, rng)
            found.append(PromptCase("qa", "English", place, messages, (gold,), form))
    return found


def multi_hop() -> list[PromptCase]:
    """Two passages are needed; the others' passages of the same kind stand between."""
    found = []
    rng = random.Random(2)
    forms = cycle(_FORMS)
    for hops in HOPS:
        near = [_fact(text) for other in HOPS if other is not hops for text in other[:2]]
        pairs = [_fact(hops.first), _fact(hops.second)]
        for place in PLACES:
            others = [*_distractors("", rng, PROMPT_CHARS), *(passage for passage, _ in near)]
            rng.shuffle(others)
            form = next(forms)
            text = _laid_out([p for p, _ in pairs], others, place, form, hops.question, rng)
            gold = tuple(sentence for _, sentence in pairs)
            messages = _messages(text, rng)
            found.append(PromptCase("multi-hop", "English", place, messages, gold, form))
    return found


def other_languages() -> list[PromptCase]:
    """Each fact asked for in its own language, and in English."""
    found = []
    rng = random.Random(3)
    forms = cycle(_FORMS)
    for language, facts in LANGUAGES.items():
        for fact in facts:
            passage, gold = _fact(fact.passage)
            others = [_fact(other.passage)[0] for other in facts if other is not fact]
            others += _filler(language, rng)
            for place in PLACES:
                rng.shuffle(others)
                form = next(forms)
                asked: tuple[tuple[Kind, str], ...] = (
                    ("qa", fact.question),
                    ("cross-lingual", fact.english),
                )
                for kind, question in asked:
                    text = _laid_out([passage], others, place, form, question, rng)
                    messages = _messages(text, rng)
                    found.append(PromptCase(kind, language, place, messages, (gold,), form))
    return found


def _filler(language: str, rng: random.Random) -> list[Passage]:
    """Passages of sentences that answer nothing."""
    sentences = list(_FILLER.get(language, ()))
    rng.shuffle(sentences)
    joiner = "" if language in {"Chinese", "Japanese"} else " "
    return [
        Passage(sentences[at][:8].strip(), joiner.join(sentences[at : at + 4]))
        for at in range(0, len(sentences) - 3, 4)
    ]


def _fact(text: str) -> tuple[Passage, str]:
    """The passage without its star, and the sentence that has it."""
    title, _, body = text.partition("|")
    at = body.index("*")
    stop = re.compile(r"[.।](?=\s|$)|。").search(body, at)
    end = stop.end() if stop else len(body)
    return Passage(title, body.replace("*", "")), body[at + 1 : end]


def _messages(text: str, rng: random.Random) -> Messages:
    messages = [{"role": "user", "content": text}]
    return [{"role": "system", "content": _SYSTEM}, *messages] if rng.random() < 0.5 else messages


def _laid_out(
    gold: list[Passage],
    others: list[Passage],
    place: Place,
    form: str,
    question: str,
    rng: random.Random,
    *,
    wrap: bool = False,
) -> str:
    """The user message: passages with the gold ones in a third of them, then the question."""
    third = len(others) / 3
    low = PLACES.index(place) * third
    passages = list(others)
    for passage in gold:
        passages.insert(int(low + rng.random() * third), passage)
    texts = []
    for number, passage in enumerate(passages, 1):
        text = _wrapped(passage.text) if wrap else passage.text
        texts.append(_headed(form, number, passage.title, text))
    return "\n\n".join([*texts, f"Question: {question}" if rng.random() < 0.5 else question])


def _headed(form: str, number: int, title: str, text: str) -> str:
    match form:
        case "number":
            return f"[{number}] {title}\n{text}"
        case "document":
            return f"Document [{number}](Title: {title}) {text}"
        case "tag":
            return f'<document id="{number}" title="{title}">\n{text}\n</document>'
        case "heading":
            return f"### {title}\n{text}"
    return text


def _wrapped(text: str) -> str:
    return "\n\n".join(textwrap.fill(paragraph, 79) for paragraph in text.split("\n\n"))


@cache
def _pages() -> dict[str, tuple[str, ...]]:
    """Paragraphs of each source, white space collapsed."""
    names = {asked.source for asked in ENGLISH}
    texts = {name: text for name, text in topics.items() if name in names or len(text) > 3000}
    for name in names - set(texts):
        texts[name] = importlib.import_module(name).__doc__ or ""
    return {name: tuple(_paragraphs(text)) for name, text in sorted(texts.items())}


def _paragraphs(text: str) -> Iterator[str]:
    for paragraph in re.split(r"\n[ \t]*\n", text):
        joined = " ".join(paragraph.split())
        # Grammar, tables and examples are no passages that retrieval would bring.
        if len(joined) > 60 and not set("|`+").intersection(joined[:3]) and ">>>" not in joined:
            yield joined


def _located(asked: AskedSentence) -> tuple[Passage, str] | None:
    """The passage around the answer and the answer; None when this Python has it not."""
    paragraphs = _pages().get(asked.source, ())
    wanted = " ".join(asked.gold.split())
    for index, paragraph in enumerate(paragraphs):
        at = paragraph.find(wanted)
        if at < 0:
            continue
        stop = re.compile(r"[.](?=\s|$)").search(paragraph, at + len(wanted))
        gold = paragraph[at : stop.end() if stop else len(paragraph)]
        text = paragraph
        if index + 1 < len(paragraphs) and len(text) < _PASSAGE_CHARS[0]:
            text = f"{text}\n\n{paragraphs[index + 1]}"
        if index and len(text) < _PASSAGE_CHARS[0]:
            text = f"{paragraphs[index - 1]}\n\n{text}"
        return Passage(asked.source.replace("-", " ").title(), text), gold
    return None


def _distractors(gold: str, rng: random.Random, chars: tuple[int, int]) -> list[Passage]:
    """Passages without the answer, of `chars` together."""
    pages = _pages()
    names = list(pages)
    rest = rng.randint(*chars)
    seen: set[tuple[str, int]] = set()
    found = []
    while rest > 0:
        name = rng.choice(names)
        if not pages[name]:
            continue
        at = rng.randrange(len(pages[name]))
        wanted = rng.randint(*_PASSAGE_CHARS)
        text = ""
        while at < len(pages[name]) and len(text) < wanted and (name, at) not in seen:
            seen.add((name, at))
            paragraph = pages[name][at]
            if not gold or gold not in paragraph:
                text += ("\n\n" if text else "") + paragraph
            at += 1
        if text:
            found.append(Passage(name.replace("-", " ").title(), text[:3000]))
            rest -= len(text)
        elif len(seen) > 3000:
            break
    return found
