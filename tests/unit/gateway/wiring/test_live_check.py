"""What `sluice check --live` says of engines without an address, or in another phase."""

import asyncio
import socket
from typing import Any, NoReturn

import pytest

from gateway.settings import parse
from gateway.wiring.live_check import look

FILE = """\
version: 1
models:
  - name: m
    pools: {all: {max_model_len: 8192, max_num_seqs: 4, workers: ["http://vllm.invalid:8000"]}}
"""


@pytest.mark.parametrize("says", ["Name or service not known", "Temporary failure in resolution"])
async def test_a_host_without_an_address_is_told_with_its_fix(
    monkeypatch: pytest.MonkeyPatch, says: str
) -> None:
    def unknown(*_: Any, **__: Any) -> NoReturn:
        raise socket.gaierror(socket.EAI_NONAME, says)

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    (found,) = await look(parse(FILE, "sluice.yaml", {}))
    assert found.problem.endswith(f"name not found: {says}")
    assert found.fix.startswith("correct the host in its URL")


PHASED = """\
version: 1
models:
  - name: m
    pools:
      all:
        max_model_len: 8192
        prefill: {{max_num_seqs: 4, workers: ["http://127.0.0.1:{port}"]}}
        decode: {{max_num_seqs: 4, workers: ["http://127.0.0.2:{port}"]}}
        transfer: {{kind: sglang}}
"""


async def test_an_engine_in_another_phase_than_its_pool_is_told_with_its_fix() -> None:
    body = b'{"data": [{"id": "m"}], "disaggregation_mode": "prefill"}'
    page = b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%b"

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(page % (len(body), body))
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        async with await asyncio.start_server(answer, "127.0.0.2", port):
            decode, prefill = await look(parse(PHASED.format(port=port), "sluice.yaml", {}))
    assert (prefill.pool, prefill.ready, prefill.problem) == ("all/prefill", True, "")
    assert decode.problem == "its disaggregation_mode is prefill, and the file has it in decode"
    assert decode.fix == "set --disaggregation-mode decode, or move it"
