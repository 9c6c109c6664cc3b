import json

from compressor.text.protect import blocks, is_json
from tests.unit.compressor.cut import ground, units


def found(text: str) -> list[str]:
    return [text[a:b] for a, b in blocks(ground(text), [0], [len(text)])]


def test_fences_are_whole() -> None:
    for fence in ("```", "~~~", "`````"):
        block = f"{fence}py\na = 1. B = 2.\n\n- c\n{fence}"
        if fence == "`````":
            block = block.replace("- c", "```\n- c")
        assert found(f"Before. It.\n\n{block}\n\nAfter.") == [block]
        assert block in units(f"Before. It.\n\n{block}\n\nAfter.")


def test_rst_underlines_are_no_fences() -> None:
    assert found("Title\n~~~~~\n\nText.\n\nOther\n~~~~~\n\nMore.") == []


def test_an_unclosed_fence_runs_to_the_end_of_its_text() -> None:
    assert found("Text.\n\n```\ncode one\n\ncode two") == ["```\ncode one\n\ncode two"]


def test_tables_with_and_without_outer_bars() -> None:
    barred = "| a | b |\n|---|---|\n| 1 | 2 |"
    bare = "a | b\n--- | ---\n1 | 2"
    assert found(f"Text.\n\n{barred}\n\nText.") == [barred]
    assert found(f"Text.\n\n{bare}\n\nText.") == [bare]
    assert found("Either a | b, or c.\nNothing - | else.") == []


def test_json_inside_a_text_is_whole_and_numbers_in_brackets_are_not() -> None:
    value = json.dumps({"a": [1, 2], "b": "x. Y. Z."}, indent=2)
    assert found(f"Here: {value} and more. See [12] and [1, 2].") == [value]


def test_whole_texts_of_json() -> None:
    assert is_json(' {"a": 1}\n')
    assert is_json("[1]")
    assert not any(map(is_json, ("", "5", '"a"', "{", "[1] text", "[" * 100_000 + "]" * 100_000)))
