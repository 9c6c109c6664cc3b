"""Figures of a group's run, as in "A Universal Load Balancing Principle", section 6.3."""

from typing import Final

import msgspec
import numpy as np

from simulator.barrier.records import Floats, History

ENERGY_TOKENS: Final = 5.49e6
"""Tokens that energy is normalised to: those that the paper's workload generates."""


class PowerModel(msgspec.Struct, frozen=True, kw_only=True):
    """P = idle + (peak - idle) x^gamma of one worker; less than linear in its utilisation x.

    Eq. 11 and appendix D.1. x = mfu / mfu_sat of a worker is its load over the fullest worker's in
    that step: the fullest computes throughout the step, the others wait at the barrier for the rest
    of it.
    """

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


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """Figures over all steps after the warm-up, and over requests that ran wholly after it."""

    steps: int
    imbalance: float
    """Mean over steps of the sum over workers of (fullest - own load), tokens (eq. 7)."""
    throughput: float
    """Tokens/s (eq. 8)."""
    tpot_s: float
    """Mean of (end - start) / output (eq. 9)."""
    tpot_p99_s: float
    energy_j: float
    """Normalised to ENERGY_TOKENS tokens (eq. 58)."""
    idle_share: float
    """Share of the workers' time spent waiting at the barrier."""
    mean_active: float
    longest_wait_steps: int
    """Steps from first seen to bound, warm-up included; waiting requests count until the end."""
    wait_p99_s: float
    """From arrival to a slot."""
    latency_s: float
    """Mean, from arrival to end."""
    completed: int


def summarise(history: History, skip: int = 800, power: PowerModel | None = None) -> Summary:
    """Figures without the first `skip` steps; raises ValueError if no steps are left."""
    load, dt_s = history.load[skip:], history.dt_s[skip:]
    if not len(dt_s):
        raise ValueError(f"the run has {len(history.dt_s)} steps: none after {skip}")
    most = load.max(axis=1)
    gaps = most[:, None] - load
    tokens, span_s = int(history.active[skip:].sum()), float(dt_s.sum())
    energy_j = (power or PowerModel()).energy_j(load, dt_s)
    edges = np.append(history.at_s, history.at_s[-1] + history.dt_s[-1])
    done = (history.end_step >= 0) & (history.start_step >= skip)
    start_s, end_s = edges[history.start_step[done]], edges[history.end_step[done]]
    arrival_s = history.arrival_s[done]
    tpot_s = (end_s - start_s) / history.output_tokens[done]
    idle_s = history.seconds_per_token * gaps.mean(axis=1).sum()
    return Summary(
        steps=len(dt_s),
        imbalance=float(gaps.sum(axis=1).mean()),
        throughput=tokens / span_s,
        tpot_s=_mean(tpot_s),
        tpot_p99_s=_quantile(tpot_s, 0.99),
        energy_j=energy_j * ENERGY_TOKENS / tokens,
        idle_share=float(idle_s) / span_s,
        mean_active=tokens / len(dt_s),
        longest_wait_steps=longest_wait(history),
        wait_p99_s=_quantile(start_s - arrival_s, 0.99),
        latency_s=_mean(end_s - arrival_s),
        completed=int(done.sum()),
    )


def longest_wait(history: History) -> int:
    """Most steps from first seen to bound; unbound requests count until the end."""
    seen = history.revealed_step >= 0
    until = np.where(history.bound_step >= 0, history.bound_step, len(history.dt_s))
    return int((until - history.revealed_step)[seen].max())


def longest_service(history: History) -> int:
    """Steps of the longest answer among the bound requests."""
    return int(history.output_tokens[history.bound_step >= 0].max())


def _mean(values: Floats) -> float:
    return float(values.mean()) if len(values) else float("nan")


def _quantile(values: Floats, share: float) -> float:
    return float(np.quantile(values, share)) if len(values) else float("nan")
