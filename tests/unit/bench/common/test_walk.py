"""A request is read in few files: what `make walk` prints, bounded."""

import asyncio

from gateway.fleet.probes import LoopWatch
from tests.walk import ENTRY, WIDTH, Walk, page, walk

MAX_GATEWAY_FILES = 50


def test_a_chat_request_enters_at_the_protocol_and_crosses_few_files() -> None:
    hops = asyncio.run(walk())
    assert hops[-1] == ENTRY
    assert {"gateway/admission/admission.py", "gateway/scheduling/quartz.py"} <= {*hops}
    assert {"gateway/usage/usage_export.py", "predictor/online.py"} <= {*hops}
    assert len({name for name in hops if name.startswith("gateway/")}) <= MAX_GATEWAY_FILES


async def test_a_timer_that_runs_beside_the_request_is_no_hop() -> None:
    loop, watch = asyncio.get_running_loop(), LoopWatch()
    watch.start()
    with Walk(()) as walked:
        loop.call_soon(watch._beat, loop)
        await asyncio.sleep(0)
    watch.close()
    assert walked.hops == []


def test_the_page_fits_a_terminal_and_has_the_totals() -> None:
    hops = [f"gateway/a/module_{n % 3}.py" for n in range(20)] + ["predictor/b.py"]
    lines = page(hops).splitlines()
    assert max(map(len, lines)) <= WIDTH
    assert "21 hops, 4 files, 3 of them of the gateway." in lines
