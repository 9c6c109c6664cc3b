"""Cumulative distributions of request lengths, linear between breakpoints."""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import msgspec

from planner.errors import PlanError

_POINTS = "give [tokens, share] pairs, tokens ascending, shares from 0 to 1"
_LAST_MAY_MISS = 1e-6


class Cdf(msgspec.Struct, frozen=True):
    """Share of requests of at most so many tokens; F(0) = 0, linear between breakpoints.

    Lengths are totals of prompt and answer; within a bucket the whole lengths previous + 1 ...
    tokens are equally likely.
    """

    tokens: tuple[int, ...]
    """Ascending, >= 1."""
    shares: tuple[float, ...]
    """Non-decreasing, 0 ... 1; the last is 1."""

    @property
    def points(self) -> tuple[tuple[int, float], ...]:
        """(tokens, share) pairs."""
        return tuple(zip(self.tokens, self.shares, strict=True))

    @property
    def longest_tokens(self) -> int:
        """The smallest length that no request exceeds."""
        return self.tokens[bisect_left(self.shares, 1.0)]

    def share(self, tokens: float) -> float:
        """F(tokens)."""
        index = bisect_left(self.tokens, tokens)
        if index == len(self.tokens):
            return 1.0
        if self.tokens[index] == tokens:
            return self.shares[index]
        low, below = (self.tokens[index - 1], self.shares[index - 1]) if index else (0, 0.0)
        step = (tokens - low) / (self.tokens[index] - low)
        return below + step * (self.shares[index] - below)

    def quantile(self, share: float) -> float:
        """The interpolated length, in tokens, that a share of requests does not exceed."""
        index = bisect_left(self.shares, share)
        low, below = (self.tokens[index - 1], self.shares[index - 1]) if index else (0, 0.0)
        rise = self.shares[index] - below
        step = (share - below) / rise if rise > 0 else 1.0
        return low + step * (self.tokens[index] - low)

    def with_breakpoint(self, tokens: int) -> "Cdf":
        """The same distribution with `tokens` among its breakpoints."""
        if tokens in self.tokens or tokens >= self.tokens[-1] or tokens < 1:
            return self
        points = sorted([*self.points, (tokens, self.share(tokens))])
        return Cdf(tuple(t for t, _ in points), tuple(s for _, s in points))


def cdf_from_points(points: Iterable[Sequence[float]]) -> Cdf:
    """Check and build a distribution; raises PlanError for invalid breakpoints."""
    pairs = []
    for point in points:
        if len(point) != 2 or not all(isinstance(v, int | float) for v in point):
            raise PlanError(f"{point!r} is not a breakpoint", _POINTS)
        tokens, share = float(point[0]), float(point[1])
        if tokens != int(tokens) or tokens < 1:
            raise PlanError(f"{point[0]!r} is not a number of tokens", "use whole numbers >= 1")
        pairs.append((int(tokens), share))
    if not pairs:
        raise PlanError("the distribution has no breakpoints", _POINTS)
    _check(pairs)
    shares = [share for _, share in pairs]
    shares[-1] = 1.0
    return Cdf(tuple(tokens for tokens, _ in pairs), tuple(shares))


def cdf_from_json(document: Any) -> Cdf:
    """Parse [[tokens, share], ...] or {"cdf": [...]}; raises PlanError for anything else."""
    points = document.get("cdf") if isinstance(document, dict) else document
    if not isinstance(points, list) or not all(isinstance(p, list) for p in points):
        raise PlanError("not a length distribution", 'write [[tokens, share], ...] or {"cdf": ...}')
    return cdf_from_points(points)


def cdf_from_totals(totals: Iterable[int], at: Sequence[int]) -> Cdf:
    """The empirical distribution of total lengths, read at `at` and at the longest."""
    ordered = sorted(totals)
    if not ordered:
        raise PlanError("the trace is empty", "give one with requests in it")
    marks = sorted({*(m for m in at if m < ordered[-1]), ordered[-1]})
    rank, shares = 0, []
    for mark in marks:
        while rank < len(ordered) and ordered[rank] <= mark:
            rank += 1
        shares.append(rank / len(ordered))
    return Cdf(tuple(marks), tuple(shares))


def _check(pairs: list[tuple[int, float]]) -> None:
    for tokens, share in pairs:
        if not 0.0 <= share <= 1.0:
            raise PlanError(
                f"the share at {tokens} tokens is {share:g}", "shares lie between 0 and 1"
            )
    for (before, low), (tokens, high) in pairwise(pairs):
        if tokens <= before:
            raise PlanError(f"{tokens} tokens follow {before}", "sort breakpoints by tokens")
        if high < low:
            raise PlanError(
                f"the share falls from {low:g} to {high:g} at {tokens} tokens",
                "a cumulative share never falls; check the order and the values",
            )
    if pairs[-1][1] < 1.0 - _LAST_MAY_MISS:
        raise PlanError(
            f"the last share is {pairs[-1][1]:g}", "add the longest length, with share 1"
        )
