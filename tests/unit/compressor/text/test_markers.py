import pytest

from tests.unit.compressor.cut import parts
from tests.unit.compressor.texts import prose

BODIES = [prose(5, seed=n) for n in range(6)]


def marks(form: str, between: str = "\n\n") -> tuple[int, int]:
    text = between.join(form.format(n=n, text=body) for n, body in enumerate(BODIES, 1))
    found = parts(text)
    return found.plain_marks, found.structural_marks


@pytest.mark.parametrize(
    "form",
    [
        "[{n}] {text}",
        "[Document {n}]\n{text}",
        "Document: report {n}\n{text}",
        "Source: page {n}\n{text}",
        "URL: https://x.org/{n}\n{text}",
        "<doc id={n}>\n{text}\n</doc>",
        "Passage {n}:\n{text}",
        "文档{n}：\n{text}",
    ],
)
def test_headers_that_name_a_passage_are_plain_marks(form: str) -> None:
    assert marks(form) == (6, 0)


@pytest.mark.parametrize(
    ("form", "between"),
    [
        ("Extrait {n} :\n{text}", "\n\n"),
        ("Отрывок {n}.\n{text}", "\n\n"),
        ("【抜粋{n}】\n{text}", "\n\n"),
        ("{n}. Report\n{text}", "\n\n"),
        ("({n}) Report\n{text}", "\n\n"),
        ("Lähde: x\n{text}", "\n\n"),
        ("#### Title {n}\n{text}", "\n\n"),
        ("---\n{text}", "\n\n"),
        ("Section {n}:\n{text}", "\n\n"),
    ],
)
def test_headers_that_only_repeat_are_structural_marks(form: str, between: str) -> None:
    assert marks(form, between) == (0, 6)


@pytest.mark.parametrize(
    "form",
    [
        "{text}",
        "# Part {n}\n{text}",
        "{n}. short\n",
        "Anna: yes, number {n}\n",
    ],
    ids=["paragraphs", "headings of a document", "list", "dialogue"],
)
def test_documents_lists_and_dialogues_have_none(form: str) -> None:
    assert marks(form) == (0, 0)


def test_numbers_that_do_not_run_are_no_marks() -> None:
    years = "\n\n".join(f"{1900 + 7 * n}: {body}" for n, body in enumerate(BODIES))
    assert parts(years).structural_marks == 0


def test_headings_of_several_levels_are_a_document_s() -> None:
    text = "\n\n".join(f"{'#' * (3 + n % 2)} Title\n{body}" for n, body in enumerate(BODIES))
    assert parts(text).structural_marks == 0
