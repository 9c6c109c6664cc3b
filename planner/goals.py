"""The goals of a fleet, and its safety margins."""

from typing import Final

import msgspec
import numpy as np

from planner.errors import PlanError
from planner.profile import NodeProfile
from planner.workload.workload import Floats

_CEIL_SLACK: Final = 1e-9


class Goals(msgspec.Struct, frozen=True, kw_only=True):
    """The SLOs of a fleet, and its safety margins."""

    rate_per_s: float
    rate_said: str = ""
    """What the rate is, in words: as given, or a mean or quantile of a log's windows."""
    ttft_s: float = 0.5
    """P99 of the time to first token, seconds."""
    tpot_s: float | None = None
    """P99 of the time between tokens, seconds; None for no limit."""
    utilisation: float = 0.85
    """rho_max: largest share of slots, and of the prefill budget, in use."""
    stretch: float = 0.95
    """x_max: largest share of an iteration spent on resident and prompt tokens."""
    least_nodes: int = 2
    """Fewest nodes of any pool that gets requests."""
    spare_nodes: int = 0
    """Spare nodes per pool (N + this), for failures and upgrades."""
    availability: float = 1.0
    """Share of time that a node is up; node counts are divided by it."""

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
        """Nodes to rent so that `nodes` are up, spares included."""
        up = np.ceil(nodes / self.availability - _CEIL_SLACK)
        return np.where(nodes > 0, up + self.spare_nodes, 0.0)


def check_goals(profile: NodeProfile, goals: Goals) -> None:
    """Raise PlanError if one iteration alone is longer than an SLO."""
    limits = (("TTFT", goals.ttft_s, 2), ("TPOT", goals.tpot_s, 1))
    for name, limit, steps in limits:
        if limit is not None and limit <= steps * profile.w_s:
            raise PlanError(
                f"a {name} SLO of {1000 * limit:g} ms is below {steps} empty iteration(s) of "
                f"{1000 * profile.w_s:.3g} ms on {profile.name}",
                f"raise it above {1000 * steps * profile.w_s:.3g} ms or choose a faster GPU",
            )
