"""The upstream's contract holds on uvloop, where the gateway runs, and on asyncio's own loop.

Those of stores do not depend on how fast Redis answers.
"""

import asyncio
from collections.abc import Callable, Iterator, Mapping

import pytest
import uvloop

from gateway.store.redis import link, route

LoopFactory = Callable[[], asyncio.AbstractEventLoop]


@pytest.hookimpl(optionalhook=True)
def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, LoopFactory]:
    """Event loops to run a test on."""
    if item.path.name == "test_upstream.py":
        return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
    return {"asyncio": asyncio.new_event_loop}


@pytest.fixture(scope="module", autouse=True)
def unhurried_redis(request: pytest.FixtureRequest) -> Iterator[None]:
    """Redis may take its time, but where its absence is the subject: the machine may be busy."""
    with pytest.MonkeyPatch.context() as patched:
        if request.path.name not in {"test_redis_outages.py", "test_bus.py"}:
            for module in (link, route):
                patched.setattr(module, "TIMEOUT_S", 30.0)
        yield
