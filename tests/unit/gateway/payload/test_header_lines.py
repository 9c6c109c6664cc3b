"""Blocks of headers: made of pairs, and read as pairs."""

from hypothesis import given
from hypothesis import strategies as st

from gateway.payload.head import lines_of, pairs_of

NAMES = st.text("abcdefghijklmnopqrstuvwxyz0123456789-", min_size=1).map(str.encode)
VALUES = st.text(st.characters(codec="ascii", min_codepoint=32)).map(str.encode)


@given(st.lists(st.tuples(NAMES, VALUES)))
def test_what_was_written_is_read(headers: list[tuple[bytes, bytes]]) -> None:
    assert pairs_of(lines_of(headers)) == headers
