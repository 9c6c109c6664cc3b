"""Online .95 quantiles of completion tokens, per endpoint, category and tenant.

Rules:
- Logarithmic buckets (ratio 1.07) up to 2^20 tokens; a bucket answers with its upper edge.
- Old answers fade: weights decay with a memory of 2,000 observations.
- A cut answer (client left, limit reached) is a lower bound: censored, Kaplan-Meier.
- A level is believed from 20 whole answers on; before, the next wider level is asked:
  (endpoint, category, tenant), (endpoint, category), (endpoint), then PRIOR_TOKENS.
- The number of tenants' histograms is bounded: the least recently taught goes first.
"""

import math
from typing import Final

from gateway.policy.learned import Sums

QUANTILE: Final = 0.95
PRIOR_TOKENS: Final = 1024
MAX_TOKENS: Final = 2**20
MEMORY: Final = 2000
TRUSTED_OBSERVATIONS: Final = 20
MAX_TENANT_KEYS: Final = 4096

_RATIO = 1.07
_PER_LOG = 1 / math.log(_RATIO)
_GROWTH = 1 / (1 - 1 / MEMORY)
_RESCALE = 1e12
_STALE = 1e-6
"""Weights below this are dropped when weights are rescaled."""


def bucket_of(tokens: int) -> int:
    """Index of the bucket that holds `tokens`."""
    return int(math.log(tokens) * _PER_LOG) if tokens > 1 else 0


def upper_edge(bucket: int) -> int:
    """Largest count that falls into `bucket` (at least 1)."""
    return max(1, math.ceil(_RATIO ** (bucket + 1)) - 1)


_KEYS = frozenset(f"{kind}{n}" for kind in "wc" for n in range(bucket_of(MAX_TOKENS) + 1))


class Histogram:
    """Decaying counts of whole and of cut answers by length, and their cached quantile.

    Instead of all old weights shrinking, the weight of a new observation grows.
    """

    __slots__ = ("_cut", "_pending", "_quantile", "_unit", "_whole", "whole_observations")

    def __init__(self) -> None:
        self._whole: dict[int, float] = {}
        self._cut: dict[int, float] = {}
        self._unit = 1.0
        self._pending = 0
        self._quantile = 0
        self.whole_observations = 0

    def add(self, tokens: int, *, cut: bool) -> None:
        """Take one answer's length; `cut` when it could have been longer."""
        self.count(bucket_of(tokens), cut=cut)

    def count(self, bucket: int, *, cut: bool) -> None:
        """The same by the bucket."""
        counts = self._cut if cut else self._whole
        counts[bucket] = counts.get(bucket, 0.0) + self._unit
        self.whole_observations += not cut
        self._unit *= _GROWTH
        if self._unit > _RESCALE:
            self._rescale()
        self._pending += 1

    def quantile(self) -> int:
        """The QUANTILE of lengths, recomputed after every few observations."""
        if self._pending and (
            not self._quantile or self._pending * 16 >= min(self.whole_observations, 800)
        ):
            self._quantile = self._kaplan_meier()
            self._pending = 0
        return self._quantile

    def learned(self) -> Sums:
        """See Part: weights by bucket, of whole (w) and of cut (c) answers."""
        unit = self._unit
        sums = {f"w{bucket}": weight / unit for bucket, weight in self._whole.items()}
        sums.update((f"c{bucket}", weight / unit) for bucket, weight in self._cut.items())
        return Sums(epoch=0, n=self.whole_observations, sums=sums)

    def accepts(self, sums: Sums) -> bool:
        """See Part: weights of buckets that there are."""
        weights = sums.sums.values()
        return sums.sums.keys() <= _KEYS and min(weights) >= 0 and max(weights) <= MEMORY + 1

    def adopt(self, sums: Sums) -> None:
        """See Part."""
        kept = {key: weight for key, weight in sums.sums.items() if weight > _STALE}
        self._whole = {int(key[1:]): weight for key, weight in kept.items() if key[0] == "w"}
        self._cut = {int(key[1:]): weight for key, weight in kept.items() if key[0] == "c"}
        self._unit = 1.0
        self.whole_observations = sums.n if self._whole else 0
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
        # The longest answers were all cut: how long they would have been is not known.
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
    """q_out with its fallbacks, for one model."""

    __slots__ = ("_by_category", "_by_endpoint", "_by_tenant", "_max_tenant_keys", "_prior_tokens")

    def __init__(
        self, max_tenant_keys: int = MAX_TENANT_KEYS, *, prior_tokens: int = PRIOR_TOKENS
    ) -> None:
        self._prior_tokens = prior_tokens
        self._by_tenant: dict[tuple[str, str, str], Histogram] = {}
        self._by_category: dict[tuple[str, str], Histogram] = {}
        self._by_endpoint: dict[str, Histogram] = {}
        self._max_tenant_keys = max_tenant_keys

    def expected(self, endpoint: str, category: str, tenant: str) -> int:
        """The .95 quantile of the narrowest level that is believed, in tokens."""
        found = self._by_tenant.get((endpoint, category, tenant))
        if found and found.whole_observations >= TRUSTED_OBSERVATIONS:
            return found.quantile()
        found = self._by_category.get((endpoint, category))
        if found and found.whole_observations >= TRUSTED_OBSERVATIONS:
            return found.quantile()
        found = self._by_endpoint.get(endpoint)
        if found and found.whole_observations >= TRUSTED_OBSERVATIONS:
            return found.quantile()
        return self._prior_tokens

    def add(self, endpoint: str, category: str, tenant: str, tokens: int, *, cut: bool) -> None:
        """Teach all three levels one answer's length, in [1, MAX_TOKENS]."""
        key = (endpoint, category, tenant)
        # Popped and put back: a dict's order is then that of the last lesson.
        histogram = self._by_tenant.pop(key, None)
        if histogram is None:
            histogram = Histogram()
            if len(self._by_tenant) >= self._max_tenant_keys:
                del self._by_tenant[next(iter(self._by_tenant))]
        self._by_tenant[key] = histogram
        bucket = bucket_of(tokens)
        histogram.count(bucket, cut=cut)
        self.histogram(endpoint, category).count(bucket, cut=cut)
        self.histogram(endpoint, "").count(bucket, cut=cut)

    def histograms(self) -> dict[str, Histogram]:
        """`endpoint` and `endpoint/category` -> histogram; tenants' own stay here."""
        found = dict(self._by_endpoint)
        for (endpoint, category), histogram in self._by_category.items():
            found[f"{endpoint}/{category}"] = histogram
        return found

    def histogram(self, endpoint: str, category: str) -> Histogram:
        """The histogram of an endpoint and category ("": of all), made when it is new."""
        if category:
            found = self._by_category.get((endpoint, category))
            if found is None:
                found = self._by_category[endpoint, category] = Histogram()
            return found
        found = self._by_endpoint.get(endpoint)
        if found is None:
            found = self._by_endpoint[endpoint] = Histogram()
        return found

    def __len__(self) -> int:
        return len(self._by_tenant) + len(self._by_category) + len(self._by_endpoint)

    def snapshot(self) -> dict[str, int]:
        """`endpoint` and `endpoint/category` -> expected output tokens, where believed."""
        found = {
            endpoint: histogram.quantile()
            for endpoint, histogram in self._by_endpoint.items()
            if histogram.whole_observations >= TRUSTED_OBSERVATIONS
        }
        for (endpoint, category), histogram in self._by_category.items():
            if histogram.whole_observations >= TRUSTED_OBSERVATIONS:
                found[f"{endpoint}/{category}"] = histogram.quantile()
        return found
