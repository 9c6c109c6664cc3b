"""Entitlements of a cluster, from what its controller publishes to what clients are answered."""

import asyncio
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import httpx
import pytest

from bench.common.fleet import MODEL, Fleet, RedisServer
from gateway.errors import StateFailure
from gateway.records.tenancy import ClusterEntitlement
from gateway.settings import parse
from gateway.store.redis.cluster import ClusterStore, Fenced
from gateway.wiring.live_check import look
from sluice.hash_key import hashed_key
from tests.asking import admin, bearer, entitlement, get, post, until

pytestmark = pytest.mark.redis
KEY = "sk-search"


class Controller:
    """One that publishes through a Redis."""

    def __init__(self, server: RedisServer, epoch: int = 1) -> None:
        self._runner = asyncio.Runner()
        self._store = ClusterStore(server.url)
        self._epoch = epoch

    def publish(self, *entitlements: ClusterEntitlement, age_s: float = 0.0) -> None:
        """Try until Redis answers, as with each heartbeat."""
        granted = {each.name: each for each in entitlements}
        for _ in range(100):
            try:
                self._runner.run(self._store.publish(self._epoch, granted, age_s=age_s))
            except StateFailure:
                time.sleep(0.1)
            else:
                return
        raise TimeoutError("Redis takes nothing")

    def demand(self) -> dict[tuple[str, str], int]:
        return self._runner.run(self._store.demand())

    def close(self) -> None:
        self._runner.run(self._store.close())
        self._runner.close()


@pytest.fixture
def controller(own_server: RedisServer) -> Iterator[Controller]:
    made = Controller(own_server)
    yield made
    made.close()


def granted(name: str = "search", **more: Any) -> ClusterEntitlement:
    record = {f: more.pop(f) for f in ("verdict", "message", "suspended") if f in more}
    return ClusterEntitlement(
        name=name,
        fields={"name": name, "tenant": "acme", "model": MODEL, **more},
        digests=(hashed_key(f"sk-{name}").removeprefix("sha256:"),),
        created=time.time_ns() // 1_000_000,
        source=f"TokenEntitlement team/{name}",
        **record,
    )


def fleet_on(server: RedisServer, **more: Any) -> Fleet:
    config = {"state": {"url": server.url, "controller": {}}, **more}
    return Fleet(short=1, long=0, mock=("--speed", "50"), config=config)


def answer(fleet: Fleet, key: str = KEY) -> tuple[int, str]:
    """Status, and code of the refusal."""
    told = post(fleet.url, key)
    return told.status_code, "" if told.status_code == 200 else told.json()["error"]["code"]


def test_an_entitlements_life(own_server: RedisServer, controller: Controller) -> None:
    controller.publish()
    with fleet_on(own_server) as fleet:
        assert answer(fleet) == (401, "invalid_api_key")
        assert httpx.post(fleet.url + "/v1/chat/completions", json={}).status_code == 401
        began_s = time.monotonic()
        controller.publish(granted(service_class="guaranteed", concurrency=2))
        until(lambda: answer(fleet)[0] == 200)
        assert time.monotonic() - began_s < 20.0  # on a quiet machine 2

        message = "the pool has no ready replica"
        controller.publish(granted(verdict="degraded", message=message))
        until(lambda: answer(fleet) == (503, "entitlement_degraded"))
        refused = post(fleet.url, KEY)
        assert message in refused.json()["error"]["message"]
        assert int(refused.headers["retry-after"]) >= 5
        assert get(fleet.url, KEY, "/v1/models").json()["data"][0]["id"] == MODEL
        mine = get(fleet.url, KEY, "/v1/sluice/me").json()
        assert mine["state"] == "degraded"
        shown = admin(fleet.url, "GET", "/admin/entitlements/search").json()
        assert (shown["state"], shown["message"]) == ("degraded", message)
        assert (shown["origin"], shown["source"]) == ("kubernetes", "TokenEntitlement team/search")
        path = "/admin/entitlements/search"
        for method, below, body in (
            ("PATCH", "", {"slo_target_ms": 3}),
            ("DELETE", "", None),
            ("POST", "/keys", None),
        ):
            told = admin(fleet.url, method, path + below, json=body)
            assert told.status_code == 409
            assert told.json()["error"]["code"] == "entitlement_in_cluster"
            assert "TokenEntitlement team/search" in told.json()["error"]["message"]

        controller.publish(granted())
        until(lambda: answer(fleet)[0] == 200)
        assert admin(fleet.url, "POST", path + "/suspend").status_code == 200
        assert answer(fleet) == (403, "entitlement_suspended")
        assert admin(fleet.url, "POST", path + "/resume").status_code == 200
        assert answer(fleet)[0] == 200
        controller.publish(granted(expires_at="2020-01-01T00:00:00Z"))
        until(lambda: answer(fleet) == (403, "entitlement_expired"))
        controller.publish()
        until(lambda: answer(fleet) == (401, "invalid_api_key"))


def test_the_older_the_news_the_more_classes_are_refused(
    own_server: RedisServer, controller: Controller
) -> None:
    """Its keys in the file serve on."""
    classes = {"spot": 1, "elastic": 2, "guaranteed": 3}
    all_of = [granted(c, service_class=c, concurrency=1) for c in classes]
    all_of[0] = granted("spot", service_class="spot")
    controller.publish(*all_of)

    def agrees(fleet: Fleet, expected: list[tuple[int, str]]) -> bool:
        return [answer(fleet, f"sk-{name}") for name in classes] == expected

    with fleet_on(own_server, entitlements=[entitlement("own")]) as fleet:
        for times in (1, 2, 3):
            controller.publish(*all_of, age_s=3600.0 * times + 1)
            stale = [c for c, most in classes.items() if times >= most]
            expected = [(503, "entitlement_degraded") if c in stale else (200, "") for c in classes]
            until(partial(agrees, fleet, expected))
            assert answer(fleet, "sk-own")[0] == 200
        assert fleet.metrics()["sluice_cluster_age_seconds"] > 3 * 3600
        controller.publish(*all_of)
        until(lambda: answer(fleet, "sk-spot")[0] == 200)


def test_a_redis_that_lost_all_and_controllers_that_were_replaced(
    own_server: RedisServer, controller: Controller
) -> None:
    controller.publish(granted())
    with fleet_on(own_server) as fleet:
        assert answer(fleet)[0] == 200
        own_server.kill()
        own_server.start()
        until(lambda: fleet.metrics()["sluice_store_up"] == 1)
        assert answer(fleet)[0] == 200
        later = Controller(own_server, epoch=2)
        later.publish(granted(), granted("more"))
        until(lambda: answer(fleet, "sk-more")[0] == 200)
        with pytest.raises(Fenced):
            controller.publish()
        with own_server.client() as client:
            client.flushall()
        controller.publish()  # it hears of nobody: a gateway knows better
        time.sleep(2.5)
        assert answer(fleet)[0] == answer(fleet, "sk-more")[0] == 200
        later.publish(granted("more"))
        until(lambda: answer(fleet) == (401, "invalid_api_key"))
        assert answer(fleet, "sk-more")[0] == 200
        later.close()


def test_a_gateway_that_starts_without_news_serves_keys_of_its_file_alone(
    own_server: RedisServer, controller: Controller
) -> None:
    controller.publish(granted())
    with fleet_on(own_server, entitlements=[entitlement("own")]) as fleet:
        assert answer(fleet)[0] == 200
        (replica,) = fleet.replicas
        fleet.kill_replica(replica)
        own_server.kill()
        fleet.start_replica(replica)
        until(lambda: _listens(fleet), 30.0)
        for key in (KEY, "sk-own", ""):
            assert answer(fleet, key) == (503, "keys_not_read")
        own_server.start()
        until(lambda: fleet.metrics()["sluice_store_up"] == 1)
        until(lambda: answer(fleet, "sk-own")[0] == 200)
        assert httpx.get(fleet.url + "/ready", headers=bearer(KEY)).status_code == 200
        assert answer(fleet) == (503, "keys_not_read")
        controller.publish(granted())
        until(lambda: answer(fleet)[0] == 200)
        assert answer(fleet, "sk-own")[0] == 200


def _listens(fleet: Fleet) -> bool:
    try:
        return bool(httpx.get(fleet.url + "/health", trust_env=False).status_code)
    except httpx.TransportError:
        return False


async def test_a_live_check_tells_whether_a_controller_publishes(own_server: RedisServer) -> None:
    text = f"""
version: 1
state: {{url: "{own_server.url}", controller: {{}}}}
models: [{{name: m, pools: {{p: {{max_model_len: 8, max_num_seqs: 1, workers: ["http://a.invalid"]}}}}}}]
"""
    config = parse(text, "sluice.yaml", {})
    found = [each for each in await look(config) if each.pool == "state"]
    assert [(f.ready, f.problem) for f in found] == [(False, "no controller has published")]
    store = ClusterStore(own_server.url)
    await store.publish(0, {}, age_s=0.0)
    await store.close()
    assert [each.ready for each in await look(config) if each.pool == "state"] == [True]


def test_the_controller_hears_what_the_models_need(
    own_server: RedisServer, controller: Controller
) -> None:
    controller.publish(granted(service_class="guaranteed", concurrency=4))
    with fleet_on(own_server) as fleet:
        until(lambda: controller.demand() == {(MODEL, "short"): 1}, 30.0)
        assert answer(fleet)[0] == 200
