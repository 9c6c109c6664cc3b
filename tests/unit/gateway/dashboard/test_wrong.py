"""The verdict names each cause, and says nothing only if nothing is wrong."""

from typing import Any

from gateway.dashboard.figures import Brief
from gateway.dashboard.snapshot import wrong_now

POOL = {"model": "m", "pool": "short", "ready": 2, "workers": 2}
WORKER = {"model": "m", "pool": "short", "id": "a:1", "state": "up", "not_ready": None}


def told(*workers: dict[str, Any], store_up: bool = True, ready: int = 2, **brief: Any) -> str:
    requests = [Brief(time_unix_s=1.0, request_id="r", status=1, **brief)] if brief else []
    found = wrong_now([{**POOL, "ready": ready}], workers, requests, store_up=store_up)
    return " | ".join(f"{one['level']} {one['text']}" for one in found)


def test_a_healthy_fleet_has_no_complaint() -> None:
    assert told(WORKER, {**WORKER, "state": "draining"}, outcome="refused", reason="tokens") == ""


def test_each_cause_is_named() -> None:
    down = {**WORKER, "state": "down", "not_ready": "it refuses connections"}
    assert told(down, ready=1) == "warn Worker a:1 of m/short is down: it refuses connections."
    assert told(down, ready=0).startswith(
        "bad Model m: no worker of pool short serves (it refuses connections). | warn Worker"
    )
    assert told(*[down] * 9).endswith("warn 4 more workers are out.")
    assert told(WORKER, store_up=False).startswith("bad The state store is away: ")
    spent = told(WORKER, outcome="refused", reason="budget", entitlement="chat")
    assert spent == "warn 1 requests of chat met a spent budget."
    failed = told(WORKER, outcome="upstream_error", model="m")
    assert failed == "warn 1 requests to m failed."
