"""Erlang-C against its defining sums and M/M/1, and Kimura's tail."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.queueing import erlang_c, wait_p99_s


def by_sums(servers: int, load: float) -> float:
    """Equation 5 of FleetOpt, term by term."""
    last = load**servers / math.factorial(servers) / (1 - load / servers)
    return last / (sum(load**k / math.factorial(k) for k in range(servers)) + last)


@given(servers=st.integers(1, 60), use=st.floats(0.01, 0.99))
def test_erlang_c_is_its_sums(servers: int, use: float) -> None:
    load = servers * use
    found = erlang_c(np.array([float(servers)]), np.array([load]))[0]
    assert found == pytest.approx(by_sums(servers, load), rel=1e-8, abs=1e-14)


def test_one_server_waits_as_m_m_1() -> None:
    assert erlang_c(np.array([1.0]), np.array([0.6]))[0] == pytest.approx(0.6)
    # P(W > t) = rho exp(-(mu - lambda) t) = .01 at cv^2 = 1.
    wait = wait_p99_s(np.array([1.0]), np.array([0.6]), np.array([2.0]), np.array([1.0]))[0]
    assert 0.6 * math.exp(-(0.5 - 0.3) * wait) == pytest.approx(0.01)


def test_thousands_of_servers_do_not_overflow() -> None:
    found = erlang_c(np.array([40_000.0]), np.array([39_900.0]))[0]
    assert 0 < found < 1


def test_overload_waits_without_end_and_no_load_not_at_all() -> None:
    one = np.array([1.0, 1.0])
    wait = wait_p99_s(np.array([4.0, 4.0]), np.array([4.0, 0.0]), one, one)
    assert wait.tolist() == [np.inf, 0.0]


@given(servers=st.integers(1, 2000), use=st.floats(0.3, 0.99), variation=st.floats(0.01, 9))
def test_waits_shrink_with_servers(servers: int, use: float, variation: float) -> None:
    load = np.full(2, servers * use)
    one = np.ones(2)
    wait = wait_p99_s(np.array([servers, servers + 1.0]), load, one, variation * one)
    assert wait[1] <= wait[0]
