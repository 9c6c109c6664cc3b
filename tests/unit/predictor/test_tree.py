"""The evaluators give what scikit-learn gives."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from predictor.artifact import Boosted
from predictor.features import FEATURES
from predictor.train import LEAVES, fit_boosted, fit_tree
from predictor.tree import Ensemble, SmallTree, leaf, nest
from tests.unit.predictor.made import rows_of

ROWS = rows_of(3000, 1)
X = np.array([row.x for row in ROWS])
Y = np.array([row.prefill_s for row in ROWS])
TREE = fit_tree(X, Y, alpha=0.95, leaves=LEAVES, seed=0)
ROOT = nest(TREE.feature, TREE.threshold, TREE.left, TREE.right, TREE.mean_s, TREE.quantile_s)
BOOSTED = fit_boosted(X, Y, alpha=0.95, seed=0)


def ensemble(boosted: Boosted) -> Ensemble:
    trees = [SmallTree(t.feature, t.threshold, t.left, t.right, t.value) for t in boosted.trees]
    return Ensemble(boosted.start, trees)


# scikit-learn compares 32-bit features, so those are what both are given.
narrow = st.tuples(*[st.floats(-10, 40_000, width=32) for _ in FEATURES])


def test_a_walk_ends_in_the_leaf_of_scikit_learn() -> None:
    from sklearn.tree import DecisionTreeRegressor

    model = DecisionTreeRegressor(max_leaf_nodes=LEAVES, min_samples_leaf=60, random_state=0)
    at = model.fit(X, np.log(Y)).apply(X)
    for row, node in zip(ROWS[:500], at[:500], strict=True):
        inside = Y[at == node]
        narrow_x = tuple(float(np.float32(value)) for value in row.x)
        mean_s, quantile_s = leaf(ROOT, narrow_x)
        assert mean_s == pytest.approx(inside.mean())
        assert quantile_s == pytest.approx(np.quantile(inside, 0.95))


@settings(max_examples=150, deadline=None)
@given(narrow)
def test_the_bits_of_an_ensemble_find_what_walking_its_trees_finds(x: tuple[float, ...]) -> None:
    total = BOOSTED.start
    for t in BOOSTED.trees:
        node = 0
        while t.feature[node] >= 0:
            under = x[t.feature[node]] <= t.threshold[node]
            node = t.left[node] if under else t.right[node]
        total += t.value[node]
    assert ensemble(BOOSTED).quantile_s(x) == pytest.approx(np.exp(total))


def test_an_ensemble_predicts_what_scikit_learn_predicts() -> None:
    from sklearn.ensemble import GradientBoostingRegressor

    model = GradientBoostingRegressor(
        loss="quantile", alpha=0.95, n_estimators=60, max_leaf_nodes=8, max_depth=None,
        learning_rate=0.15, min_samples_leaf=60, random_state=0,
    )  # fmt: skip
    model.fit(X, np.log(Y))
    ours = ensemble(BOOSTED)
    wide = X[:200].astype(np.float32).astype(np.float64)
    expected = np.exp(model.predict(wide))
    assert [ours.quantile_s(x) for x in wide.tolist()] == pytest.approx(expected.tolist())
