"""Arrival times: Poisson, Gamma, bursts, or a recording."""

import numpy as np

from simulator.fleet.traffic import Floats, Random


def poisson(rate_per_s: float, count: int, random: Random) -> Floats:
    """Independent arrivals; raises ValueError unless rate and count > 0."""
    _check(rate_per_s, count)
    return np.cumsum(random.exponential(1.0 / rate_per_s, count))


def gamma(rate_per_s: float, cv: float, count: int, random: Random) -> Floats:
    """Gamma gaps with coefficient of variation `cv` > 0; 1 is Poisson, above 1 is clumped."""
    _check(rate_per_s, count)
    if not cv > 0:
        raise ValueError(f"the coefficient of variation must be above 0, not {cv}")
    shape = 1.0 / cv**2
    return np.cumsum(random.gamma(shape, 1.0 / (shape * rate_per_s), count))


def bursty(
    rate_per_s: float,
    count: int,
    random: Random,
    *,
    peak: float = 3.0,
    share: float = 0.2,
    burst_s: float = 30.0,
) -> Floats:
    """A Markov-modulated Poisson process of two states, with this mean rate.

    It bursts `share` of the time (0 < share < 1), at `peak` x the mean rate
    (1 <= peak <= 1 / share), for `burst_s` seconds on average.
    """
    _check(rate_per_s, count)
    if not 0 < share < 1 or not 1 <= peak <= 1 / share or not burst_s > 0:
        raise ValueError("bursts need 0 < share < 1, 1 <= peak <= 1 / share, and burst_s > 0")
    calm = rate_per_s * (1 - peak * share) / (1 - share)
    rates, stays_s = (calm, rate_per_s * peak), (burst_s * (1 - share) / share, burst_s)
    state = int(random.random() < share)
    found: list[Floats] = []
    missing, now_s = count, 0.0
    while missing > 0:
        stay_s = random.exponential(stays_s[state])
        inside = np.sort(random.uniform(0.0, stay_s, random.poisson(rates[state] * stay_s)))
        found.append(now_s + inside)
        missing -= len(inside)
        now_s += stay_s
        state = 1 - state
    return np.concatenate(found)[:count]


def recorded(times_s: Floats, *, rate_per_s: float | None = None) -> Floats:
    """A recording from its first request on, optionally scaled to a mean rate."""
    if not len(times_s):
        raise ValueError("the recording is empty")
    ordered = np.sort(np.asarray(times_s, dtype=np.float64))
    ordered -= ordered[0]
    if rate_per_s is None:
        return ordered
    if not rate_per_s > 0 or not ordered[-1] > 0:
        raise ValueError("a rate needs to be above 0, and a recording longer than 0 seconds")
    return np.asarray(ordered * ((len(ordered) - 1) / (rate_per_s * ordered[-1])))


def _check(rate_per_s: float, count: int) -> None:
    if not rate_per_s > 0:
        raise ValueError(f"the rate must be above 0 requests per second, not {rate_per_s}")
    if count < 1:
        raise ValueError(f"at least one request is needed, not {count}")
