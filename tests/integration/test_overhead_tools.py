"""The C engine and load generator of bench overhead, against each other."""

import shutil
import urllib.request
from pathlib import Path

import pytest

from bench.common.tools import HttpLoad, bodies, build_tools, start_engines
from gateway.fleet.engine_metrics import NEEDED, read_page
from sluice.children import Children

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")


def test_streams_have_the_chunks_asked_for_and_come_from_every_engine(tmp_path: Path) -> None:
    tools = build_tools(tmp_path)
    assert tools is not None
    engine, load = tools
    body = bodies(tmp_path, "m", max_tokens=5)
    with Children() as children:
        ports = start_engines(children, engine, 2, 2000)
        for port in ports:
            children.wait_for(f"http://127.0.0.1:{port}/health")
        streams = HttpLoad(load, ports, body["stream"]).run(4, 0.3)
        assert streams["errors"] == 0
        assert streams["requests"] >= 4
        # Chunks of streams that ended after the time are not counted.
        assert 5 * (streams["requests"] - 4) <= streams["chunks"] <= 5 * streams["requests"]
        assert 500 < streams["gap_p50_us"] < 20_000
        for port in ports:
            sample = read_page(page_of(port))
            assert all(getattr(sample, field) is not None for field in NEEDED)
            assert sample.running == 0
            assert sample.generation_tokens_total
            assert sample.generation_tokens_total % 5 == 0
            assert b'block_size="16"' in page_of(port)


def page_of(port: int) -> bytes:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
        page: bytes = answer.read()
        return page
