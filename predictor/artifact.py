"""The trained predictor as a file: JSON, versioned, checked in full before it is used.

No pickle and nothing that runs: arrays of numbers. A file from elsewhere can be wrong, but it
cannot make a walk endless, a prediction infinite, or the gateway's memory large.
"""

from collections.abc import Sequence
from math import isfinite
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec

from predictor.features import FEATURES
from predictor.prior import PriorRates
from predictor.tree import BOOST_LEAVES, LEAF, Ensemble, Node, SmallTree, nest

SCHEMA: Final = 1
KIND: Final = "sluice-prefill-predictor"
MAX_BYTES: Final = 4 << 20
MAX_LEAVES: Final = 1024
MAX_DEPTH: Final = 64
MAX_TREES: Final = 256
SHORTEST_S: Final = 1e-4
LONGEST_S: Final = 3600.0

Seconds = Annotated[float, msgspec.Meta(ge=SHORTEST_S, le=LONGEST_S)]


class ArtifactError(ValueError):
    """Why a file is no predictor, in one sentence."""


class _Part(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class TreeArrays(_Part, frozen=True, kw_only=True):
    """A tree; entry i of each array is node i, 0 the root, and children come after parents.

    `feature` is a place in the artifact's features, -1 at a leaf; `left` is where x <= threshold.
    """

    feature: tuple[int, ...]
    threshold: tuple[float, ...]
    left: tuple[int, ...]
    right: tuple[int, ...]
    mean_s: tuple[float, ...]
    """At leaves: the mean of what fell there."""
    quantile_s: tuple[float, ...]
    """At leaves: its alpha quantile."""


class BoostedTree(_Part, frozen=True, kw_only=True):
    """One tree of an ensemble; `value` is added to the log of the quantile."""

    feature: tuple[int, ...]
    threshold: tuple[float, ...]
    left: tuple[int, ...]
    right: tuple[int, ...]
    value: tuple[float, ...]


class Boosted(_Part, frozen=True, kw_only=True):
    """log quantile = start + the trees' values."""

    start: float
    trees: tuple[BoostedTree, ...]


class Artifact(_Part, frozen=True, kw_only=True):
    """A trained predictor. Made by training or `decode`, which check it; ArtifactError."""

    schema: int
    kind: str
    alpha: float
    """Of the quantiles, e.g. 0.95."""
    features: tuple[str, ...]
    tree: TreeArrays
    rates: PriorRates
    """What the same rows say of the engine: rates, and the prior if the tree is not used."""
    longest_uncached_tokens: int
    """Of the rows; longer ones are extrapolated in proportion."""
    rows: int
    boosted: Boosted | None = None
    """Quantiles from an ensemble instead of the leaves'."""
    trained_on: str = ""
    """Where the rows came from."""
    report: dict[str, Any] = {}
    """How training judged it, for people."""

    def __post_init__(self) -> None:
        if self.schema != SCHEMA or self.kind != KIND:
            raise ArtifactError(
                f"this is schema {self.schema} of {self.kind[:40]!r}; "
                f"wanted is schema {SCHEMA} of {KIND!r}: train it anew"
            )
        if self.features != FEATURES:
            raise ArtifactError("its features are not those of this version: train it anew")
        if not 0.5 <= self.alpha < 1:
            raise ArtifactError("alpha must be at least 0.5 and below 1")
        if not 1 <= self.longest_uncached_tokens <= 1 << 32 or self.rows < 1:
            raise ArtifactError("longest_uncached_tokens and rows must be at least 1")
        _check_tree(self.tree)
        if self.boosted is not None:
            _check_boosted(self.boosted)

    @property
    def root(self) -> Node:
        """The tree, ready to be walked."""
        t = self.tree
        return nest(t.feature, t.threshold, t.left, t.right, t.mean_s, t.quantile_s)

    @property
    def ensemble(self) -> Ensemble | None:
        """The boosted trees, ready to be evaluated; None where there are none."""
        if self.boosted is None:
            return None
        return Ensemble(
            self.boosted.start,
            [
                SmallTree(t.feature, t.threshold, t.left, t.right, t.value)
                for t in self.boosted.trees
            ],
        )


def decode(data: bytes) -> Artifact:
    """An artifact from the bytes of its file; ArtifactError says what is wrong with them."""
    if len(data) > MAX_BYTES:
        raise ArtifactError(f"more than {MAX_BYTES} bytes")
    try:
        return msgspec.json.decode(data, type=Artifact)
    except ArtifactError:
        raise
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ArtifactError(str(error)) from None


def encode(artifact: Artifact) -> bytes:
    """The file's bytes."""
    return msgspec.json.format(msgspec.json.encode(artifact), indent=0) + b"\n"


def load(path: Path) -> Artifact:
    """Read and check a file; ArtifactError, also where it cannot be read."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ArtifactError(f"{path}: {error.strerror}") from None
    try:
        return decode(data)
    except ArtifactError as error:
        raise ArtifactError(f"{path}: {error}") from None


def _check_tree(tree: TreeArrays) -> None:
    _check_nodes(tree, (tree.mean_s, tree.quantile_s), MAX_LEAVES)
    for values in (tree.mean_s, tree.quantile_s):
        for feature, value in zip(tree.feature, values, strict=True):
            if feature == LEAF and not SHORTEST_S <= value <= LONGEST_S:
                raise ArtifactError(f"a leaf's seconds are not in {SHORTEST_S:g}..{LONGEST_S:g}")


def _check_boosted(boosted: Boosted) -> None:
    if not 1 <= len(boosted.trees) <= MAX_TREES:
        raise ArtifactError(f"an ensemble has 1 to {MAX_TREES} trees")
    low = high = boosted.start
    for tree in boosted.trees:
        _check_nodes(tree, (tree.value,), BOOST_LEAVES)
        leaves = [v for f, v in zip(tree.feature, tree.value, strict=True) if f == LEAF]
        low += min(leaves)
        high += max(leaves)
    if not -30 < low <= high < 30:  # e^30 s: a sum that overflows nothing is still absurd
        raise ArtifactError("the ensemble's values add up to no time")


def _check_nodes(
    tree: TreeArrays | BoostedTree, values: Sequence[Sequence[float]], most_leaves: int
) -> None:
    """Every array as long; finite; a tree: each node but the root is one parent's child."""
    count = len(tree.feature)
    arrays: list[Sequence[float]] = [tree.threshold, tree.left, tree.right, *values]
    if any(len(array) != count for array in arrays):
        raise ArtifactError("a tree's arrays differ in length")
    if not 1 <= count <= 2 * most_leaves - 1:
        raise ArtifactError(f"a tree has 1 to {most_leaves} leaves")
    if not all(isfinite(value) for array in (tree.threshold, *values) for value in array):
        raise ArtifactError("a tree holds a number that is not finite")
    depth = [-1] * count
    depth[0] = 0
    for i, feature in enumerate(tree.feature):
        if depth[i] < 0:
            raise ArtifactError(f"node {i} has no parent")
        if feature == LEAF:
            continue
        if not 0 <= feature < len(FEATURES):
            raise ArtifactError(f"node {i} tests feature {feature}, which does not exist")
        for child in (tree.left[i], tree.right[i]):
            if not i < child < count or depth[child] >= 0:
                raise ArtifactError(f"node {i} has a child that is no node of its own")
            depth[child] = depth[i] + 1
    if max(depth) > MAX_DEPTH:
        raise ArtifactError(f"a tree is deeper than {MAX_DEPTH}")
