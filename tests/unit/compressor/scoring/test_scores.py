"""Components of the score against their definitions, written out."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from compressor.scoring.bm25 import K1, MASS, B, relevance
from compressor.scoring.textrank import DAMPING, STEPS, textrank
from compressor.text.terms import TermMatrix
from tests.unit.compressor.cut import ids, terms

TEXT = (
    "Rivers carry silt downstream. Silt settles where rivers slow. "
    "Bakers wake early. Rivers flood early meadows."
)
texts = st.lists(
    st.lists(st.sampled_from(["river", "silt", "baker", "early", "flood"]), min_size=1, max_size=6),
    min_size=2,
    max_size=8,
).map(lambda rows: " ".join(" ".join(row).capitalize() + "." for row in rows))


def dense(found: TermMatrix) -> "np.ndarray[tuple[int, int], np.dtype[np.float64]]":
    matrix = np.zeros((found.units, len(found.spread)))
    matrix[found.unit, found.term] = found.count
    return matrix


@given(texts)
def test_textrank_is_pagerank_on_the_cosine_matrix(text: str) -> None:
    found = terms(text)
    rows = dense(found)
    unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    similar = unit @ unit.T
    np.fill_diagonal(similar, 0)
    degrees = similar.sum(axis=1)
    inverse = np.divide(1, degrees, out=np.zeros_like(degrees), where=degrees > 1e-9)
    ranks = np.full(found.units, 1 / found.units)
    for _ in range(STEPS):
        ranks = (1 - DAMPING) / found.units + DAMPING * similar @ (ranks * inverse)
    expected = ranks / ranks.max() if (found.spread > 1).any() else np.zeros(found.units)
    assert textrank(found) == pytest.approx(expected, abs=1e-9)


def test_relevance_is_bm25_scaled_by_what_matched() -> None:
    found = terms(TEXT)
    passages = np.arange(found.units)
    none = np.zeros(found.units, np.bool_)
    got = relevance(found, ids(found, "silt"), passages, none)
    rows = dense(found)[:, ids(found, "silt")[0]]
    idf = np.log1p((found.units - 2 + 0.5) / 2.5)
    lengths = found.lengths
    expected = idf * rows * (K1 + 1) / (rows + K1 * (1 - B + B * lengths / lengths.mean()))
    weight = idf / (idf + MASS)
    assert got.weight == pytest.approx(weight)
    assert got.sentence == pytest.approx(weight * expected / expected.max())
    assert got.passage == pytest.approx(got.sentence)


def test_a_neighbour_in_the_passage_shares_and_one_outside_does_not() -> None:
    found = terms(TEXT)
    none = np.zeros(found.units, np.bool_)
    wanted = ids(found, "bakers".rstrip("s"))
    scores = relevance(found, wanted, np.array([0, 1, 1, 1]), none).sentence
    assert scores[1] == scores[3] == pytest.approx(0.3 * scores[2])
    assert scores[0] == 0
