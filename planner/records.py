"""What is asked of the planner, and what it answers."""

import math

import msgspec

from planner.goals import Goals
from planner.profile import HOURS_PER_YEAR, PAPER_A100, NodeProfile
from planner.search import Mode
from planner.workload.closed_form import Shape
from planner.workload.moments import GAMMAS
from planner.workload.workload import Workload

DEFAULT_WINDOW_TOKENS = 65_536


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """One workload, its goals, and what the fleet may be made of."""

    workload: Workload
    goals: Goals
    mode: Mode = "paged"
    nodes: tuple[NodeProfile, ...] = (PAPER_A100,)
    """Kinds of node that every pool may choose from; the cheapest wins."""
    short_node: NodeProfile | None = None
    """The kind of the short pool, where it is fixed."""
    long_node: NodeProfile | None = None
    """The kind of the long pool (and of a single one), where it is fixed."""
    window_tokens: int | None = None
    """The longest request to be served; default: 65,536, or what the workload needs."""
    b_short: tuple[int, ...] = ()
    """Fixed boundaries; empty: searched."""
    gamma: float | None = None
    """Fixed; None: searched."""
    gammas: tuple[float, ...] = GAMMAS
    compressible: float = 1.0
    """p_c: share of the band whose content may be compressed."""
    max_cut: float = 1.0
    """The largest share of a prompt that compression may remove."""
    most_pools: int = 3

    @property
    def window(self) -> int:
        """Tokens."""
        longest = self.workload.longest_tokens
        if self.window_tokens is not None:
            return self.window_tokens
        if longest <= DEFAULT_WINDOW_TOKENS:
            return DEFAULT_WINDOW_TOKENS
        return int(2 ** math.ceil(math.log2(longest)))


class PoolPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One pool."""

    name: str
    window_tokens: int
    boundary_tokens: int | None
    """Totals up to this; None for the last pool."""
    node: NodeProfile
    nodes: int
    """To rent: serving nodes over availability, and spares."""
    serving_nodes: int
    slots_per_node: int
    rate_per_s: float
    utilisation: float
    """Of slots."""
    step_s: float
    wait_p99_s: float
    ttft_p99_s: float
    tpot_p99_s: float

    @property
    def usd_per_hour(self) -> float:
        """Of all its nodes."""
        return self.nodes * self.node.usd_per_node_hour


class FleetPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Pools in order of length; none where the goals cannot be met."""

    label: str
    pools: tuple[PoolPlan, ...] = ()
    gamma: float = 1.0
    billed_per_node: bool = False
    """The papers' tables bill a node of eight GPUs as one GPU."""

    @property
    def feasible(self) -> bool:
        """Whether there is such a fleet."""
        return bool(self.pools)

    @property
    def boundaries(self) -> tuple[int, ...]:
        """Between its pools, tokens."""
        return tuple(p.boundary_tokens for p in self.pools if p.boundary_tokens is not None)

    @property
    def nodes(self) -> int:
        """Of all pools."""
        return sum(pool.nodes for pool in self.pools)

    @property
    def gpus(self) -> int:
        """Of all pools."""
        return sum(pool.nodes * pool.node.gpus for pool in self.pools)

    @property
    def usd_per_year(self) -> float:
        """Rent; infinite where there is no such fleet."""
        if not self.pools:
            return math.inf
        each = (
            p.nodes
            * (p.node.usd_per_gpu_hour if self.billed_per_node else p.node.usd_per_node_hour)
            for p in self.pools
        )
        return sum(each) * HOURS_PER_YEAR

    @property
    def weight(self) -> float:
        """What fleets are compared by: rent, or nodes where no price is known."""
        priced = all(pool.node.usd_per_gpu_hour > 0 for pool in self.pools)
        return self.usd_per_year if priced or not self.pools else float(self.nodes)


class EqualNodes(msgspec.Struct, frozen=True, kw_only=True):
    """What two pools buy at the cost of one: times at equal numbers of nodes."""

    nodes: int
    b_short: int
    one_short_ttft_s: float
    """P99 of requests up to the boundary, in the single pool."""
    one_ttft_s: float
    one_tpot_s: float
    short_nodes: int
    short_ttft_s: float
    short_tpot_s: float
    long_nodes: int
    long_ttft_s: float
    long_tpot_s: float


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """Limits that clients asked for, against the answers they used."""

    asked_mean_tokens: float
    used_mean_tokens: float
    unlimited_share: float
    """Requests without a limit."""
    short_share_asked: float
    """Requests that go short when the limit counts."""
    short_share_used: float
    nodes_asked: int | None
    """Two pools at the same boundary, routed by the limit; None where it cannot be had."""
    nodes_used: int | None


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The chosen fleet, and what it was chosen over."""

    question: Question
    chosen: FleetPlan
    one_by_slots: FleetPlan
    one_paged: FleetPlan
    two: FleetPlan
    """Two pools without compression."""
    compressed: FleetPlan
    """Two pools at the best gamma above 1."""
    splits: tuple[FleetPlan, ...] = ()
    """Three pools and more."""
    baseline: str
    """What savings are against."""
    savings: float | None
    """Share of the baseline's cost that the chosen fleet saves; None without a baseline."""
    shape: Shape | None
    closed_form_savings: float | None
    closed_form_boundary: int
    retrofit_nodes: int | None
    """Sized without compression, deployed with it (Theorem 2)."""
    codesign_nodes: int | None
    equal_nodes: EqualNodes | None
    asked: Asked | None
    grid: tuple[tuple[float, ...], ...] = ()
    """$ per hour at every boundary and gamma; infinite where the goals cannot be met."""
    grid_boundaries: tuple[int, ...] = ()
    grid_gammas: tuple[float, ...] = ()
    notes: tuple[str, ...] = ()
