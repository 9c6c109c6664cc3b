"""Power of a group of accelerators; it rises less than linearly with utilisation.

"A Universal Load Balancing Principle", eq. 11 and appendix D.1. mfu / mfu_sat of a worker is
its load over the fullest worker's in that step: the fullest computes throughout the step, the
others wait at the barrier for the rest of it.
"""

import msgspec
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


class PowerModel(msgspec.Struct, frozen=True, kw_only=True):
    """P = idle + (peak - idle) x^gamma of one worker."""

    idle_w: float = 100.0
    peak_w: float = 400.0
    gamma: float = 0.7

    def power_w(self, utilisation: Floats) -> Floats:
        """Watts at x = mfu / mfu_sat, 0 to 1; more counts as 1."""
        found: Floats = self.idle_w + (self.peak_w - self.idle_w) * (
            np.clip(utilisation, 0.0, 1.0) ** self.gamma
        )
        return found

    def group_power_w(self, loads: Floats) -> Floats:
        """Watts of all workers at each step; `loads` in tokens, shape (steps, workers)."""
        most = loads.max(axis=1, keepdims=True)
        used = np.divide(loads, most, out=np.zeros_like(loads), where=most > 0)
        found: Floats = self.power_w(used).sum(axis=1)
        return found

    def energy_j(self, loads: Floats, dt_s: Floats) -> float:
        """Joules over all steps (eq. 58); `dt_s` is each step's duration."""
        return float((self.group_power_w(loads) * dt_s).sum())
