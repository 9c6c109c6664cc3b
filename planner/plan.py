"""The planner: takes a question, returns the chosen fleet and its alternatives."""

from collections.abc import Sequence
from itertools import product

import msgspec
import numpy as np

from planner.compare import asked_against_used, equal_nodes
from planner.fleets import from_grid, from_ranges
from planner.limits import check_range, checked_boundaries, floored
from planner.paper.fleets import paper_one, paper_pairs
from planner.phases import Phased, one_unsized, phased, without_cached
from planner.profile import NodeProfile
from planner.records import EqualNodes, FleetPlan, PhasesCompared, PlanResult, Question
from planner.search import Grid, Mode, sweep
from planner.split import Ranges, cheapest_splits, size_ranges, whole_range
from planner.verdict import notes_of
from planner.workload.closed_form import best_boundary, savings, shape_of
from planner.workload.moments import Prepared, prepare

_ONE_SLOTS, _ONE_PAGED = "one pool, slots", "one pool, paged"
_TWO, _COMPRESSED = "two pools", "two, compressed"


def make_plan(question: Question) -> PlanResult:
    """The cheapest fleet that meets the goals; raises PlanError for an inconsistent question.

    Ties go to fewer pools, then to no compression. A fixed boundary selects the two (or more) pools
    that it describes; the single pool is reported beside them.
    """
    boundaries = checked_boundaries(question)
    check_range(question)
    question = _with_reserved_rate(question)
    if question.phases != "never":
        question = without_cached(question)
    tables = _tables(question, boundaries)
    one_paged = _one_pool(question, tables, "paged", _ONE_PAGED)
    splits: tuple[FleetPlan, ...] = ()
    if question.mode == "paper":
        one_slots = paper_one(question, _ONE_SLOTS)
        two, compressed, grid = paper_pairs(
            question, boundaries, question.searched_gammas, (_TWO, _COMPRESSED)
        )
    else:
        mode: Mode = "corrected" if question.mode == "paged" else question.mode
        one_slots = _one_pool(question, tables, mode, _ONE_SLOTS)
        two, compressed, grid = _pairs_of_pools(question, tables)
        splits = _splits(question, tables)
    both = _in_phases(question, (one_paged, two, compressed, *splits))
    if both:
        one_paged, two, compressed, *rest = (fleet.together for fleet in both)
        splits = tuple(rest)
    one_paged, one_slots, two, compressed, *more = (
        floored(fleet, question) for fleet in (one_paged, one_slots, two, compressed, *splits)
    )
    splits = tuple(more)
    single = one_paged if question.mode == "paged" else one_slots
    options = [fleet.best(question) for fleet in both] or [single, two, compressed, *splits]
    chosen = _choose(question, *options)
    looked_at = chosen if len(chosen.pools) == 2 else min((two, compressed), key=_weight)
    shape = None
    if looked_at.boundaries:
        wide = looked_at.gamma if looked_at.gamma > 1 else 1.5
        shape = shape_of(question.workload, looked_at.boundaries[0], wide)
    retrofit, codesign = _theorem_2(tables, question, compressed)
    plan = PlanResult(
        question=question,
        chosen=chosen,
        one_by_slots=one_slots,
        one_paged=one_paged,
        two=two,
        compressed=compressed,
        splits=splits,
        apart=tuple(fleet.apart for fleet in both if any(p.phases for p in fleet.apart.pools)),
        compared=_compared(chosen, both),
        baseline=single.label,
        savings=_saved(chosen, single),
        shape=shape,
        closed_form_savings=_closed_form(question, looked_at),
        closed_form_boundary=best_boundary(question.workload, question.window),
        retrofit_nodes=retrofit,
        codesign_nodes=codesign,
        equal_nodes=_equal_nodes(question, tables, one_paged, two),
        asked=asked_against_used(question, looked_at),
        grid=tuple(tuple(map(float, row)) for row in grid),
        grid_boundaries=boundaries,
        grid_gammas=question.searched_gammas,
    )
    return msgspec.structs.replace(plan, notes=notes_of(plan))


def _in_phases(question: Question, fleets: Sequence[FleetPlan]) -> list[Phased]:
    """The fleets together and apart; none where the question does not ask for phases."""
    if question.phases == "never":
        return []
    single, *others = fleets
    if not single.feasible:
        single = one_unsized(question, single.label)
    phased_fleets = [phased(question, fleet) for fleet in (single, *others)]
    return [
        fleet._replace(
            together=floored(fleet.together, question), apart=floored(fleet.apart, question)
        )
        for fleet in phased_fleets
    ]


def _compared(chosen: FleetPlan, both: Sequence[Phased]) -> tuple[PhasesCompared, ...]:
    """The pools of the chosen fleet, or of one pool if there is none."""
    pools = [fleet.pools for fleet in both if chosen in (fleet.together, fleet.apart)]
    return pools[0] if pools and chosen.feasible else both[0].pools if both else ()


def _with_reserved_rate(question: Question) -> Question:
    """Plan for the token rate that is reserved, where the demand takes less."""
    reserved = question.reserved
    if reserved is None or not reserved.tokens_per_s:
        return question
    goals = question.goals
    least = reserved.tokens_per_s / sum(question.workload.mean_lengths())
    if least <= goals.rate_per_s:
        return question
    raised = msgspec.structs.replace(
        goals, rate_per_s=least, rate_said="the token rate that entitlements reserve"
    )
    return msgspec.structs.replace(question, goals=raised)


class _Tables(msgspec.Struct, frozen=True, kw_only=True):
    """Prefix sums for each chunk size; a search reads these instead of requests."""

    by_chunk: dict[int, Prepared]
    short: tuple[NodeProfile, ...]
    long: tuple[NodeProfile, ...]

    def of(self, node: NodeProfile) -> Prepared:
        """The sums for a node's chunk size."""
        return self.by_chunk[node.chunk_tokens]


def _tables(question: Question, boundaries: Sequence[int]) -> _Tables:
    short = (question.short_node,) if question.short_node else question.nodes
    long = (question.long_node,) if question.long_node else question.nodes
    # gamma = 1 is always included: two pools without compression are a possible answer.
    gammas = tuple(sorted({1.0, *question.searched_gammas}))
    sums = {
        chunk: prepare(
            question.workload,
            boundaries=boundaries,
            gammas=gammas,
            chunk_tokens=chunk,
            max_cut=question.max_cut,
        )
        for chunk in {node.chunk_tokens for node in (*short, *long)}
    }
    return _Tables(by_chunk=sums, short=short, long=long)


def _one_pool(question: Question, tables: _Tables, mode: Mode, label: str) -> FleetPlan:
    """One pool, on the cheapest kind of node."""
    fleets = []
    for node in tables.long:
        ranges = size_ranges(
            tables.of(node), node, mode, question.goals, question.window, only_whole=True
        )
        picked = [(0, whole_range(ranges))]
        fleets.append(from_ranges(label, [ranges], [node], picked, question.goals))
    return min(fleets, key=_weight)


def _pairs_of_pools(
    question: Question, tables: _Tables
) -> tuple[FleetPlan, FleetPlan, list[list[float]]]:
    """Best cell at gamma 1, best above it, and the cheapest grid's costs."""
    two, compressed = FleetPlan(label=_TWO), FleetPlan(label=_COMPRESSED)
    costs: np.ndarray | None = None
    if len(question.b_short) > 1 or not next(iter(tables.by_chunk.values())).boundaries:
        return two, compressed, []
    for short, long in product(tables.short, tables.long):
        grid = sweep(
            question.mode,
            question.goals,
            short=(tables.of(short), short),
            long=(tables.of(long), long),
            window_tokens=question.window,
            compressible=question.p_c,
        )
        plain, squeezed = _best_cells(grid)
        two = min(two, from_grid(_TWO, grid, plain, question, (short, long)), key=_weight)
        if squeezed is not None:
            pair = from_grid(_COMPRESSED, grid, squeezed, question, (short, long))
            compressed = min(compressed, pair, key=_weight)
        costs = grid.cost if costs is None else np.minimum(costs, grid.cost)
    searched = [
        i for i, gamma in enumerate(grid.prepared.gammas) if gamma in question.searched_gammas
    ]
    return two, compressed, [] if costs is None else costs[:, searched].tolist()


def _best_cells(grid: Grid) -> tuple[tuple[int, int], tuple[int, int] | None]:
    """Cheapest cells without and with compression; ties to the narrower compression window."""
    plain = (int(np.argmin(grid.cost[:, 0])), 0)
    if grid.cost.shape[1] == 1:
        return plain, None
    columns = grid.cost[:, 1:]
    ties = np.argwhere(columns <= columns.min() * (1 + 1e-12))
    if ties.size == 0:
        return plain, (0, 1)
    row, column = min(ties.tolist(), key=lambda cell: (cell[1], -cell[0]))
    return plain, (row, column + 1)


def _splits(question: Question, tables: _Tables) -> tuple[FleetPlan, ...]:
    """Three pools and more without compression; every pool may use any kind of node."""
    nodes = tuple(dict.fromkeys((*tables.short, *tables.long)))
    if question.short_node or question.long_node:
        return ()
    choices: list[Ranges] = [
        size_ranges(tables.of(n), n, question.mode, question.goals, question.window) for n in nodes
    ]
    fixed = len(question.b_short) + 1 if len(question.b_short) > 1 else 0
    cheapest = cheapest_splits(choices, fixed or question.most_pools)
    wanted = [k for k in cheapest if (k == fixed if fixed else k >= 3)]
    return tuple(
        from_ranges(f"{k} pools", choices, nodes, cheapest[k], question.goals) for k in wanted
    )


def _choose(
    question: Question,
    single: FleetPlan,
    two: FleetPlan,
    compressed: FleetPlan,
    *splits: FleetPlan,
) -> FleetPlan:
    if len(question.b_short) > 1:
        return splits[0] if splits else FleetPlan(label=f"{len(question.b_short) + 1} pools")
    pairs, gamma = [two, compressed], question.gamma
    if gamma is not None:
        pairs = [fleet for fleet in pairs if (fleet.gamma > 1) == (gamma > 1)]
    squeezed = gamma is not None and gamma > 1
    options = pairs if question.b_short or squeezed else [single, *pairs, *splits]
    return _cheapest(options) if options else single


def _cheapest(options: Sequence[FleetPlan]) -> FleetPlan:
    """The cheapest fleet; ties go to fewer pools, then to no compression."""
    best = options[0]
    for fleet in options[1:]:
        if fleet.weight < best.weight * (1 - 1e-9):
            best = fleet
    return best


def _weight(fleet: FleetPlan) -> float:
    return fleet.weight


def _saved(chosen: FleetPlan, baseline: FleetPlan) -> float | None:
    if not chosen.feasible or not baseline.feasible:
        return None
    return 1 - chosen.weight / baseline.weight


def _closed_form(question: Question, fleet: FleetPlan) -> float | None:
    """Savings by alpha (1 - 1 / rho), where rho is the ratio of window slots."""
    if not fleet.boundaries:
        return None
    node = fleet.pools[0].node
    ratio = node.window_slots(fleet.boundaries[0]) / node.window_slots(question.window)
    return savings(question.workload.share(fleet.boundaries[0]), ratio)


def _theorem_2(
    tables: _Tables, question: Question, fleet: FleetPlan
) -> tuple[int | None, int | None]:
    """Nodes of a fleet sized without compression but run with it, and of one sized for it."""
    if len(fleet.pools) != 2 or question.mode == "paper":
        return None, None
    boundary, (short, long) = fleet.boundaries[0], fleet.pools
    grid = sweep(
        question.mode,
        question.goals,
        short=(tables.of(short.node), short.node),
        long=(tables.of(long.node), long.node),
        window_tokens=question.window,
        compressible=question.p_c,
    )
    row = grid.prepared.boundaries.index(boundary)
    plain = from_grid(_TWO, grid, (row, 0), question, (short.node, long.node))
    if len(plain.pools) != 2:
        return None, fleet.nodes
    return max(short.nodes, plain.pools[0].nodes) + plain.pools[1].nodes, fleet.nodes


def _equal_nodes(
    question: Question, tables: _Tables, single: FleetPlan, two: FleetPlan
) -> EqualNodes | None:
    if question.mode != "paged" or not single.pools:
        return None
    return equal_nodes(question, tables.of(single.pools[0].node), single, two)
