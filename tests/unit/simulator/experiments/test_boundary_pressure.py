"""The gateway's controller where one pool queues and the other idles, in virtual time."""

from planner.workload.library import SHIPPED
from simulator.experiments.boundary_pressure import Shift, run

BURST = Shift(
    name="burst",
    lengths=SHIPPED["azure"].workload.as_cdf().points,
    rate_per_s=2.5,
    burst_per_s=2.7,
    start_s=300.0,
    end_s=1500.0,
    last_s=1800.0,
    short_nodes=1,
    long_nodes=2,
    slots=16,
)


def test_a_burst_of_short_prompts_is_shared_with_the_pool_that_idles() -> None:
    errors, pressure = run(BURST, "errors"), run(BURST, "pressure")
    assert errors.minutes[-1].boundary >= BURST.boundary
    assert pressure.minutes[-1].boundary < BURST.boundary
    assert pressure.served_within(5.0) > errors.served_within(5.0) + 0.1
    assert pressure.ttft_p99_s(1) < 5.0
