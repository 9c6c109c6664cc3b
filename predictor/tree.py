"""Evaluates trained trees in plain Python.

A single tree is walked as nested tuples, (feature, threshold, left, right) and, at a leaf,
(-1, mean_s, quantile_s, None): unpacking one costs less than indexing four arrays. An ensemble
of small trees is not walked. For each feature, the failed comparisons clear the unreachable leaves
of all trees at once, as bits of one integer; the lowest bit left in each tree's byte is its leaf
(Lucchese et al., "QuickScorer", SIGIR 2015).
"""

from bisect import bisect_left
from collections.abc import Sequence
from math import exp
from operator import getitem
from typing import Any, Final

Node = tuple[int, float, Any, Any]
"""(feature, threshold, left, right): left if x[feature] <= threshold. Leaves: see above."""

LEAF: Final = -1
BOOST_LEAVES: Final = 8
"""Most leaves of a tree in an ensemble: one bit of a byte for each."""


def nest(
    feature: Sequence[int],
    threshold: Sequence[float],
    left: Sequence[int],
    right: Sequence[int],
    mean_s: Sequence[float],
    quantile_s: Sequence[float],
) -> Node:
    """Build the nested tuples of a tree given as arrays, with children after their parent."""
    nodes: list[Node] = []
    for i in reversed(range(len(feature))):
        if feature[i] == LEAF:
            nodes.append((LEAF, mean_s[i], quantile_s[i], None))
        else:
            last = len(feature) - 1
            nodes.append((feature[i], threshold[i], nodes[last - left[i]], nodes[last - right[i]]))
    return nodes[-1]


def leaf(root: Node, x: Sequence[float]) -> tuple[float, float]:
    """(mean_s, quantile_s) of the leaf that x falls into."""
    feature, threshold, left, right = root
    while feature >= 0:
        feature, threshold, left, right = left if x[feature] <= threshold else right
    return threshold, left


class SmallTree:
    """One tree of an ensemble, as arrays; leaves are numbered from the left."""

    __slots__ = ("feature", "left", "right", "threshold", "value")

    def __init__(
        self,
        feature: Sequence[int],
        threshold: Sequence[float],
        left: Sequence[int],
        right: Sequence[int],
        value: Sequence[float],
    ) -> None:
        self.feature = feature
        self.threshold = threshold
        self.left = left
        self.right = right
        self.value = value

    def leaves(self, node: int = 0) -> list[int]:
        """The leaves below a node, by default all, from left to right."""
        if self.feature[node] == LEAF:
            return [node]
        return self.leaves(self.left[node]) + self.leaves(self.right[node])


class Ensemble:
    """exp(constant + sum of the values of many trees of up to eight leaves)."""

    __slots__ = ("_features", "_size", "_start", "_tables", "_whole")

    def __init__(self, start: float, trees: Sequence[SmallTree]) -> None:
        self._start = start
        self._size = len(trees)
        self._whole = (1 << 8 * len(trees)) - 1
        self._tables = [_table(tree) for tree in trees]
        self._features = _masks(trees, self._whole)

    def quantile_s(self, x: Sequence[float]) -> float:
        """The quantile of x, in seconds."""
        bits = self._whole
        for feature, thresholds, masks in self._features:
            bits &= masks[bisect_left(thresholds, x[feature])]
        total = sum(map(getitem, self._tables, bits.to_bytes(self._size, "little")), self._start)
        return exp(total)


def _table(tree: SmallTree) -> list[float]:
    """For each byte of remaining leaves, the value of the first one."""
    values = [tree.value[node] for node in tree.leaves()]
    return [values[min((b & -b).bit_length(), len(values)) - 1] if b else 0.0 for b in range(256)]


def _masks(trees: Sequence[SmallTree], whole: int) -> list[tuple[int, list[float], list[int]]]:
    """For each feature in use: sorted thresholds, and the remaining leaves between them."""
    crossed: dict[int, list[tuple[float, int]]] = {}
    for place, tree in enumerate(trees):
        order = {node: bit for bit, node in enumerate(tree.leaves())}
        for node, feature in enumerate(tree.feature):
            if feature != LEAF:
                bits = sum(1 << order[below] for below in tree.leaves(tree.left[node]))
                crossed.setdefault(feature, []).append((tree.threshold[node], bits << 8 * place))
    masks_of = []
    for feature, cuts in sorted(crossed.items()):
        cuts.sort()
        masks, left = [whole], whole
        for _, bits in cuts:
            left &= ~bits
            masks.append(left)
        masks_of.append((feature, [threshold for threshold, _ in cuts], masks))
    return masks_of
