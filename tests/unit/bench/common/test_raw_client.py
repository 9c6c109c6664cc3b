"""Whether a client that left had asked."""

import asyncio
import socket

import pytest

from bench.common.raw_client import RawClient

LARGE = bytes(64 << 20)
"""More than the kernel keeps for a reader that does not read."""


@pytest.mark.parametrize(
    ("leaves_s", "body", "asked"),
    [(0.2, b"{}", True), (0.0, b"{}", False), (0.2, LARGE, False)],
    ids=["while it waits", "while it connects", "while it sends"],
)
def test_who_leaves_has_asked_once_the_whole_request_was_sent(
    leaves_s: float, body: bytes, asked: bool
) -> None:
    async def scenario() -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:  # accepts, reads and says nothing
            client = RawClient(f"http://127.0.0.1:{server.getsockname()[1]}")
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(leaves_s):
                    await client.post("/v1/chat/completions", body)
            assert client.asked == asked
            await asyncio.sleep(0)  # its transport is closed a turn later

    asyncio.run(scenario())
