"""The planner's question and its answer."""

import math
from typing import Literal

import msgspec

from planner.goals import Goals
from planner.profile import HOURS_PER_YEAR, PAPER_A100, NodeProfile
from planner.search import Mode
from planner.workload.closed_form import Shape
from planner.workload.moments import GAMMAS
from planner.workload.workload import Workload

Phases = Literal["never", "auto", "always"]

DEFAULT_WINDOW_TOKENS = 65_536


class Reserved(msgspec.Struct, frozen=True, kw_only=True):
    """What entitlements reserve in all: dedicated and guaranteed baselines."""

    entitlements: int
    sequences: int = 0
    kv_bytes: int = 0
    tokens_per_s: float = 0.0


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """A workload, its goals, and the kinds of node the fleet may use."""

    workload: Workload
    goals: Goals
    mode: Mode = "paged"
    nodes: tuple[NodeProfile, ...] = (PAPER_A100,)
    """Kinds of node that every pool may use; the cheapest wins."""
    short_node: NodeProfile | None = None
    """The short pool's kind of node, if fixed."""
    long_node: NodeProfile | None = None
    """The long pool's (or the single pool's) kind of node, if fixed."""
    window_tokens: int | None = None
    """The longest request to serve; by default 65,536, or the workload's longest if greater."""
    b_short: tuple[int, ...] = ()
    """Fixed boundaries; searched if empty."""
    gamma: float | None = None
    """Fixed gamma; searched if None."""
    gammas: tuple[float, ...] = GAMMAS
    compressible: float | None = None
    """p_c: share of requests in the compression window that can be compressed; None: not known,
    so none is planned to be."""
    compressible_said: str = ""
    """Where p_c is from."""
    compress_when: str = "any"
    """The `compression.when` under which it holds."""
    max_cut: float = 1.0
    """The largest share of a prompt that compression may remove."""
    most_pools: int = 3
    extrapolate: bool = False
    """Plan beyond the prompts that a node was measured on, with an interval."""
    phases: Phases = "never"
    """Whether prefill and decode get nodes of their own; auto: where that costs less."""
    transfer_bytes_per_s: float | None = None
    """Speed of one node's link for KV; needed for phases."""
    reserved: Reserved | None = None
    """The floor under the fleet; None without tenants."""

    @property
    def p_c(self) -> float:
        """p_c as it is planned with: 0 where it is not known."""
        return self.compressible or 0.0

    @property
    def searched_gammas(self) -> tuple[float, ...]:
        """The gammas to choose from; 1, no compression, where p_c is not known."""
        if self.gamma is not None:
            return (self.gamma,)
        return self.gammas if self.compressible else (1.0,)

    def compressed_share(self, fleet: "FleetPlan") -> float:
        """p_c over all requests in a fleet's compression window, whatever they hold."""
        workload = self.workload
        if workload.squeezable is None or workload.pairs is None or fleet.gamma <= 1:
            return self.p_c
        boundary, totals = fleet.boundaries[0], workload.pairs.totals
        inside = (totals > boundary) & (totals <= fleet.gamma * boundary)
        mass = float(workload.pairs.weights[inside].sum())
        cut = float(workload.pairs.weights[inside] @ workload.squeezable[inside])
        return self.p_c * cut / mass if mass else 0.0

    @property
    def window(self) -> int:
        """The window in force, tokens."""
        longest = self.workload.longest_tokens
        if self.window_tokens is not None:
            return self.window_tokens
        if longest <= DEFAULT_WINDOW_TOKENS:
            return DEFAULT_WINDOW_TOKENS
        return int(2 ** math.ceil(math.log2(longest)))


class PhasesPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The prefill side of a pool in phases, and the hand-over; all other figures are decode's."""

    prefill_nodes: int
    """Nodes to rent, of the pool's `nodes`."""
    prefill_serving: int
    prefill_slots: int
    """Sequences of one prefill node."""
    prefill_utilisation: float
    """Share of time that prefill nodes compute prompts."""
    prefill_tokens_per_s: float
    """Prompt tokens/s of one node at this mix."""
    prefill_p99_s: float
    """P99 from arrival to the end of prefill."""
    transfer_p99_s: float
    """Hand-over of the P99 prompt."""
    skip_below_tokens: int
    """Prompts below this are computed by decode."""


class PoolPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One pool of a planned fleet."""

    name: str
    window_tokens: int
    boundary_tokens: int | None
    """Largest total length that belongs here; None for the last pool."""
    node: NodeProfile
    nodes: int
    """Nodes to rent: serving nodes over availability, plus spares."""
    serving_nodes: int
    slots_per_node: int
    rate_per_s: float
    utilisation: float
    """Share of slots in use."""
    step_s: float
    wait_p99_s: float
    ttft_p99_s: float
    tpot_p99_s: float
    phases: PhasesPlan | None = None
    """None where every node computes prompts and answers."""

    @property
    def decode_nodes(self) -> int:
        """Nodes to rent that answer: all but those for prefill alone."""
        return self.nodes - (self.phases.prefill_nodes if self.phases else 0)

    @property
    def decode_serving(self) -> int:
        """Serving nodes that answer."""
        return self.serving_nodes - (self.phases.prefill_serving if self.phases else 0)

    @property
    def usd_per_hour(self) -> float:
        """Rent of all its nodes."""
        return self.nodes * self.node.usd_per_node_hour


class PhasesCompared(msgspec.Struct, frozen=True, kw_only=True):
    """One pool with all nodes alike, and in phases; None where that meets no goals."""

    together: PoolPlan | None
    """With nodes for the TPOT that prompts between tokens leave."""
    apart: PoolPlan | None

    @property
    def apart_wins(self) -> bool:
        """Whether phases take fewer nodes."""
        if self.apart is None:
            return False
        return self.together is None or self.apart.nodes < self.together.nodes


class FleetPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Pools by ascending length; empty if the goals cannot be met."""

    label: str
    pools: tuple[PoolPlan, ...] = ()
    gamma: float = 1.0
    floor_nodes: int = 0
    """Nodes of it that reserved baselines need beyond the demand's."""
    billed_per_node: bool = False
    """Whether a node of eight GPUs is billed as one GPU, as in the papers' tables."""

    @property
    def feasible(self) -> bool:
        """Whether any such fleet meets the goals."""
        return bool(self.pools)

    @property
    def boundaries(self) -> tuple[int, ...]:
        """Boundaries between its pools, tokens."""
        return tuple(p.boundary_tokens for p in self.pools if p.boundary_tokens is not None)

    @property
    def nodes(self) -> int:
        """Nodes of all pools."""
        return sum(pool.nodes for pool in self.pools)

    @property
    def gpus(self) -> int:
        """GPUs of all pools."""
        return sum(pool.nodes * pool.node.gpus for pool in self.pools)

    @property
    def usd_per_year(self) -> float:
        """Rent; infinite if the fleet is not feasible."""
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
        """The measure by which fleets are compared: rent, or nodes if no price is known."""
        priced = all(pool.node.usd_per_gpu_hour > 0 for pool in self.pools)
        return self.usd_per_year if priced or not self.pools else float(self.nodes)


class EqualNodes(msgspec.Struct, frozen=True, kw_only=True):
    """Latency of one pool and of two pools with the same total number of nodes."""

    nodes: int
    b_short: int
    one_short_ttft_s: float
    """P99 in the single pool of requests up to the boundary."""
    one_ttft_s: float
    one_tpot_s: float
    short_nodes: int
    short_ttft_s: float
    short_tpot_s: float
    long_nodes: int
    long_ttft_s: float
    long_tpot_s: float


class AskedLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits that clients requested, compared with the tokens that answers used."""

    asked_mean_tokens: float
    used_mean_tokens: float
    unlimited_share: float
    """Share of requests without a limit."""
    short_share_asked: float
    """Share of requests that go to the short pool when routed by limit."""
    short_share_used: float
    nodes_asked: int | None
    """Nodes of two pools at the same boundary, routed by limit; None if not feasible."""
    nodes_used: int | None


class PlanResult(msgspec.Struct, frozen=True, kw_only=True):
    """The chosen fleet and its alternatives."""

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
    apart: tuple[FleetPlan, ...] = ()
    """Fleets with pools in phases."""
    compared: tuple[PhasesCompared, ...] = ()
    """The pools of the cheapest fleet, together and apart; empty where phases are not planned."""
    baseline: str
    """Label of the fleet that savings are measured against."""
    savings: float | None
    """Share of the baseline's cost that the chosen fleet saves; None without a baseline."""
    shape: Shape | None
    closed_form_savings: float | None
    closed_form_boundary: int
    retrofit_nodes: int | None
    """Nodes of a fleet sized without compression but deployed with it (Theorem 2)."""
    codesign_nodes: int | None
    equal_nodes: EqualNodes | None
    asked: AskedLimits | None
    grid: tuple[tuple[float, ...], ...] = ()
    """$ per hour at every boundary and gamma; infinite if the goals cannot be met."""
    grid_boundaries: tuple[int, ...] = ()
    grid_gammas: tuple[float, ...] = ()
    """The gammas that were tried; 1 alone where no compression is planned."""
    notes: tuple[str, ...] = ()

    @property
    def alternatives(self) -> tuple[FleetPlan, ...]:
        """Every fleet that was tried, the chosen one included."""
        fleets = [self.one_by_slots, self.one_paged]
        if self.grid:  # without it, no pair of pools was tried
            fleets.append(self.two)
            fleets += [self.compressed] if max(self.grid_gammas) > 1 else []
        fleets += (*self.splits, *self.apart)
        return tuple(fleets if self.chosen in fleets else [*fleets, self.chosen])
