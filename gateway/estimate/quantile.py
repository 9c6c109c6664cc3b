"""Online .95 quantiles of completion tokens, per endpoint, category and tenant.

Rules:
- Lengths are counted in logarithmic buckets (ratio 1.07) up to 2^20 tokens; a quantile is the
  upper edge of its bucket.
- Old answers fade: weights decay with a memory of 2,000 observations.
- A cut answer (client left, limit reached) is a lower bound of its length: a censored
  observation of the Kaplan-Meier estimator.
- The tenant's own answers decide: those of the category first, then all of the endpoint. A
  tenant with fewer than 20 whole answers gets the tenants' median, by category, then by
  endpoint, then PRIOR_TOKENS (`gateway.estimate.by_tenant`).
"""

import math
from collections.abc import Iterator, Sequence
from typing import Final

from gateway.estimate.by_tenant import TAUGHT, ByTenant, median
from gateway.estimate.merge import PartState

QUANTILE: Final = 0.95
PRIOR_TOKENS: Final = 1024
MAX_TOKENS: Final = 2**20
MEMORY: Final = 2000

_RATIO = 1.07
_PER_LOG = 1 / math.log(_RATIO)
_GROWTH = 1 / (1 - 1 / MEMORY)
_RESCALE = 1e12
_STALE = 1e-6
"""Rescaling drops weights below this."""


def bucket_of(tokens: int) -> int:
    """Index of the bucket that holds `tokens`."""
    return int(math.log(tokens) * _PER_LOG) if tokens > 1 else 0


def upper_edge(bucket: int) -> int:
    """Largest count that falls into `bucket` (at least 1)."""
    return max(1, math.ceil(_RATIO ** (bucket + 1)) - 1)


_KEYS = frozenset(f"{kind}{n}" for kind in "wc" for n in range(bucket_of(MAX_TOKENS) + 1))


class LengthHistogram:
    """Decaying counts of whole and of cut answers by length, and their cached quantile.

    To decay, the weight of each new observation grows; old weights stay until rescaled.
    """

    __slots__ = ("_cut", "_pending", "_quantile", "_unit", "_whole", "observations")

    def __init__(self) -> None:
        self._whole: dict[int, float] = {}
        self._cut: dict[int, float] = {}
        self._unit = 1.0
        self._pending = 0
        self._quantile = 0
        self.observations = 0
        """Whole answers counted."""

    def add(self, tokens: int, *, cut: bool) -> None:
        """Count one answer of `tokens`; `cut`: it could have been longer."""
        self.count(bucket_of(tokens), cut=cut)

    def count(self, bucket: int, *, cut: bool) -> None:
        """Count one answer by its length's bucket."""
        counts = self._cut if cut else self._whole
        counts[bucket] = counts.get(bucket, 0.0) + self._unit
        self.observations += not cut
        self._unit *= _GROWTH
        if self._unit > _RESCALE:
            self._rescale()
        self._pending += 1

    def quantile(self) -> int:
        """The QUANTILE of lengths, recomputed after every few observations."""
        if self._pending and (
            not self._quantile or self._pending * 16 >= min(self.observations, 800)
        ):
            self._quantile = self._kaplan_meier()
            self._pending = 0
        return self._quantile

    def agree(self, others: Sequence["LengthHistogram"]) -> None:
        """Set the quantile to the median of the others'."""
        self.observations = TAUGHT
        self._quantile = round(median([other.quantile() for other in others]))

    def learned(self) -> PartState:
        """See Part: weights by bucket, of whole (w) and of cut (c) answers."""
        unit = self._unit
        sums = {f"w{bucket}": weight / unit for bucket, weight in self._whole.items()}
        sums.update((f"c{bucket}", weight / unit) for bucket, weight in self._cut.items())
        return PartState(epoch=0, n=self.observations, sums=sums)

    def accepts(self, state: PartState) -> bool:
        """See Part: weights within bounds, of existing buckets."""
        weights = state.sums.values()
        return state.sums.keys() <= _KEYS and min(weights) >= 0 and max(weights) <= MEMORY + 1

    def adopt(self, state: PartState) -> None:
        kept = {key: weight for key, weight in state.sums.items() if weight > _STALE}
        self._whole = {int(key[1:]): weight for key, weight in kept.items() if key[0] == "w"}
        self._cut = {int(key[1:]): weight for key, weight in kept.items() if key[0] == "c"}
        self._unit = 1.0
        self.observations = state.n if self._whole else 0
        self._quantile = 0
        self._pending = 1 if kept else 0

    def _kaplan_meier(self) -> int:
        whole, cut = self._whole, self._cut
        buckets = sorted(whole.keys() | cut.keys())
        at_risk = sum(whole.values(), 0.0) + sum(cut.values(), 0.0)
        survival = 1.0
        for bucket in buckets:
            ended = whole.get(bucket, 0.0)
            survival *= 1 - ended / at_risk if ended < at_risk else 0.0
            if survival <= 1 - QUANTILE + 1e-9:
                return upper_edge(bucket)
            at_risk -= ended + cut.get(bucket, 0.0)
            if at_risk <= 0:
                break
        # The longest answers were all cut, so their full length is unknown.
        return max(upper_edge(buckets[-1]), PRIOR_TOKENS)

    def _rescale(self) -> None:
        for counts in (self._whole, self._cut):
            for bucket, weight in list(counts.items()):
                if weight / self._unit < _STALE:
                    del counts[bucket]
                else:
                    counts[bucket] = weight / self._unit
        self._unit = 1.0


class OutputLengths:
    """The expected output q_out with its fallbacks, for one model."""

    __slots__ = ("_levels", "_prior_tokens")

    def __init__(self, *, prior_tokens: int = PRIOR_TOKENS) -> None:
        self._prior_tokens = prior_tokens
        self._levels: dict[tuple[str, str], ByTenant[LengthHistogram]] = {}
        """(endpoint, category) -> histograms; category "" is all categories together."""

    def expected(self, endpoint: str, category: str, tenant: str) -> int:
        """The .95 quantile, in tokens, of the narrowest level with enough observations."""
        narrow, wide = self._levels.get((endpoint, category)), self._levels.get((endpoint, ""))
        if wide is None:  # then narrow is None, too: `add` teaches both
            return self._prior_tokens
        found = None if narrow is None else narrow.own(tenant)
        if found is None:
            found = wide.own(tenant)
        if found is None and narrow is not None:
            found = narrow.agreed()
        if found is None:
            found = wide.agreed()
        return self._prior_tokens if found is None else found.quantile()

    def add(self, endpoint: str, category: str, tenant: str, tokens: int, *, cut: bool) -> None:
        """Teach the tenant's histograms of the category and of all categories."""
        bucket = bucket_of(tokens)
        self._level(endpoint, category).taught(tenant).count(bucket, cut=cut)
        self._level(endpoint, "").taught(tenant).count(bucket, cut=cut)

    def histograms(self, most: int) -> Iterator[tuple[str, LengthHistogram]]:
        """`endpoint@tenant`, `endpoint/category@tenant` -> histogram, of the last taught."""
        for (endpoint, category), level in self._levels.items():
            name = f"{endpoint}/{category}" if category else endpoint
            for tenant, histogram in level.latest(most):
                yield f"{name}@{tenant}", histogram

    def part(self, endpoint: str, category: str, tenant: str) -> LengthHistogram:
        """A tenant's histogram, made if it is new; category "" is all categories together."""
        return self._level(endpoint, category).part(tenant)

    def __len__(self) -> int:
        return sum(map(len, self._levels.values()))

    def snapshot(self) -> dict[str, int]:
        """`endpoint` and `endpoint/category` -> median over tenants with enough observations."""
        found = {}
        for (endpoint, category), level in sorted(self._levels.items()):
            taught = [own.quantile() for _, own in level.latest() if own.observations >= TAUGHT]
            if taught:
                found[f"{endpoint}/{category}" if category else endpoint] = round(median(taught))
        return found

    def _level(self, endpoint: str, category: str) -> ByTenant[LengthHistogram]:
        found = self._levels.get((endpoint, category))
        if found is None:
            found = ByTenant(LengthHistogram, LengthHistogram.agree)
            self._levels[endpoint, category] = found
        return found
