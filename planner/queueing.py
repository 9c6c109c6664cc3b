"""Waiting times in M/G/c queues: Erlang-C in log space and Kimura's two-moment tail.

FleetOpt, equations 5 and 6. Erlang-C uses the regularised gamma function, since
sum(a^k / k!, k < c) e^-a = Q(c, a): nothing overflows, and thousands of servers cost as much
as one. Kimura's tail is off by a factor of .8 to 3.6 at high variation: use it as a filter only.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy.special import gammaincc, gammaln

Floats = NDArray[np.float64]

_TAIL: Final = 0.01
_SURELY_FREE: Final = 3.0
"""Halfin-Whitt beta above which the chance to wait is far below _TAIL (.0015)."""


def erlang_c(servers: Floats, load: Floats) -> Floats:
    """Probability that an arrival waits; `load` is offered in Erlangs, 0 < load < servers."""
    log_term = servers * np.log(load) - gammaln(servers + 1) - load - np.log1p(-load / servers)
    log_free = np.log(gammaincc(servers, load))
    return np.asarray(np.exp(log_term - np.logaddexp(log_free, log_term)))


def wait_p99_s(servers: Floats, load: Floats, service_s: Floats, variation: Floats) -> Floats:
    """W99 of equation 6, seconds; infinite if load >= servers, 0 if fewer than 1 % wait.

    `load` is in Erlangs, `service_s` a server's mean time, `variation` its squared coefficient.
    """
    wait = np.zeros(servers.shape)
    slack = servers - load
    wait[slack <= 0] = np.inf
    asked = np.flatnonzero((slack > 0) & (slack < _SURELY_FREE * np.sqrt(servers)) & (load > 0))
    if asked.size == 0:
        return wait
    c, a = servers[asked], load[asked]
    chance = erlang_c(c, a)
    # c mu - lambda = (c - a) / service time.
    tail = np.log(np.maximum(chance, _TAIL) / _TAIL) * (1 + variation[asked])
    wait[asked] = tail * service_s[asked] / (2 * (c - a))
    return wait
