"""Traffic of a fleet: arrival times, and the lengths of prompts and answers.

Lengths come from breakpoints of a distribution of totals (FleetOpt, section 7.1), from observed
pairs, or from totals of which a random share is answer (token-budget paper, appendix A). All
draws come from one numpy generator, so a seed determines a workload exactly.
"""

from collections.abc import Sequence
from typing import Final, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Random = np.random.Generator

Breakpoints = Sequence[tuple[int, float]]
"""(tokens, share of requests of at most so many): ascending, the last share 1, F(0) = 0."""

MIN_OUTPUT_SHARE: Final = 0.02
MAX_OUTPUT_SHARE: Final = 0.95


class Traffic(msgspec.Struct, frozen=True, kw_only=True):
    """Requests in order of arrival; arrays of equal length. Raises ValueError otherwise."""

    arrival_s: Floats
    """Seconds from the start, ascending, >= 0."""
    prompt_tokens: Ints
    """Prompt tokens, >= 1."""
    output_tokens: Ints
    """Answer tokens, >= 1."""

    def __post_init__(self) -> None:
        shapes = {self.arrival_s.shape, self.prompt_tokens.shape, self.output_tokens.shape}
        if len(shapes) != 1 or self.arrival_s.ndim != 1 or not len(self.arrival_s):
            raise ValueError("traffic needs requests: times and both lengths of each")
        if not np.isfinite(self.arrival_s).all() or self.arrival_s[0] < 0:
            raise ValueError("arrival times must be numbers, at least 0")
        if (np.diff(self.arrival_s) < 0).any():
            raise ValueError("arrival times must ascend: sort the requests")
        if min(self.prompt_tokens.min(), self.output_tokens.min()) < 1:
            raise ValueError("prompts and answers must have at least one token")

    def __len__(self) -> int:
        return len(self.arrival_s)

    @property
    def total_tokens(self) -> Ints:
        """Prompt and answer together."""
        return self.prompt_tokens + self.output_tokens

    @property
    def rate_per_s(self) -> float:
        """Requests per second up to the last arrival; infinite when all come at once."""
        last_s = float(self.arrival_s[-1])
        return len(self) / last_s if last_s > 0 else np.inf


class Lengths(Protocol):
    """A joint distribution of prompt and answer lengths."""

    def sample(self, count: int, random: Random) -> tuple[Ints, Ints]:
        """Prompt and answer tokens of so many requests, both >= 1."""
        ...


class CdfLengths:
    """Totals uniform within each bucket of whole lengths; a fixed share of each is prompt.

    l_in = max(1, int(share L)), l_out = max(1, L - l_in), as FleetOpt's simulator splits them.
    """

    def __init__(self, breakpoints: Breakpoints, input_share: float = 0.8) -> None:
        if not 0 < input_share < 1:
            raise ValueError(f"the input share must lie between 0 and 1, not {input_share}")
        self._edges, self._shares = _columns(breakpoints)
        self._input_share = input_share

    def sample(self, count: int, random: Random) -> tuple[Ints, Ints]:
        index = np.searchsorted(self._shares[1:], random.random(count), side="left")
        low, high = self._edges[index] + 1, self._edges[index + 1]
        totals = random.integers(low, high, endpoint=True)
        prompts = np.maximum(1, (self._input_share * totals).astype(np.int64))
        return prompts, np.maximum(1, totals - prompts)


class SplitLengths:
    """Totals linear between breakpoints; the answer's share is normal, clipped to [.02, .95].

    The token-budget paper's workloads (appendix A); lengths are rounded to whole tokens.
    """

    def __init__(self, breakpoints: Breakpoints, output_mean: float, output_std: float) -> None:
        self._edges, self._shares = _columns(breakpoints)
        self._mean, self._std = output_mean, output_std

    def sample(self, count: int, random: Random) -> tuple[Ints, Ints]:
        totals = np.interp(random.random(count), self._shares, self._edges)
        share = np.clip(
            random.normal(self._mean, self._std, count), MIN_OUTPUT_SHARE, MAX_OUTPUT_SHARE
        )
        outputs = np.maximum(1, np.rint(totals * share)).astype(np.int64)
        return np.maximum(1, np.rint(totals).astype(np.int64) - outputs), outputs


class PairLengths:
    """Observed pairs, drawn with replacement, optionally by weight."""

    def __init__(
        self,
        prompts: Sequence[float] | Floats | Ints,
        outputs: Sequence[float] | Floats | Ints,
        weights: Sequence[float] | Floats | None = None,
    ) -> None:
        """Lengths are rounded up to whole tokens; `weights` need not sum to 1."""
        self._prompts = np.maximum(1, np.ceil(prompts)).astype(np.int64)
        self._outputs = np.maximum(1, np.ceil(outputs)).astype(np.int64)
        if self._prompts.shape != self._outputs.shape or not len(self._prompts):
            raise ValueError("pairs need as many prompts as answers, and at least one")
        mass = np.ones(len(self._prompts)) if weights is None else np.asarray(weights, float)
        if mass.shape != self._prompts.shape or (mass < 0).any() or not mass.sum() > 0:
            raise ValueError("pairs need a weight each, none below 0 and not all 0")
        self._up_to = np.cumsum(mass) / mass.sum()

    def sample(self, count: int, random: Random) -> tuple[Ints, Ints]:
        index = np.searchsorted(self._up_to, random.random(count), side="right")
        index = np.minimum(index, len(self._prompts) - 1)
        return self._prompts[index], self._outputs[index]


def traffic(lengths: Lengths, arrival_s: Floats, random: Random) -> Traffic:
    """Requests at these times with lengths drawn for each."""
    prompts, outputs = lengths.sample(len(arrival_s), random)
    return Traffic(arrival_s=arrival_s, prompt_tokens=prompts, output_tokens=outputs)


def selected(requests: Traffic, keep: NDArray[np.bool_]) -> Traffic:
    """A selection of the requests."""
    return Traffic(
        arrival_s=requests.arrival_s[keep],
        prompt_tokens=requests.prompt_tokens[keep],
        output_tokens=requests.output_tokens[keep],
    )


def joined(parts: Sequence[Traffic]) -> Traffic:
    """Several streams merged in order of arrival."""
    return Traffic(
        arrival_s=np.concatenate([part.arrival_s for part in parts]),
        prompt_tokens=np.concatenate([part.prompt_tokens for part in parts]),
        output_tokens=np.concatenate([part.output_tokens for part in parts]),
    )


def _columns(breakpoints: Breakpoints) -> tuple[Ints, Floats]:
    """Edges and shares with (0, 0) in front; raises ValueError for an invalid distribution."""
    edges = np.array([0, *(tokens for tokens, _ in breakpoints)], dtype=np.int64)
    shares = np.array([0.0, *(share for _, share in breakpoints)])
    if len(edges) < 2 or (np.diff(edges) <= 0).any():
        raise ValueError("breakpoints need ascending numbers of tokens, from 1")
    if (np.diff(shares) < 0).any() or abs(shares[-1] - 1) > 1e-6:
        raise ValueError("shares must not fall and must end at 1")
    shares[-1] = 1.0
    return edges, shares
