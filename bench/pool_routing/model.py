"""The fleet arithmetic of token-budget pool routing (arXiv:2604.09613, CC BY 4.0), as published.

Rules:
- t_iter = W + H * slots, every slot taken; mu = slots / (E[iterations] * t_iter) of an instance.
- iterations = ceil(L_in / 512) + L_out; L is uniform between breakpoints of the workload's CDF;
  L_out / L is normal, clipped to [.02, .95]; lengths are not rounded to whole tokens.
- instances = ceil(rate * head / mu), with another head for each kind of pool.
- an engine has KV blocks / blocks of its window slots, at most 128, as the paper counts them.
"""

import math
from statistics import NormalDist
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

BASE_S: Final = 0.008
"""W: seconds of an iteration without sequences."""
PER_SLOT_S: Final = 0.00065
"""H: seconds that each sequence adds."""
CHUNK_TOKENS: Final = 512
BLOCK_TOKENS: Final = 16
BLOCKS: Final = 65_536
MAX_SLOTS: Final = 128
WINDOW: Final = 65_536
BOUNDARY: Final = 8192
RATE: Final = 1000.0
"""Requests per second."""
HEAD_ONE: Final = 1.08
HEAD_SHORT: Final = 1.05
HEAD_LONG: Final = 1.02
MIN_SHARE: Final = 0.02
MAX_SHARE: Final = 0.95
HOURS_PER_YEAR: Final = 8760

_NODES = 1000
"""Equally likely output shares that the normal is integrated over."""


class CdfWorkload(msgspec.Struct, frozen=True, kw_only=True):
    """A CDF as [tokens, share up to them], linear between, and how totals split."""

    name: str
    breakpoints: tuple[tuple[int, float], ...]
    output_mean: float
    output_std: float

    @property
    def longest(self) -> int:
        """The last breakpoint."""
        return self.breakpoints[-1][0]

    def cdf(self, tokens: float) -> float:
        """Share of requests of at most so many tokens."""
        return float(np.interp(tokens, *self._columns()))

    def share(self, low: float, high: float) -> float:
        """Of all requests, those with low < L <= high."""
        return self.cdf(high) - self.cdf(low)

    def mean_tokens(self, low: float, high: float) -> float:
        """Mean L of requests in the range."""
        inside = [float(t) for t, _ in self.breakpoints if low < t < high]
        edges = np.array([low, *inside, min(high, self.longest)])
        mass = np.diff(np.interp(edges, *self._columns()))
        return float((mass * (edges[1:] + edges[:-1]) / 2).sum() / mass.sum())

    def mean_output_share(self) -> float:
        """Mean of the clipped normal, in closed form."""
        normal, unit = NormalDist(self.output_mean, self.output_std), NormalDist()
        a = (MIN_SHARE - self.output_mean) / self.output_std
        b = (MAX_SHARE - self.output_mean) / self.output_std
        below, above = normal.cdf(MIN_SHARE), 1 - normal.cdf(MAX_SHARE)
        inside = self.output_mean * (1 - below - above)
        inside += self.output_std * (unit.pdf(a) - unit.pdf(b))
        return MIN_SHARE * below + inside + MAX_SHARE * above

    def mean_chunks(self, low: float, high: float) -> float:
        """E[ceil(L_in / 512)] in the range: the sum over k of P(L_in > 512 k)."""
        inputs = 1 - output_shares(self.output_mean, self.output_std)
        k = np.arange(math.ceil(self.longest / CHUNK_TOKENS))
        over = np.clip(CHUNK_TOKENS * k[None, :] / inputs[:, None], low, high)
        up_to = np.interp(over, *self._columns())
        inside = (self.cdf(high) - up_to) / self.share(low, high)
        return float(inside.sum(axis=1).mean())

    def iterations(self, low: float, high: float) -> float:
        """Mean iterations of requests in the range."""
        output = self.mean_output_share() * self.mean_tokens(low, high)
        return self.mean_chunks(low, high) + output

    def _columns(self) -> tuple[list[float], list[float]]:
        tokens, shares = zip(*self.breakpoints, strict=True)
        return [0.0, *tokens], [0.0, *shares]


def output_shares(mean: float, std: float) -> NDArray[np.float64]:
    """Equally likely values of the clipped normal, in order."""
    normal = NormalDist(mean, std)
    drawn = [normal.inv_cdf((i + 0.5) / _NODES) for i in range(_NODES)]
    return np.asarray(np.clip(drawn, MIN_SHARE, MAX_SHARE), dtype=np.float64)


# The paper's CDFs are unpublished. These were fitted until its throughputs and fleet sizes at
# a boundary of 8,192 came out; splits as published.
AZURE: Final = CdfWorkload(
    name="Azure",
    breakpoints=(
        (256, 0.10),
        (512, 0.35),
        (1024, 0.75),
        (2048, 0.80),
        (4096, 0.89),
        (8192, 0.915),
        (16_384, 0.951),
        (32_768, 0.99),
        (65_536, 1.0),
    ),
    output_mean=0.10,
    output_std=0.05,
)
LMSYS: Final = CdfWorkload(
    name="LMSYS",
    breakpoints=(
        (32, 0.05),
        (64, 0.20),
        (128, 0.35),
        (256, 0.70),
        (512, 0.88),
        (1024, 0.98),
        (2048, 0.995),
        (4096, 0.9985),
        (8192, 0.9994),
        (16_384, 0.9999),
        (32_768, 1.0),
    ),
    output_mean=0.75,
    output_std=0.10,
)


def slots_of(window: int) -> int:
    """Sequences of an engine: its KV blocks over those of a whole window."""
    return min(MAX_SLOTS, BLOCKS // math.ceil(window / BLOCK_TOKENS))


def iteration_s(slots: int) -> float:
    """Seconds of an iteration with every slot taken."""
    return BASE_S + PER_SLOT_S * slots


def throughput(traffic: CdfWorkload, slots: int, low: float, high: float) -> float:
    """Requests per second of an instance that serves the range; infinite where it is empty."""
    if traffic.share(low, high) <= 0:
        return math.inf
    return slots / (traffic.iterations(low, high) * iteration_s(slots))


class Sizing(msgspec.Struct, frozen=True, kw_only=True):
    """One workload with one boundary: throughputs of an instance, and what they come to."""

    rate: float
    alpha: float
    """Share of requests up to the boundary."""
    short_slots: int
    mu_one: float
    """Of a fleet with a single, homogeneous pool."""
    mu_short: float
    mu_long: float

    @property
    def one(self) -> int:
        """Instances of the single pool."""
        return math.ceil(self.rate * HEAD_ONE / self.mu_one)

    @property
    def short(self) -> int:
        """Instances of the short pool."""
        return math.ceil(self.alpha * self.rate * HEAD_SHORT / self.mu_short)

    @property
    def long(self) -> int:
        """Instances of the long pool."""
        return math.ceil((1 - self.alpha) * self.rate * HEAD_LONG / self.mu_long)

    @property
    def total(self) -> int:
        """Instances of both pools."""
        return self.short + self.long

    @property
    def savings(self) -> float:
        """Share of the single pool's instances that two pools do without."""
        return 1 - self.total / self.one

    @property
    def rho(self) -> float:
        """Throughput of the short pool over the single pool's."""
        return self.mu_short / self.mu_one

    @property
    def closed_form(self) -> float:
        """Savings by equation 7, which gives the long pool the single pool's throughput."""
        return closed_form(self.alpha, self.rho)

    @property
    def corrected(self) -> tuple[float, float]:
        """Short and long instances by equation 8, without heads and not rounded."""
        short = self.alpha * self.rate / self.mu_short
        return short, (1 - self.alpha) * self.rate / self.mu_long

    @property
    def savings_at_equal_heads(self) -> float:
        """Savings when no pool gets more headroom than another; not rounded."""
        return 1 - sum(self.corrected) * self.mu_one / self.rate


def closed_form(alpha: float, rho: float) -> float:
    """Equation 7."""
    return alpha * (1 - 1 / rho)


def size(traffic: CdfWorkload, boundary: int = BOUNDARY, rate: float = RATE) -> Sizing:
    """Both fleets of a workload."""
    slots = slots_of(boundary)
    return Sizing(
        rate=rate,
        alpha=traffic.share(0, boundary),
        short_slots=slots,
        mu_one=throughput(traffic, slots_of(WINDOW), 0, WINDOW),
        mu_short=throughput(traffic, slots, 0, boundary),
        mu_long=throughput(traffic, slots_of(WINDOW), boundary, WINDOW),
    )


def yearly_dollars(gpus: float, dollars_per_gpu_hour: float) -> float:
    """Of GPUs that are rented all year."""
    return gpus * dollars_per_gpu_hour * HOURS_PER_YEAR


class Architecture(msgspec.Struct, frozen=True, kw_only=True):
    """What a sequence's KV cache is made of, on one GPU."""

    layers: int
    kv_heads: int
    """Held by one GPU; where there are fewer than GPUs, each GPU holds one."""
    head_size: int
    bytes_per_value: int

    @property
    def kv_bytes_per_token(self) -> int:
        """Equation 1 for one token: keys and values."""
        return 2 * self.layers * self.kv_heads * self.head_size * self.bytes_per_value


def slots_in(memory: float, weights: float, architecture: Architecture, window: int) -> int:
    """Equation 2: sequences whose whole window fits the bytes that weights leave, never < 0."""
    room = max(0.0, memory - weights)
    return int(room // (architecture.kv_bytes_per_token * window))
