"""What `sluice check --live` says of an engine whose host has no address."""

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
