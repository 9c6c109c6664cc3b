import numpy as np
import pytest

from compressor import Compressed, compress
from compressor.scoring.copies import copies
from tests.unit.compressor.cut import ground, parts
from tests.unit.compressor.texts import prose, size, user


def copied(text: str) -> list[str]:
    found = parts(text)
    marks = np.flatnonzero(copies(ground(text), found))
    return [text[found.spans.starts[i] : found.spans.ends[i]] for i in marks.tolist()]


def test_a_fact_that_repeats_under_other_headings_is_no_copy() -> None:
    text = "\n\n".join(
        f"[{n}] Site {n}\nThe road begins there. The permit was granted." for n in range(6)
    )
    assert copied(text) == []


def test_the_overlap_of_two_chunks_is_a_copy() -> None:
    shared = "The bell rang at noon. Nobody came to the door."
    text = f"[1]\nA ship lay in port. {shared}\n\n[2]\n{shared} The priest went home."
    assert copied(text) == shared.replace(". ", ".|").split("|")


def test_one_shared_sentence_is_no_overlap() -> None:
    text = "[1]\nA ship lay in port. It was late.\n\n[2]\nIt was late. The priest went home."
    assert copied(text) == []


def test_a_passage_that_came_twice_is_a_copy_and_one_under_another_title_is_not() -> None:
    body = "The bell rang at noon. Nobody came to the door."
    assert len(copied(f"[1] Bell\n{body}\n\n[1] Bell\n{body}")) == 2
    assert copied(f"### Bell\n{body}\n\n### Horn\n{body}") == []


@pytest.mark.parametrize("project", [4, 9, 17])
@pytest.mark.parametrize("share", [0.6, 0.8, 0.95])
def test_the_repeated_sentence_of_the_passage_asked_about_stays(project: int, share: float) -> None:
    names = [f"{name} {kind}" for name in ("Alder", "Birch", "Cedar", "Elm") for kind in
             ("Court", "Lane", "Mill", "Square", "Wharf")]  # fmt: skip
    verdicts = ["The permit was granted.", "The permit was refused."]
    text = "\n\n".join(
        f"[{n}] {name}\nWork at {name} began late. {verdicts[n % 2]} {prose(3, seed=n)}"
        for n, name in enumerate(names)
    )
    text += f"\n\nWas the permit of {names[project]} granted or refused?"
    found = compress(user(text), int(size(text) * share), 1.0, safety=1.0)
    assert isinstance(found, Compressed), found
    (passage,) = [
        part for part in found.messages[0]["content"].split("\n\n[") if
        part.startswith(f"{project}] ")
    ]  # fmt: skip
    assert verdicts[project % 2] in passage
