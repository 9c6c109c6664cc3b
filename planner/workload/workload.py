"""A workload: a distribution of total lengths, or pairs of prompt and answer lengths."""

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from planner.errors import PlanError
from planner.workload.distribution import Cdf, cdf_from_totals

Floats = NDArray[np.float64]

GRID_TOKENS: Final = (
    *(64, 128, 256, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12_288),
    *(16_384, 24_576, 32_768, 49_152, 65_536, 98_304, 131_072, 196_608, 262_144, 524_288),
)
"""Lengths at which a trace's distribution is read, and the boundaries that a search tries."""


class Pairs(msgspec.Struct, frozen=True, kw_only=True):
    """Requests with both lengths known; arrays of one length, in no particular order."""

    prompts: Floats
    """Prompt tokens, >= 1."""
    answers: Floats
    """Answer tokens, >= 1."""
    weights: Floats
    """Share of all requests; they sum to 1."""

    @property
    def totals(self) -> Floats:
        """Prompt and answer together, tokens."""
        return self.prompts + self.answers


class Compressible(msgspec.Struct, frozen=True, kw_only=True):
    """p_c: the share of prompts in a compression window that can be cut."""

    share: float
    said: str
    """Where it is from, in words."""
    when: str = "any"
    """The `compression.when` under which it holds."""
    by_request: Floats | None = None
    """p_c of each request of `pairs`, where it was observed for some lengths only."""


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """Exactly one of `cdf` and `pairs` is given; the other fields are optional knowledge."""

    name: str
    source: str = ""
    """Origin of the figures, and their licence."""
    cdf: Cdf | None = None
    pairs: Pairs | None = None
    input_share: float = 0.8
    """Prompt's share of a total, if only totals are known; 0 < share < 1."""
    squeezable: Floats | None = None
    """Share of each request of `pairs` whose content may be compressed; None if all may."""
    categories: tuple[str, ...] | None = None
    """Content of each request of `pairs`: prose, code, ..."""
    asked: Floats | None = None
    """Token limit that each request of `pairs` set; NaN for none."""
    cached_share: float | None = None
    """Share of prompt tokens that engines found in their prefix cache."""
    preempted_share: float | None = None
    """Preemptions per request."""
    compressible: Compressible | None = None
    """p_c as the source observed it."""
    rate_said: str = "as the source states it"
    """What `rate_per_s` is, in words."""
    model: str = ""
    """The only model of its requests; "" if not known."""
    rate_per_s: float | None = None
    """Observed rate, over busy time."""
    times_s: Floats | None = None
    """When requests were asked for, ascending; None if not known."""
    entitlements: tuple[str, ...] | None = None
    """Entitlement of each request of `pairs`; None if not known."""
    notes: tuple[str, ...] = ()
    """Caveats for readers of a plan."""

    @property
    def longest_tokens(self) -> int:
        """The longest total length."""
        if self.cdf is not None:
            return self.cdf.longest_tokens
        return int(np.ceil(self._pairs().totals.max()))

    def share(self, tokens: float) -> float:
        """F(tokens): share of requests whose total length is at most that."""
        if self.cdf is not None:
            return self.cdf.share(tokens)
        pairs = self._pairs()
        return float(pairs.weights[pairs.totals <= tokens].sum())

    def as_cdf(self) -> Cdf:
        """The distribution of totals alone; a trace's is read at GRID_TOKENS."""
        if self.cdf is not None:
            return self.cdf
        pairs = self._pairs()
        if np.ptp(pairs.weights) == 0:
            return cdf_from_totals(map(int, np.ceil(pairs.totals)), GRID_TOKENS)
        longest = self.longest_tokens
        marks = [m for m in GRID_TOKENS if m < longest]
        return Cdf((*marks, longest), (*(self.share(m) for m in marks), 1.0))

    def mean_lengths(self) -> tuple[float, float]:
        """Mean prompt and answer, tokens."""
        if self.cdf is None:
            pairs = self._pairs()
            return float(pairs.prompts @ pairs.weights), float(pairs.answers @ pairs.weights)
        edges = np.array((0, *self.cdf.tokens))
        mass = np.diff(np.array((0.0, *self.cdf.shares)))
        mean = float(((edges[1:] + edges[:-1] + 1) / 2) @ mass)
        return self.input_share * mean, (1 - self.input_share) * mean

    def _pairs(self) -> Pairs:
        if self.pairs is None:
            raise PlanError(f"{self.name} has no lengths", "give a distribution or a trace")
        return self.pairs


def from_cdf(
    cdf: Cdf, *, name: str = "distribution", source: str = "", input_share: float = 0.8
) -> Workload:
    """A workload of totals only; each prompt is `input_share` of its total."""
    if not 0 < input_share < 1:
        raise PlanError(f"an input share of {input_share:g}", "give one between 0 and 1")
    note = (
        f"only totals are known: {100 * input_share:g} % of every total is taken to be prompt; "
        "a trace with both lengths plans better"
    )
    return Workload(name=name, source=source, cdf=cdf, input_share=input_share, notes=(note,))


def from_lengths(
    prompts: Sequence[float] | Floats,
    answers: Sequence[float] | Floats,
    *,
    name: str = "trace",
    source: str = "",
    weights: Sequence[float] | Floats | None = None,
    asked: Sequence[float] | Floats | None = None,
    cached_share: float | None = None,
    rate_per_s: float | None = None,
    categories: tuple[str, ...] | None = None,
    notes: tuple[str, ...] = (),
) -> Workload:
    """A workload of joint lengths, tokens; a missing prompt or answer counts as one token."""
    if len(prompts) == 0:
        raise PlanError("the trace is empty", "give one with requests in it")
    ins = np.maximum(np.asarray(prompts, dtype=np.float64), 1.0)
    outs = np.maximum(np.asarray(answers, dtype=np.float64), 1.0)
    if ins.shape != outs.shape:
        raise PlanError("prompts and answers differ in number", "give one of each per request")
    if not (np.isfinite(ins).all() and np.isfinite(outs).all()):
        raise PlanError("a length is not a number", "remove the requests without lengths")
    mass = np.full(ins.shape, 1.0) if weights is None else np.asarray(weights, dtype=np.float64)
    return Workload(
        name=name,
        source=source,
        pairs=Pairs(prompts=ins, answers=outs, weights=mass / mass.sum()),
        asked=None if asked is None else np.asarray(asked, dtype=np.float64),
        cached_share=cached_share,
        rate_per_s=rate_per_s,
        categories=categories,
        notes=notes,
    )


def by_category(workload: Workload, compressible: Mapping[str, float]) -> Workload:
    """Set p_c by category of content; other categories are not compressed.

    Raises PlanError if the workload has no categories.
    """
    if workload.categories is None or workload.pairs is None:
        raise PlanError(
            f"{workload.name} does not say what its requests hold",
            "give one --pc for all, or a request log with categories",
        )
    if not all(0 <= share <= 1 for share in compressible.values()):
        raise PlanError("a p_c is outside 0 ... 1", "give shares from 0 to 1")
    shares = np.array([compressible.get(name, 0.0) for name in workload.categories])
    return msgspec.structs.replace(workload, squeezable=shares)
