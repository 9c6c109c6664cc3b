"""Mean TF-IDF of a unit's terms: how specific it is."""

import numpy as np

from compressor.text.terms import Floats, TermMatrix, sums


def tfidf(terms: TermMatrix) -> Floats:
    """Mean of ln(n / df) over a unit's terms in [0, 1], the highest being 1; shape (units,)."""
    idf = np.log(terms.units / terms.spread)[terms.term]
    means: Floats = sums(terms.unit, terms.count * idf, terms.units) / np.maximum(terms.lengths, 1)
    most = means.max(initial=0.0)
    return means / most if most > 0 else means
