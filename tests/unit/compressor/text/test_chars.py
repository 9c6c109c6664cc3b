import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from compressor.text.chars import chars_of


@given(st.text(max_size=60), st.data())
def test_a_span_s_hash_does_not_depend_on_where_it_stands(text: str, data: st.DataObject) -> None:
    before = data.draw(st.text(max_size=20))
    one, other = chars_of(text), chars_of(before + text)
    zero = np.zeros(1, np.int64)
    alone = one.hashes(zero, zero + len(text))
    shifted = other.hashes(zero + len(before), zero + len(before) + len(text))
    assert alone.tolist() == shifted.tolist()
