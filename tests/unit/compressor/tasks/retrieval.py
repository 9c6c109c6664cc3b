"""Questions over retrieved passages in the forms that retrieval writes them."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from tests.unit.compressor.tasks.passages import CHINESE, ENGLISH, GERMAN, RUSSIAN, Fact

_SYSTEM = "Answer from the passages. Say so if they do not hold the answer."


class Retrieval(NamedTuple):
    """A prompt, and the sentence that must stay."""

    messages: list[dict[str, Any]]
    answer: str
    tools: bool = False


def _joined(form: str, facts: Sequence[Fact], between: str = "\n\n") -> str:
    return between.join(
        form.format(n=n, title=f.title, text=f.text) for n, f in enumerate(facts, 1)
    )


def _asked(form: str, facts: Sequence[Fact], at: int, between: str = "\n\n") -> Retrieval:
    text = f"{_joined(form, facts, between)}\n\n{facts[at].question}"
    return Retrieval([{"role": "user", "content": text}], facts[at].answer)


def _parts(*texts: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "text", "text": text} for text in texts]}]


_NUMBERED = _joined("[{n}] {title}\n{text}", ENGLISH)
PROMPTS: dict[str, Retrieval] = {
    "numbers in brackets": _asked("[{n}] {title}\n{text}", ENGLISH, 1),
    "numbers before the text": _asked("[{n}] {text}", ENGLISH, 2),
    "titles in parentheses": _asked("Document [{n}](Title: {title}) {text}", ENGLISH, 3),
    "named brackets": _asked("[Document {n}]\n{text}", ENGLISH, 4),
    "passages": _asked("Passage {n}:\n{text}", ENGLISH, 5),
    "contexts": _asked("Context {n}: {text}", ENGLISH, 6),
    "chunks between equals signs": _asked("=== Chunk {n} ===\n{text}", ENGLISH, 7),
    "sources": _asked("Source: {title}\n{text}", ENGLISH, 8),
    "documents without numbers": _asked("Document: {title}\n{text}", ENGLISH, 9),
    "titles and addresses": _asked("Title: {title}\nURL: https://x.org/{n}\n{text}", ENGLISH, 10),
    "documents as tags": _asked('<document id="{n}">\n{text}\n</document>', ENGLISH, 11),
    "docs as tags": _asked("<doc id={n} title='{title}'>\n{text}\n</doc>", ENGLISH, 0),
    "nested tags": _asked(
        "<document><title>{title}</title>\n{text}\n</document>", ENGLISH, 1, "\n"
    ),
    "headings": _asked("### {title}\n{text}", ENGLISH, 2),
    "numbered titles": _asked("{n}. {title}\n{text}", ENGLISH, 3),
    "rules": _asked("{title}\n{text}", ENGLISH, 4, "\n\n---\n\n"),
    "a key of another language": _asked("Lähde: {title}\n{text}", ENGLISH, 5),
    "a word of another language": _asked("Extrait {n} : {title}\n{text}", ENGLISH, 6),
    "question first": Retrieval(
        [{"role": "user", "content": f"{ENGLISH[7].question}\n\n{_NUMBERED}"}], ENGLISH[7].answer
    ),
    "marked question": Retrieval(
        [
            {"role": "system", "content": _SYSTEM},
            {"role": "user", "content": f"{_NUMBERED}\n\nQuestion: {ENGLISH[8].question}\nAnswer:"},
        ],
        ENGLISH[8].answer,
    ),
    "question in a part of its own": Retrieval(
        _parts(_NUMBERED, ENGLISH[9].question), ENGLISH[9].answer
    ),
    "question in a message of its own": Retrieval(
        [
            {"role": "user", "content": _NUMBERED},
            {"role": "user", "content": ENGLISH[10].question},
        ],
        ENGLISH[10].answer,
    ),
    "a tool's result": Retrieval(
        [
            {"role": "user", "content": ENGLISH[11].question},
            {"role": "assistant", "content": None, "tool_calls": []},
            {"role": "tool", "tool_call_id": "1", "content": _NUMBERED},
        ],
        ENGLISH[11].answer,
        tools=True,
    ),
    "German": _asked("[{n}] {title}\n{text}", GERMAN, 0),
    "German words": _asked("Quelle {n}: {title}\n{text}", GERMAN, 3),
    "Chinese": _asked("文档{n}：{title}\n{text}", CHINESE, 1),
    "Chinese brackets": _asked("【资料{n}】{title}\n{text}", CHINESE, 3),
    "Russian": _asked("[{n}] {title}\n{text}", RUSSIAN, 3),
    "Russian words": _asked("Отрывок {n}: {title}\n{text}", RUSSIAN, 1),
}
