import pytest
from hypothesis import given
from hypothesis import strategies as st

from compressor.text.segment import MAX_CHARS
from tests.unit.compressor.cut import spans, units


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("One is. Two is! Three? Yes.", ["One is.", "Two is!", "Three?", "Yes."]),
        ("Dr. Ash met J. Doe at 3.5 km. He left.", ["Dr. Ash met J. Doe at 3.5 km.", "He left."]),
        ("It works, e.g. here. Fine.", ["It works, e.g. here.", "Fine."]),
        ('He said "No." Then left.', ['He said "No."', "Then left."]),
        ("See no. 5 of it. Done.", ["See no. 5 of it.", "Done."]),
        ("今天下雨。明天晴天！真的吗？好。", ["今天下雨。", "明天晴天！", "真的吗？", "好。"]),
        ("यह एक है। वह दो है।", ["यह एक है।", "वह दो है।"]),
        ("هل هذا صحيح؟ نعم. حسنا.", ["هل هذا صحيح؟", "نعم.", "حسنا."]),
        ("Это первое. Это второе.", ["Это первое.", "Это второе."]),
        ("# Title\nText of it.", ["# Title", "Text of it."]),
        ("List:\n- one\n1. three\n2) four", ["List:", "- one", "1. three", "2) four"]),
        ("Short line\nanother one", ["Short line", "another one"]),
        ("Wait... what? No way?! Yes.", ["Wait... what?", "No way?!", "Yes."]),
    ],
)  # fmt: skip
def test_units(text: str, expected: list[str]) -> None:
    assert units(text) == expected


def test_a_hard_wrapped_sentence_is_one_unit() -> None:
    text = "The first line of this sentence is long enough to have been\nwrapped here. Second."
    assert units(text) == [text[: text.index(" Second")], "Second."]


def test_a_long_sentence_is_cut_between_words() -> None:
    text = "word " * 1000 + "end."
    found = units(text)
    assert max(map(len, found)) <= MAX_CHARS
    assert " ".join(found).split() == text.split()


def test_a_cut_does_not_fall_inside_a_number() -> None:
    text = ("1,000,000 " * 200).strip()
    assert all(set(unit.split()) == {"1,000,000"} for unit in units(text))


def test_marks_and_joiners_stay_with_their_letters() -> None:
    text = "ก็" * 1000
    assert not any(unit.startswith("\u0e47") for unit in units(text))


@given(st.text(st.sampled_from("aB1 .!?\n,;。漢\u0301\t|`#-\"'") | st.characters(), max_size=300))
def test_units_hold_every_character_but_white_space_in_order(text: str) -> None:
    assert "".join("".join(units(text)).split()) == "".join(text.split())


def test_carriage_returns_change_nothing() -> None:
    text = "# Head\nOne is here. Two is.\n\n- three\n- four\n\nFive."
    crlf = text.replace("\n", "\r\n")
    assert units(crlf) == units(text)
    assert spans(crlf).gaps.tolist() == spans(text).gaps.tolist()
