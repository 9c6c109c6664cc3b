"""Trained predictors as a file: versioned JSON with a section per pool, validated before use.

The file holds arrays of numbers, no pickle and no code. An untrusted file can predict wrongly, but
it cannot cause an endless tree walk, an infinite prediction, or large memory use.
"""

from collections.abc import Sequence
from math import isfinite
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec

from predictor.features import FEATURES
from predictor.prior import PriorRates
from predictor.tree import BOOST_LEAVES, LEAF, Ensemble, Node, SmallTree, nest

SCHEMA: Final = 2
KIND: Final = "sluice-prefill-predictor"
MAX_BYTES: Final = 16 << 20
MAX_SECTIONS: Final = 256
MAX_LEAVES: Final = 1024
MAX_DEPTH: Final = 64
MAX_TREES: Final = 256
SHORTEST_S: Final = 1e-4
LONGEST_S: Final = 3600.0

Seconds = Annotated[float, msgspec.Meta(ge=SHORTEST_S, le=LONGEST_S)]


class ArtifactError(ValueError):
    """The file is not usable; the message says why in one sentence, `fix` what to do."""

    def __init__(self, problem: str, fix: str = "give a file that `sluice train -o` wrote") -> None:
        super().__init__(problem)
        self.fix = fix


class _Part(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class TreeArrays(_Part, frozen=True, kw_only=True):
    """A tree: entry i of each array is node i, node 0 is the root, children come after parents.

    `feature` indexes the artifact's features, -1 at a leaf; `left` is taken if x <= threshold.
    """

    feature: tuple[int, ...]
    threshold: tuple[float, ...]
    left: tuple[int, ...]
    right: tuple[int, ...]
    mean_s: tuple[float, ...]
    """At leaves: mean prefill time of their rows."""
    quantile_s: tuple[float, ...]
    """At leaves: alpha quantile of the prefill time."""


class BoostedTree(_Part, frozen=True, kw_only=True):
    """One tree of an ensemble; `value` is added to the log of the quantile."""

    feature: tuple[int, ...]
    threshold: tuple[float, ...]
    left: tuple[int, ...]
    right: tuple[int, ...]
    value: tuple[float, ...]


class Boosted(_Part, frozen=True, kw_only=True):
    """log(quantile in seconds) = start + the sum of the trees' values."""

    start: float
    trees: tuple[BoostedTree, ...]


class PoolSection(_Part, frozen=True, kw_only=True):
    """The trained predictor of one pool; raises ArtifactError for values out of range."""

    model: str = ""
    pool: str = ""
    alpha: float
    """Level of the quantiles, e.g. 0.95."""
    tree: TreeArrays
    rates: PriorRates
    """Engine rates fitted to the same rows; they also start the prior."""
    longest_uncached_tokens: int
    """Longest among the rows; longer prompts are extrapolated in proportion."""
    rows: int
    boosted: Boosted | None = None
    """If present, an ensemble gives the quantiles instead of the tree's leaves."""
    report: dict[str, Any] = {}
    """Evaluation by `judge` at training, for people to read."""

    def __post_init__(self) -> None:
        if not 0.5 <= self.alpha < 1:
            raise ArtifactError("alpha must be at least 0.5 and below 1")
        if not 1 <= self.longest_uncached_tokens <= 1 << 32 or self.rows < 1:
            raise ArtifactError("longest_uncached_tokens and rows must be at least 1")
        _check_tree(self.tree)
        if self.boosted is not None:
            _check_boosted(self.boosted)

    @property
    def name(self) -> str:
        """Model and pool, as people write them."""
        return f"{self.model}/{self.pool}"

    @property
    def root(self) -> Node:
        """The tree as nested tuples, see `predictor.tree`."""
        t = self.tree
        return nest(t.feature, t.threshold, t.left, t.right, t.mean_s, t.quantile_s)

    @property
    def ensemble(self) -> Ensemble | None:
        """The boosted trees, ready for evaluation; None without any."""
        if self.boosted is None:
            return None
        return Ensemble(
            self.boosted.start,
            [
                SmallTree(t.feature, t.threshold, t.left, t.right, t.value)
                for t in self.boosted.trees
            ],
        )


class Artifact(_Part, frozen=True, kw_only=True):
    """The whole file: one section per pool; raises ArtifactError."""

    schema: int = SCHEMA
    kind: str = KIND
    features: tuple[str, ...] = FEATURES
    sections: tuple[PoolSection, ...]

    def __post_init__(self) -> None:
        if self.features != FEATURES:
            raise ArtifactError("its features differ from this version's", _AGAIN)
        if not 1 <= len(self.sections) <= MAX_SECTIONS:
            raise ArtifactError(f"a predictor has 1 to {MAX_SECTIONS} sections")
        names = [(section.model, section.pool) for section in self.sections]
        if len(set(names)) < len(names):
            raise ArtifactError("two sections are of the same pool")

    def section(self, model: str, pool: str) -> PoolSection | None:
        """The section of a pool, or None."""
        for section in self.sections:
            if (section.model, section.pool) == (model, pool):
                return section
        return None


class _Head(msgspec.Struct, frozen=True):
    """What tells one version of the format from another."""

    schema: int
    kind: str


_AGAIN: Final = "train again: `sluice train --log requests.jsonl -o FILE`"


def decode(data: bytes) -> Artifact:
    """Decode and validate a file's bytes; raises ArtifactError."""
    if len(data) > MAX_BYTES:
        raise ArtifactError(f"more than {MAX_BYTES} bytes")
    try:
        head = msgspec.json.decode(data, type=_Head)
        if (head.schema, head.kind) != (SCHEMA, KIND):
            raise ArtifactError(
                f"this is schema {head.schema} of {head.kind[:40]!r}, not {SCHEMA} of {KIND!r}",
                _AGAIN,
            )
        return msgspec.json.decode(data, type=Artifact)
    except ArtifactError:
        raise
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ArtifactError(str(error)) from None


def encode(artifact: Artifact) -> bytes:
    """Encode an artifact to the bytes of its file."""
    return msgspec.json.format(msgspec.json.encode(artifact), indent=0) + b"\n"


def load(path: Path) -> Artifact:
    """Read and validate a file; raises ArtifactError, also when it cannot be read."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ArtifactError(f"{path}: {error.strerror}") from None
    try:
        return decode(data)
    except ArtifactError as error:
        raise ArtifactError(f"{path}: {error}", error.fix) from None


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
    if not -30 < low <= high < 30:  # e^30 s would not overflow but is absurd
        raise ArtifactError("the ensemble's values add up to an absurd time")


def _check_nodes(
    tree: TreeArrays | BoostedTree, values: Sequence[Sequence[float]], most_leaves: int
) -> None:
    """Check equal lengths, finite numbers, and one parent for each node but the root."""
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
                raise ArtifactError(f"node {i} has a child that is not a later node of its own")
            depth[child] = depth[i] + 1
    if max(depth) > MAX_DEPTH:
        raise ArtifactError(f"a tree is deeper than {MAX_DEPTH}")
