"""`python -m bench.operators.histories KIND COUNT`: live through so many new histories.

Prints how many held; a failure ends it with the shrunk history.
"""

import logging
import sys
from collections.abc import Callable

from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from bench.common.redis_server import RedisServer
from tests.contract.test_unlucky_operators import InMemory, InRedis, OperatorsMachine, Shared

STEPS = 20


def live(opener: Callable[[], Shared], count: int) -> int:
    """How many histories held. Raises AssertionError for the first that did not."""
    held = 0

    class Machine(OperatorsMachine):
        def teardown(self) -> None:
            nonlocal held
            super().teardown()
            held += 1

    Machine.opener = staticmethod(opener)
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=count,
            stateful_step_count=STEPS,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    return held


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    kind, number = sys.argv[1], int(sys.argv[2])
    if kind == "memory":
        print(live(InMemory, number))
    else:
        with RedisServer() as server:
            print(live(lambda: InRedis(server), number))
