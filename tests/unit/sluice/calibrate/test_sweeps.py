"""The sweeps on scripted streams."""

import asyncio
from typing import Any, cast

import pytest

from planner.calibration.traces import StreamTrace
from planner.errors import PlanError
from sluice.calibrate.client import EngineClient
from sluice.calibrate.sweeps import SweepBounds, Sweeps


class Scripted:
    """An engine client whose streams begin at once, with a chunk every `gap_s`."""

    def __init__(self, gaps_s: list[float]) -> None:
        """`gaps_s`: of the first streams; the last one holds for those after it."""
        self.gaps_s = gaps_s
        self.requests = 0
        self.failures: list[str] = []

    async def prompt(self, tokens: int) -> str:
        return "x" * tokens

    async def stream(self, prompt: int, output: int, **_: Any) -> StreamTrace:
        self.requests += 1
        gap_s = self.gaps_s.pop(0) if len(self.gaps_s) > 1 else self.gaps_s[0]
        return stream(output, gap_s, prompt)


def stream(output: int, gap_s: float, prompt: int = 32) -> StreamTrace:
    times_s = tuple(0.1 + gap_s * index for index in range(output))
    return StreamTrace(
        submit_s=0.0, times_s=times_s, tokens=tuple(range(1, output + 1)), prompt_tokens=prompt
    )


def swept(client: Scripted, monkeypatch: pytest.MonkeyPatch, most_requests: int = 500) -> None:
    async def at_once(_: float) -> None:
        return

    monkeypatch.setattr("sluice.calibrate.sweeps.asyncio.sleep", at_once)
    bounds = SweepBounds(most_concurrency=1, most_requests=most_requests, budget_s=60.0)
    sweeps = Sweeps(
        cast("EngineClient", client),
        bounds,
        window=4096,
        kv_tokens=None,
        say=lambda *_: None,
    )
    asyncio.run(sweeps.run(stream(48, 0.01)))


def test_a_load_whose_tokens_come_in_bursts_is_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    client = Scripted([0.0, 0.0, 0.01])
    # One stream at a time is too little to fit: the sweeps ran to their end.
    with pytest.raises(PlanError, match="2 windows of even decoding"):
        swept(client, monkeypatch)


def test_bursts_that_go_on_end_the_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    client = Scripted([0.0])
    with pytest.raises(PlanError, match="bursts") as raised:
        swept(client, monkeypatch)
    assert "proxy" in raised.value.fix
    assert client.requests < 20


def test_no_load_is_run_again_beyond_the_bound_of_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client = Scripted([0.0])
    with pytest.raises(PlanError, match="bursts"):
        swept(client, monkeypatch, most_requests=14)
    assert client.requests == 2  # twelve are left for the held-out load
