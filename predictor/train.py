"""Offline: from rows to an artifact, with a judgement on rows it was not trained on.

A regression tree of 128 leaves on the logarithm of the prefill time, its leaves holding the
mean and the alpha quantile of what fell there; as an option, quantiles from 60 boosted trees of
8 leaves. The newest quarter of the rows is held out, the artifact is what was judged on it.
Needs scikit-learn, which the extra `train` brings; nothing a gateway imports does.
"""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from sklearn.ensemble import GradientBoostingRegressor
from sklearn.tree import DecisionTreeRegressor

from predictor.artifact import (
    KIND,
    LONGEST_S,
    SCHEMA,
    SHORTEST_S,
    Artifact,
    Boosted,
    BoostedTree,
    TreeArrays,
)
from predictor.features import FEATURES, UNCACHED
from predictor.judge import judge
from predictor.prior import Prior, PriorRates
from predictor.rows import Row

LEAVES: Final = 128
LEAF_ROWS: Final = 60
"""Fewer say little of a .95 quantile."""
HELD_OUT: Final = 0.25
LEAST_ROWS: Final = 1000
MOST_ROWS: Final = 400_000
"""The newest; more take memory and minutes, and describe older days."""
BOOST_TREES: Final = 60
BOOST_LEAVES: Final = 8
_BOOST_RATE: Final = 0.15
_LAYER_TESTS: Final = 2

Floats = NDArray[np.float64]


class TooFewRows(ValueError):
    """How many there are, and how many it takes."""


def train(
    rows: Sequence[Row],
    *,
    alpha: float = 0.95,
    boosted: bool = False,
    leaves: int = LEAVES,
    seed: int = 0,
    trained_on: str = "",
) -> Artifact:
    """An artifact from rows in order of time; its `report` is `judge`'s on the newest quarter.

    TooFewRows below LEAST_ROWS.
    """
    if len(rows) < LEAST_ROWS:
        raise TooFewRows(f"{len(rows)} usable rows; training takes at least {LEAST_ROWS}")
    rows = rows[-MOST_ROWS:]
    cut = len(rows) - int(len(rows) * HELD_OUT)
    learned, held_out = rows[:cut], rows[cut:]
    x = np.array([row.x for row in learned], dtype=np.float64)
    y = np.clip([row.prefill_s for row in learned], SHORTEST_S, LONGEST_S)
    slowness = worker_slowness(learned, x, y, seed)
    y = np.clip(y / [slowness[row.worker] for row in learned], SHORTEST_S, LONGEST_S)
    artifact = Artifact(
        schema=SCHEMA,
        kind=KIND,
        alpha=alpha,
        features=FEATURES,
        tree=fit_tree(x, y, alpha=alpha, leaves=leaves, seed=seed),
        rates=_rates(x, y),
        longest_uncached_tokens=max(1, int(x[:, UNCACHED].max())),
        rows=len(learned),
        boosted=fit_boosted(x, y, alpha=alpha, seed=seed) if boosted else None,
        trained_on=trained_on,
    )
    report: dict[str, Any] = judge(artifact, learned, held_out)
    report["slowness"] = {name: round(value, 3) for name, value in slowness.items()}
    fields = {name: getattr(artifact, name) for name in artifact.__struct_fields__}
    return Artifact(**{**fields, "report": report})


def fit_tree(x: Floats, y: Floats, *, alpha: float, leaves: int, seed: int) -> TreeArrays:
    """The tree of x, seconds y."""
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
    """The ensemble of x, seconds y, by gradient boosting on the pinball loss."""
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


def worker_slowness(rows: Sequence[Row], x: Floats, y: Floats, seed: int) -> dict[str, float]:
    """How long each worker took beside what a tree of all predicts; their middle is 1.

    So the artifact is that of a middling worker, and what each is beside it is learned online.
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
    """The prior after all rows."""
    prior = Prior(PriorRates())
    for row, actual_s in zip(x.tolist(), y.tolist(), strict=True):
        prior.observe(row, actual_s)
    return prior.rates


def _parents_first(tree: Any) -> list[int]:
    """Nodes of a scikit-learn tree, each before its children."""
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
