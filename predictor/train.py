"""Offline training: builds a section from rows and evaluates it on held-out rows.

The model is a regression tree of 128 leaves on the logarithm of the prefill time; each leaf holds
the mean and the alpha quantile of its rows. Optionally, 60 boosted trees of 8 leaves give the
quantiles. The newest quarter of the rows is held out, and the evaluated section is returned as
is, not retrained. Needs scikit-learn (the extra `train`); the gateway does not import it.
"""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from sklearn.ensemble import GradientBoostingRegressor
from sklearn.tree import DecisionTreeRegressor

from predictor.artifact import (
    LONGEST_S,
    SHORTEST_S,
    Boosted,
    BoostedTree,
    PoolSection,
    TreeArrays,
)
from predictor.features import UNCACHED
from predictor.judge import judge
from predictor.prior import Prior, PriorRates
from predictor.rows import PrefillRow

LEAVES: Final = 128
LEAF_ROWS: Final = 60
"""Least rows in a leaf: fewer do not determine a .95 quantile."""
HELD_OUT: Final = 0.25
MIN_ROWS: Final = 1000
MAX_ROWS: Final = 400_000
"""Most rows, the newest; more cost memory and minutes, and are outdated."""
BOOST_TREES: Final = 60
BOOST_LEAVES: Final = 8
_BOOST_RATE: Final = 0.15
_LAYER_TESTS: Final = 2

Floats = NDArray[np.float64]


class TooFewRows(ValueError):
    """Fewer than MIN_ROWS usable rows; the message has both numbers."""


def train(
    rows: Sequence[PrefillRow],
    *,
    alpha: float = 0.95,
    boosted: bool = False,
    leaves: int = LEAVES,
    seed: int = 0,
    model: str = "",
    pool: str = "",
) -> PoolSection:
    """Train on rows in order of time; `report` is `judge`'s on the newest quarter.

    Raises TooFewRows below MIN_ROWS.
    """
    if len(rows) < MIN_ROWS:
        raise TooFewRows(f"{len(rows)} usable rows; training takes at least {MIN_ROWS}")
    rows = rows[-MAX_ROWS:]
    cut = len(rows) - int(len(rows) * HELD_OUT)
    learned, held_out = rows[:cut], rows[cut:]
    x = np.array([row.x for row in learned], dtype=np.float64)
    y = np.clip([row.prefill_s for row in learned], SHORTEST_S, LONGEST_S)
    slowness = worker_slowness(learned, x, y, seed)
    y = np.clip(y / [slowness[row.worker] for row in learned], SHORTEST_S, LONGEST_S)
    section = PoolSection(
        model=model,
        pool=pool,
        alpha=alpha,
        tree=fit_tree(x, y, alpha=alpha, leaves=leaves, seed=seed),
        rates=_rates(x, y),
        longest_uncached_tokens=max(1, int(x[:, UNCACHED].max())),
        rows=len(learned),
        boosted=fit_boosted(x, y, alpha=alpha, seed=seed) if boosted else None,
    )
    report: dict[str, Any] = judge(section, learned, held_out)
    report["slowness"] = {name: round(value, 3) for name, value in slowness.items()}
    fields = {name: getattr(section, name) for name in section.__struct_fields__}
    return PoolSection(**{**fields, "report": report})


def fit_tree(x: Floats, y: Floats, *, alpha: float, leaves: int, seed: int) -> TreeArrays:
    """Fit the tree to features x, shape (rows, features), and seconds y, shape (rows,)."""
    model = DecisionTreeRegressor(
        max_leaf_nodes=leaves, min_samples_leaf=min(LEAF_ROWS, len(y) // 8), random_state=seed
    )
    model.fit(x, np.log(y))
    order = _parents_first(model.tree_)
    at = model.apply(x)
    mean_s, quantile_s = {}, {}
    for node in np.unique(at):
        inside = y[at == node]
        mean_s[int(node)] = float(inside.mean())
        quantile_s[int(node)] = float(np.quantile(inside, alpha))
    return TreeArrays(
        **_arrays(model.tree_, order),
        mean_s=tuple(mean_s.get(node, 0.0) for node in order),
        quantile_s=tuple(quantile_s.get(node, 0.0) for node in order),
    )


def fit_boosted(x: Floats, y: Floats, *, alpha: float, seed: int) -> Boosted:
    """Fit the ensemble to x and y, as in `fit_tree`, by boosting on the pinball loss."""
    model = GradientBoostingRegressor(
        loss="quantile",
        alpha=alpha,
        n_estimators=BOOST_TREES,
        max_leaf_nodes=BOOST_LEAVES,
        max_depth=None,
        learning_rate=_BOOST_RATE,
        min_samples_leaf=min(LEAF_ROWS, len(y) // 8),
        random_state=seed,
    )
    model.fit(x, np.log(y))
    trees = []
    for (estimator,) in model.estimators_:
        tree = estimator.tree_
        order = _parents_first(tree)
        value = tuple(_BOOST_RATE * float(tree.value[node, 0, 0]) for node in order)
        trees.append(BoostedTree(**_arrays(tree, order), value=value))
    return Boosted(start=float(np.quantile(np.log(y), alpha)), trees=tuple(trees))


def worker_slowness(
    rows: Sequence[PrefillRow], x: Floats, y: Floats, seed: int
) -> dict[str, float]:
    """Each worker's time relative to a common tree's prediction, scaled to a median of 1.

    So the section describes a median worker, and each worker's factor is learned online.
    """
    names = sorted({row.worker for row in rows})
    if len(names) == 1:
        return {names[0]: 1.0}
    of = np.array([row.worker for row in rows])
    model = DecisionTreeRegressor(max_leaf_nodes=32, min_samples_leaf=LEAF_ROWS, random_state=seed)
    predicted = np.exp(model.fit(x, np.log(y)).predict(x))
    ratio = {}
    for name in names:
        mine = of == name
        enough = mine.sum() >= LEAF_ROWS
        ratio[name] = float(y[mine].sum() / predicted[mine].sum()) if enough else 1.0
    middle = float(np.median(list(ratio.values())))
    return {name: value / middle for name, value in ratio.items()}


def _rates(x: Floats, y: Floats) -> PriorRates:
    """The rates that the prior has learned after all rows."""
    prior = Prior(PriorRates())
    for row, actual_s in zip(x.tolist(), y.tolist(), strict=True):
        prior.observe(row, actual_s)
    return prior.rates


def _parents_first(tree: Any) -> list[int]:
    """Nodes of a scikit-learn tree in an order where parents precede children."""
    order, todo = [], [0]
    while todo:
        node = todo.pop()
        order.append(node)
        if tree.children_left[node] >= 0:
            todo += [int(tree.children_right[node]), int(tree.children_left[node])]
    return order


def _arrays(tree: Any, order: Sequence[int]) -> dict[str, Any]:
    place = {node: i for i, node in enumerate(order)}
    inner = [tree.children_left[node] >= 0 for node in order]
    pairs = list(zip(order, inner, strict=True))
    return {
        "feature": tuple(int(tree.feature[n]) if i else -1 for n, i in pairs),
        "threshold": tuple(float(tree.threshold[n]) if i else 0.0 for n, i in pairs),
        "left": tuple(place[int(tree.children_left[n])] if i else 0 for n, i in pairs),
        "right": tuple(place[int(tree.children_right[n])] if i else 0 for n, i in pairs),
    }
