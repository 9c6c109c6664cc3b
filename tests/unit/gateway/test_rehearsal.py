"""A rehearsed request takes the whole way, and nobody else's state sees it."""

import asyncio
import time
from collections.abc import Callable

import pytest
import uvicorn
from uvicorn.server import ServerState

from gateway import rehearsal as module
from gateway.models import served_model
from gateway.rehearsal import Rehearsal
from gateway.settings import parse
from gateway.web.data_plane import DataPlane
from gateway.web.protocol import GatewayProtocol

_CONFIG = """version: 1
models:
  - name: org/model
    pools:
      short: {max_model_len: 8192, max_num_seqs: 8, workers: ["http://127.0.0.1:9"]}
      long: {max_model_len: 65536, max_num_seqs: 8, workers: ["http://127.0.0.1:10"]}
"""


def _made() -> Rehearsal:
    config = parse(_CONFIG, "test.yaml", {})
    return Rehearsal(served_model(config, config.models[0]), time.monotonic)


def _protocol(real: DataPlane) -> GatewayProtocol:
    config = uvicorn.Config(real, http=GatewayProtocol, ws="none", lifespan="off", log_config=None)
    config.load()
    return GatewayProtocol(config=config, server_state=ServerState(), app_state={})


def _real() -> DataPlane:
    async def control(*_: object) -> None:
        raise AssertionError

    return DataPlane(None, control, new_id=lambda: "x", max_body_bytes=1)  # type: ignore[arg-type]


async def _until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(5.0):
        while not true():  # noqa: ASYNC110 - it is a count that is waited for
            await asyncio.sleep(0.001)


async def test_a_walk_is_answered_by_the_pipeline() -> None:
    rehearsal, real = _made(), _real()
    rehearsal.start(_protocol(real), real)
    for wanted in (1, 2, 3):
        rehearsal.walk()
        await _until(lambda wanted=wanted: rehearsal.walked == wanted)  # type: ignore[misc]
    assert real.answered == 0
    await rehearsal.close()


async def test_it_walks_while_the_gateway_is_in_use_and_stops_when_it_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "LATE_S", 1.0)  # a busy test machine is not what is tested
    monkeypatch.setattr(module, "IN_USE_S", 0.5)
    rehearsal, real = _made(), _real()
    rehearsal.start(_protocol(real), real)
    await asyncio.sleep(0.05)
    assert rehearsal.walked == 0, "nobody has used the gateway yet"
    real.answered += 1
    await _until(lambda: rehearsal.walked >= 3)
    await asyncio.sleep(0.6)
    walked = rehearsal.walked
    await asyncio.sleep(0.05)
    assert rehearsal.walked == walked, "out of use for longer than IN_USE_S"
    await rehearsal.close()
    real.answered += 1
    await asyncio.sleep(0.05)
    assert rehearsal.walked == walked


async def test_real_requests_displace_rehearsal() -> None:
    rehearsal, real = _made(), _real()
    rehearsal.start(_protocol(real), real)
    end_s = time.monotonic() + 0.1
    while time.monotonic() < end_s:
        real.answered += 1
        await asyncio.sleep(0)
    assert rehearsal.walked == 0
    await rehearsal.close()


async def test_it_ends_with_the_first_walk_that_fails(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "LATE_S", 1.0)
    monkeypatch.setattr(module, "_ANSWER", b"nonsense\r\n\r\n")
    rehearsal, real = _made(), _real()
    rehearsal.start(_protocol(real), real)
    real.answered += 1
    await _until(lambda: "rehearsal ended" in caplog.text)
    told = len(caplog.records)
    real.answered += 1
    await asyncio.sleep(0.3)
    assert len(caplog.records) == told
    assert rehearsal.walked == 0
    await rehearsal.close()
