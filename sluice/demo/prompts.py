"""What the sample traffic asks: short questions, documents, a conversation, retrieval prompts.

Long texts are Python's own documentation, which ships with every interpreter.
"""

import random
import re
from collections.abc import Iterator, Sequence
from functools import cache
from pydoc_data.topics import topics
from typing import Final, NamedTuple

Message = dict[str, str]

QUESTIONS: Final = (
    "Explain in two sentences what a token budget is.",
    "Write a haiku about queues.",
    "Summarise: the gateway decides who may enter, what fits, and which worker serves it.",
    "def fib(n):\n    return n if n < 2 else fib(n - 1) + fib(n - 2)\n\nWhat is fib(10)?",
    "请用一句话解释什么是负载均衡。",
)
_ASKED: Final = (
    ("assignment", "When a starred target appears in an assignment, what does it receive?",
     "A list of the remaining items in the iterable is then assigned"),
    ("binary", "How are two numbers treated before they are multiplied?",
     "In the former case, the numbers are converted to a common type"),
    ("calls", "How does a call treat the elements of an unpacked iterable?",
     "Elements from these iterables are treated as if they were additional"),
    ("class", "Where is the order of definitions in a class body preserved?",
     "The order in which attributes are defined in the class body is preserved"),
    ("compound", "When does a mapping pattern succeed?",
     "If every key given in the mapping pattern is present in the subject"),
    ("customization", "What should __repr__ return if no valid Python expression can be given?",
     "If this is not possible, a string of the form"),
    ("execmodel", "What decides which except clause handles an exception?",
     'The "except" clause is selected depending on the class'),
    ("naming", "When is a name that is bound in a block not a local variable?",
     "If a name is bound in a block, it is a local variable of that block"),
    ("objects", "Why should files always be closed explicitly?",
     "Do not depend on immediate finalization of objects"),
    ("raise", "How is the instance obtained when raise is given an exception class?",
     "If it is a class, the exception instance will be obtained"),
)  # fmt: skip
"""(topic, question, beginning of the sentence that answers it)"""
_PASSAGE_CHARS: Final = 1000
_MARKS: Final = frozenset("()[]{}=<>|`+_*:\\")
_MAX_MARKS: Final = 0.02
"""Of a paragraph of prose; documentation holds code, too."""


class Retrieval(NamedTuple):
    """Passages and a question, and the beginning of the sentence that answers it."""

    messages: list[Message]
    answer: str


def question(text: str) -> list[Message]:
    """One user message."""
    return [{"role": "user", "content": text}]


def document(rng: random.Random, chars: int) -> list[Message]:
    """A text of about so many characters to sum up, with a beginning that no other text has."""
    passages = [f"Summarise this collection, number {rng.randrange(1 << 30)}."]
    while chars > 0:
        title, text = rng.choice(_passages())
        passages.append(f"{title}: {text}")
        chars -= len(text)
    return question("\n\n".join(passages))


def system(rng: random.Random, chars: int) -> Message:
    """Instructions of an agent, the same in each of its turns."""
    return {"role": "system", "content": document(rng, chars)[0]["content"]}


def retrieval(rng: random.Random, count: int, chars: int) -> list[Retrieval]:
    """Prompts as retrieval makes them: the passage with the answer among `chars` of others."""
    found: list[Retrieval] = []
    for topic, asked, answer in rng.sample(_ASKED, len(_ASKED)):
        own = next((text for name, text in _passages() if name == topic and answer in text), None)
        if own is None or len(found) == count:  # another Python's documentation may lack it
            continue
        texts = [own, *_others(rng, answer, chars - len(own))]
        rng.shuffle(texts)
        listed = [f"Document [{n}] {text}" for n, text in enumerate(texts, 1)]
        messages = question("\n\n".join([*listed, f"Question: {asked}"]))
        found.append(Retrieval(messages, answer))
    return found


def _others(rng: random.Random, answer: str, chars: int) -> Iterator[str]:
    for _, text in rng.sample(_passages(), len(_passages())):
        if chars <= 0:
            return
        if answer not in text:
            chars -= len(text)
            yield text


@cache
def _passages() -> Sequence[tuple[str, str]]:
    """(topic, text) of about a thousand characters, white space collapsed."""
    found: list[tuple[str, str]] = []
    for topic, page in sorted(topics.items()):
        text = ""
        for paragraph in re.split(r"\n[ \t]*\n", page):
            joined = " ".join(paragraph.split())
            # Grammar, tables and examples are no passages that retrieval would bring.
            marks = sum(char in _MARKS for char in joined)
            if len(joined) > 60 and marks < _MAX_MARKS * len(joined) and ">>>" not in joined:
                text = f"{text} {joined}".strip()
            if len(text) >= _PASSAGE_CHARS:
                found.append((topic, text))
                text = ""
    return found
