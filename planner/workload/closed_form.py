"""Closed forms that need no sizing: savings, the best boundary, the archetype."""

from typing import Literal

import msgspec
import numpy as np

from planner.workload.atoms import atoms_of
from planner.workload.workload import Workload

Archetype = Literal["I", "II", "III"]

_CONCENTRATED = 0.90
"""F(B) above which a workload counts as concentrated below B (FleetOpt, section 2.4)."""
_ABOVE = 0.50
"""F(B) below which most of the workload lies above B."""

_CHUNK_TOKENS = 512

ADVICE: dict[Archetype, str] = {
    "I": "concentrated below the boundary: pool routing takes most of what there is to gain",
    "II": "dispersed around the boundary: compression can add to pool routing",
    "III": "concentrated above the boundary: raise the boundary, do not compress",
}


def savings(alpha: float, rho: float) -> float:
    """Alpha (1 - 1 / rho), the share of nodes that two pools save over one (eq. 7).

    Token-budget pool routing, section 3. `alpha` is the short share, `rho` the short pool's
    throughput over the single pool's. The formula gives the long pool the single pool's mix; with
    long requests concentrated there, it overstates savings up to four times (section 4.2).
    """
    return alpha * (1 - 1 / rho)


def best_boundary(workload: Workload, window_tokens: int) -> int:
    """The boundary of the smallest fleet at gamma = 1, one kind of node, slots by window.

    With slots K / window the nodes are B A(B) + C (A(C) - A(B)) up to constants, where A(B) is the
    integral of it f up to B. Its derivative vanishes where (C - B) f(B) it(B) = A(B). The code
    searches for the minimum itself, since f jumps at breakpoints.
    """
    atoms = atoms_of(workload, np.array([], dtype=np.float64))
    steps = atoms.weight * (np.ceil(atoms.prompt / _CHUNK_TOKENS) + atoms.answer)
    below = np.cumsum(steps)
    nodes = atoms.upper * below + window_tokens * (below[-1] - below)
    inside = atoms.upper < window_tokens
    return int(atoms.upper[np.where(inside, nodes, np.inf).argmin()])


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """Shares of a workload around a boundary."""

    alpha: float
    """F(B)."""
    beta: float
    """F(gamma B) - F(B)."""
    archetype: Archetype
    advice: str


def shape_of(workload: Workload, b_short: int, gamma: float) -> Shape:
    """Shares and archetype; alpha is rounded to whole percents, as in the paper's tables."""
    alpha = workload.share(b_short)
    archetype: Archetype = "II"
    if round(alpha, 2) >= _CONCENTRATED:
        archetype = "I"
    elif alpha < _ABOVE:
        archetype = "III"
    return Shape(
        alpha=alpha,
        beta=workload.share(int(gamma * b_short)) - alpha,
        archetype=archetype,
        advice=ADVICE[archetype],
    )
