"""The control plane's public routes: when the gateway says that it can serve."""

from collections.abc import Sequence

import httpx
import pytest

from gateway.control.app import control_app
from gateway.fleet import fleet
from gateway.fleet.model_runtime import ModelRuntime
from tests.builders import served_model
from tests.control import control_of


def client_of(models: Sequence[ModelRuntime], *, draining: bool = False) -> httpx.AsyncClient:
    control = control_of(models=models, names={}, clock=lambda: 0.0, draining=lambda: draining)
    transport = httpx.ASGITransport(control_app(control))
    return httpx.AsyncClient(transport=transport, base_url="http://sluice")


def without_workers(name: str) -> ModelRuntime:
    served = served_model(name=name)
    for pool in served.fleet.pools:
        for engine in pool.engines:
            engine.up = False
        fleet.refresh(pool)
    return served


@pytest.mark.parametrize(
    ("models", "status", "said", "named"),
    [
        (["a", "b"], 200, "ready", None),
        (["a", "-b"], 200, "ready", ["b"]),
        (["-a", "-b"], 503, "no ready engine for a, b", ["a", "b"]),
        (["-a"], 503, "no ready engine for a", ["a"]),
    ],
)
async def test_a_gateway_is_ready_while_any_model_has_a_worker(
    models: list[str], status: int, said: str, named: list[str] | None
) -> None:
    served = [
        without_workers(name[1:]) if name[0] == "-" else served_model(name=name) for name in models
    ]
    client = client_of(served)
    answer = await client.get("/ready")
    assert (answer.status_code, answer.json()["status"]) == (status, said)
    assert answer.json().get("models_not_ready") == named
    assert (await client.get("/health")).status_code == 200


async def test_a_model_whose_pool_may_be_empty_is_ready_without_workers() -> None:
    served = without_workers("a")
    pool = served.fleet.pools[0]
    pool.present[:] = [False] * len(pool.present)
    pool.may_be_empty = True
    answer = await client_of([served]).get("/ready")
    assert (answer.status_code, answer.json()["status"]) == (200, "ready")


async def test_a_gateway_that_drains_is_not_ready() -> None:
    answer = await client_of([served_model()], draining=True).get("/ready")
    assert (answer.status_code, answer.json()) == (503, {"status": "draining"})
