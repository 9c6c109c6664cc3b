import pytest

from tests.unit.compressor.cut import parts


def furniture(text: str) -> list[str]:
    found = parts(text)
    spans = found.spans
    return [
        text[a:b]
        for a, b, is_header in zip(
            spans.starts.tolist(), spans.ends.tolist(), found.furniture.tolist(), strict=True
        )
        if is_header
    ]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("[1] Alpha", "[2] Beta"),
        ("Document [1](Title: Alpha)", "Document [2](Title: Beta)"),
        ('<document id="1">', '<document id="2">'),
        ("### Alpha", "### Beta"),
        ("Passage 1:", "Passage 2:"),
        ("文档1：", "文档2："),
    ],
)
def test_headers_are_furniture_of_their_sections(first: str, second: str) -> None:
    text = f"{first}\nOne is here. It stays.\n\n{second}\nTwo is there. It goes."
    assert furniture(text) == [first, second]
    assert parts(text).section.tolist() == [0, 0, 0, 1, 1, 1]
    assert parts(text).rank.tolist() == [0, 0, 1, 0, 0, 1]


def test_short_paragraphs_are_gathered_and_long_sections_are_not_one_passage() -> None:
    assert set(parts("One.\n\nTwo.\n\nThree.").passage.tolist()) == {0}
    long = "# Head\n\n" + "\n\n".join("A line of words follows here. " * 20 for _ in range(9))
    assert len(set(parts(long).passage.tolist())) > 2
    assert set(parts(long).section.tolist()) == {0}
