"""Engines that die, break, stall and fail under load: small runs of `bench gateway-faults`."""

import pytest

from bench.gateway_faults import cancel_rows, fault_rows
from bench.report import Row


def failures(rows: list[Row]) -> list[str]:
    return [
        f"{r.metric}: {r.measured}, wanted {r.target} {r.note}" for r in rows if r.holds is False
    ]


@pytest.mark.parametrize("fault", ["kill -9", "reset-mid:5", "stall:0", "500:0.5", "503:0.5"])
def test_clients_survive_an_engine_that_breaks(fault: str) -> None:
    assert not failures(fault_rows(fault, concurrency=8, fault_s=1.5))


@pytest.mark.alone
def test_cancelled_requests_are_gone_from_the_engines() -> None:
    assert not failures(cancel_rows(40))
