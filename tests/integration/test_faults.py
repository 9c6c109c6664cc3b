"""Engines that die, break, stall and fail under load: small runs of `bench gateway-faults`."""

from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from bench.common.fleet import MODEL, Fleet
from bench.common.report import Row
from bench.gateway.faults import CHAT, cancel_rows, fault_rows


def failures(rows: list[Row]) -> list[str]:
    return [
        f"{r.metric}: {r.measured}, wanted {r.target} {r.note}" for r in rows if r.holds is False
    ]


@pytest.mark.parametrize("fault", ["kill -9", "reset-mid:5", "stall:0", "500:0.5", "503:0.5"])
def test_clients_survive_an_engine_that_breaks(fault: str) -> None:
    assert not failures(fault_rows(fault, concurrency=8, fault_s=1.5))


def test_requests_at_a_frozen_engine_are_taken_to_another() -> None:
    """Its health checks are good, and its first_byte_s is minutes away."""
    health = {"interval_s": 0.25, "timeout_s": 1.0, "stall_s": 0.5}
    with Fleet(short=2, long=0, config={"health": health}) as fleet, ThreadPoolExecutor(8) as pool:
        fleet.engines[0].fail("stall:0")
        body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}

        def ask(number: int) -> httpx.Response:
            return httpx.post(
                fleet.url + CHAT, json={**body, "stream": number % 2 == 0}, timeout=30
            )

        answers = list(pool.map(ask, range(8)))
        assert [answer.status_code for answer in answers] == [200] * 8
        moved = [fleet.decision(answer.headers["x-request-id"]) for answer in answers]
        results = [[each["result"] for each in record["attempts"]] for record in moved]
        assert ["frozen", "ok"] in results
        # And who comes next does not go there.
        assert {ask(0).headers["x-sluice-worker"] for _ in range(6)} == {fleet.engines[1].id}


@pytest.mark.alone
def test_cancelled_requests_are_gone_from_the_engines() -> None:
    assert not failures(cancel_rows(40))
