import pytest

from compressor import Compressed, compress
from tests.unit.compressor.texts import prose, size, user


def question_of(text: str) -> str:
    found = compress(user(text), int(size(text) * 0.8), 1.0, safety=1.0, when="any", mark=False)
    assert isinstance(found, Compressed), found
    return found.question


DOCUMENTS = "\n\n".join(f"[{i}] Title {i}\n{prose(6, seed=i)}" for i in range(1, 12))


@pytest.mark.parametrize(
    ("text", "question"),
    [
        (f"{DOCUMENTS}\n\nQuestion: Who rang the bell?", "Question: Who rang the bell?"),
        (f"{DOCUMENTS}\n\nWho rang the bell?", "Who rang the bell?"),
        (f"Who rang the bell?\n\n{DOCUMENTS}", "Who rang the bell?"),
        (f"{DOCUMENTS}\n\nQuestion: Who rang it?\nAnswer:", "Question: Who rang it?\nAnswer:"),
        (f"{DOCUMENTS}\n\nTell me who rang the bell.", "Tell me who rang the bell."),
        (f"{DOCUMENTS}\n\n谁敲了钟？", "谁敲了钟？"),
        (f"{DOCUMENTS}\n\nمن قرع الجرس؟", "من قرع الجرس؟"),
        (
            f"{DOCUMENTS}\n\nMy bell is old. It squeaks. Who can mend it?",
            "My bell is old.\nIt squeaks.\nWho can mend it?",
        ),
    ],
    ids=["marker", "tail", "head", "answer line", "imperative", "Chinese", "Arabic", "story"],
)
def test_the_question_is_found(text: str, question: str) -> None:
    assert question_of(text) == question


def test_a_question_at_the_end_does_not_keep_the_last_passage_s_header() -> None:
    text = f"{DOCUMENTS}\n\n[12] Last title\n{prose(9, seed=77)}\n\nWho rang the bell?"
    found = compress(user(text), int(size(text) * 0.6), 1.0, safety=1.0, when="any", mark=False)
    assert isinstance(found, Compressed)
    last = [u for u in found.units if "Last title" in u.text]
    sentences = [u for u in found.units if u.passage == last[0].passage and u.tier == "scored"]
    assert last[0].kept == any(u.kept for u in sentences)
