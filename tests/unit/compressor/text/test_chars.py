import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from compressor.text.chars import CLOSE, HARD, RUN, SOFT, WORD, chars_of, hash_of, tables


def test_bytes_of_spans_are_those_of_the_encoding() -> None:
    text = "aé漢👍\ud83db"
    chars = chars_of(text)
    starts = np.arange(len(text))
    found = chars.bytes_between(starts, starts + 1).tolist()
    assert found == [len(c.encode("utf-8", "surrogatepass")) for c in text]


@given(st.text(max_size=60), st.data())
def test_a_span_s_hash_does_not_depend_on_where_it_stands(text: str, data: st.DataObject) -> None:
    before = data.draw(st.text(max_size=20))
    one, other = chars_of(text), chars_of(before + text)
    zero = np.zeros(1, np.int64)
    alone = one.hashes(zero, zero + len(text))
    shifted = other.hashes(zero + len(before), zero + len(before) + len(text))
    assert alone.tolist() == shifted.tolist()


def test_case_accents_and_width_are_folded() -> None:
    assert hash_of("café") == hash_of("CAFE") == hash_of("ｃａｆｅ")
    assert hash_of("cafe") != hash_of("cape")


def test_classes_of_characters() -> None:
    classes = tables().classes
    for char, kind in (("a", WORD), ("漢", RUN), ("ไ", RUN), (".", SOFT), ("。", HARD)):
        assert classes[ord(char)] & kind
    for char, kind in (("؟", HARD), ("।", HARD), ("”", CLOSE), ("\u0301", WORD), ("ि", WORD)):
        assert classes[ord(char)] & kind
