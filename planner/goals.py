"""What a fleet has to do, and how much of it is kept back."""

from typing import Final

import msgspec
import numpy as np

from planner.errors import PlanError
from planner.profile import NodeProfile
from planner.workload.workload import Floats

_CEIL_SLACK: Final = 1e-9


class Goals(msgspec.Struct, frozen=True, kw_only=True):
    """What a fleet has to do, and how much of it is kept back."""

    rate_per_s: float
    ttft_s: float = 0.5
    """P99 of the time to the first token."""
    tpot_s: float | None = None
    """P99 of the time between tokens; None for no limit."""
    utilisation: float = 0.85
    """rho_max: of slots and of the prefill budget."""
    stretch: float = 0.95
    """x_max: share of an iteration that may go to resident and prompt tokens."""
    least_nodes: int = 2
    """Of a pool that gets any request."""
    spare_nodes: int = 0
    """N + this many, for failures and upgrades."""
    availability: float = 1.0
    """Share of time that a node is up; nodes are divided by it."""

    def __post_init__(self) -> None:
        if not 0 < self.rate_per_s < np.inf:
            raise PlanError(f"a rate of {self.rate_per_s:g}/s", "give the requests/s to serve")
        if not self.ttft_s > 0 or (self.tpot_s is not None and not self.tpot_s > 0):
            raise PlanError("an SLO is not above 0", "give milliseconds above 0")
        if not (0 < self.utilisation < 1 and 0 < self.stretch < 1):
            raise PlanError("a utilisation outside 0 ... 1", "give a share such as 0.85")
        if not 0 < self.availability <= 1 or self.spare_nodes < 0 or self.least_nodes < 1:
            raise PlanError("availability or spare nodes out of range", "0 < A <= 1, spares >= 0")

    def installed(self, nodes: Floats) -> Floats:
        """Nodes to rent where so many have to serve."""
        up = np.ceil(nodes / self.availability - _CEIL_SLACK)
        return np.where(nodes > 0, up + self.spare_nodes, 0.0)


def check_goals(profile: NodeProfile, goals: Goals) -> None:
    """PlanError where one iteration alone is longer than an SLO."""
    limits = (("TTFT", goals.ttft_s, 2), ("TPOT", goals.tpot_s, 1))
    for name, limit, steps in limits:
        if limit is not None and limit <= steps * profile.w_s:
            raise PlanError(
                f"a {name} SLO of {1000 * limit:g} ms is below {steps} empty iteration(s) of "
                f"{1000 * profile.w_s:.3g} ms on {profile.name}",
                f"raise it above {1000 * steps * profile.w_s:.3g} ms or choose a faster GPU",
            )
