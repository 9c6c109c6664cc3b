from itertools import pairwise

from compressor import Compressed, compress
from tests.unit.compressor.texts import prose, size, user


def extract(text: str, share: float) -> str:
    found = compress(user(text), int(size(text) * share), 1.0, safety=1.0, when="any", mark=False)
    assert isinstance(found, Compressed), found
    assert found.changed
    return str(found.messages[0]["content"])


DOCUMENTS = "\n\n".join(f"[{i}] Title {i}\n{prose(6, seed=i)}" for i in range(1, 15))


def test_a_header_stands_on_a_line_of_its_own_after_a_blank_one() -> None:
    lines = extract(f"{DOCUMENTS}\n\nWhich bridge is meant?", 0.5).split("\n")
    headers = [i for i, line in enumerate(lines) if line.startswith("[")]
    assert headers
    assert all(i == 0 or lines[i - 1] == "" for i in headers)
    assert not any("] Title" in line for i, line in enumerate(lines) if i not in headers)


def test_a_header_without_text_goes() -> None:
    lines = extract(f"{DOCUMENTS}\n\nWhich bridge is meant?", 0.5).split("\n")
    for line, following in pairwise(lines):
        if line.startswith("["):
            assert following
            assert not following.startswith("[")


def test_no_words_grow_together_where_a_cut_had_no_white_space() -> None:
    text = "word,word;" * 800 + " Which?"
    after = extract(text, 0.6)
    assert set(after.replace(",", " ").replace(";", " ").split()) == {"word", "Which?"}


def test_text_without_spaces_gets_none() -> None:
    sentences = "".join(
        f"第{i}天我们去了{'山海城'[i % 3]}边看{'花鸟鱼'[i % 3]}。" for i in range(90)
    )
    after = extract(f"{sentences}\n\n第七天去了哪里？", 0.6)
    assert " " not in after


def test_exact_repetitions_go_first() -> None:
    once = prose(40)
    text = once + "\n\n" + "The bell rang twice that night. " * 30 + "\n\nWhich bell rang?"
    after = extract(text, 0.8)
    assert after.count("The bell rang twice that night.") < 5
    assert sum(sentence in after for sentence in once.split(". ")) > 30
