"""A request is read in few files: what `make walk` prints, bounded."""

import asyncio

from tests.walk import ENTRY, walk

MAX_GATEWAY_FILES = 50


def test_a_chat_request_enters_at_the_protocol_and_crosses_few_files() -> None:
    hops = asyncio.run(walk())
    assert hops[-1] == ENTRY
    assert {"gateway/admission/admission.py", "gateway/scheduling/quartz.py"} <= {*hops}
    assert {"gateway/usage/usage_export.py", "predictor/online.py"} <= {*hops}
    assert len({name for name in hops if name.startswith("gateway/")}) <= MAX_GATEWAY_FILES
