"""For all tests: a Redis server of the suite's own, and the rule that CI skips none of it."""

import functools
import os
import signal
import ssl
import sys
from collections.abc import Generator, Iterator
from typing import Any

import certifi
import pytest
from hypothesis import HealthCheck, settings

from bench.common.fleet import RedisServer, redis_program
from tests import forked

# As Hypothesis itself does where CI is set: how long an example takes says nothing of the code
# on a machine that does other things, too.
settings.register_profile(
    "untimed", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("untimed")

# A shell that starts the tests in the background has them, and all that they start, ignore Ctrl-C,
# which tests send to what they started.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def trusted_certificates() -> Iterator[None]:
    """Public certificates are read once; httpx reads them for each client in 25 ms of CPU."""
    create = ssl.create_default_context
    public = {"cafile": certifi.where()}
    known = functools.cache(lambda: create(cafile=public["cafile"]))

    def shared(*args: Any, **more: Any) -> ssl.SSLContext:
        return known() if not args and more == public else create(*args, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ssl, "create_default_context", shared)
        yield


@pytest.fixture(scope="session", autouse=True)
def forked_servers() -> Iterator[None]:
    """Gateways and engines are forked where the system has what that takes."""
    if sys.platform != "linux":
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sluice.children.spawn", forked.spawn)
        yield
    if forked.fork_server.cache_info().currsize:
        forked.fork_server().close()


@pytest.fixture(scope="session")
def redis_process() -> Iterator[RedisServer]:
    """One server for the whole run. Tests that break it start their own."""
    if redis_program() is None:
        pytest.skip("redis-server is not on PATH")
    with RedisServer() as server:
        yield server


@pytest.fixture
def own_server() -> Iterator[RedisServer]:
    """A server that the test may break."""
    if redis_program() is None:
        pytest.skip("redis-server is not on PATH")
    with RedisServer() as server:
        yield server


@pytest.fixture
def redis_server(redis_process: RedisServer) -> RedisServer:
    """The run's server, emptied."""
    with redis_process.client() as client:
        client.flushall()
        client.script_flush()
    return redis_process


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """With CI=true a test marked `redis` or `helm` that is skipped fails: CI has both."""
    report = yield
    wanted = next((name for name in ("redis", "helm") if item.get_closest_marker(name)), None)
    if wanted and report.skipped and os.environ.get("CI", "").lower() in {"1", "true"}:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = f"a test marked {wanted} may not be skipped in CI: {reason}"
    return report
