"""A request is read in few files: what `make walk` prints, bounded."""

import asyncio

from bench.common.walk import WIDTH, page, walk

MAX_GATEWAY_FILES = 50


def test_a_chat_request_enters_at_the_protocol_and_crosses_few_files() -> None:
    hops = asyncio.run(walk())
    assert hops[0] == hops[-1] == "gateway/web/http/protocol.py"
    assert {"gateway/policy/admission/admission.py", "gateway/policy/quartz/quartz.py"} <= {*hops}
    assert {"gateway/adapters/records/usage_export.py", "predictor/online.py"} <= {*hops}
    assert len({name for name in hops if name.startswith("gateway/")}) <= MAX_GATEWAY_FILES


def test_the_page_fits_a_terminal_and_has_the_totals() -> None:
    hops = [f"gateway/a/module_{n % 3}.py" for n in range(20)] + ["predictor/b.py"]
    lines = page(hops).splitlines()
    assert max(map(len, lines)) <= WIDTH
    assert "21 hops, 4 files, 3 of them of the gateway." in lines
