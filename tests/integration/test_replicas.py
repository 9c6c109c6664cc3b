"""Replicas on one Redis: as exact as one, known to one another, none the worse when one dies."""

import hashlib
import json
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

import httpx
import pytest

from bench.common.fleet import ADMIN_KEY, MODEL, Fleet, RedisServer, consecutive_ports
from sluice.children import ChildDied
from tests.asking import ADMIN, CHAT, admin, chat, children, entitlement, post, until

pytestmark = pytest.mark.redis

LIMIT = 3
COUNT = 2
MANY = [f"{'w' * 60}-{number:03}" for number in range(1_000)]
"""Entitlements with the longest names, as many as a page holds."""


def key(name: str) -> dict[str, str]:
    return {"name": name, "sha256": hashlib.sha256(f"sk-{name}".encode()).hexdigest()}


def fleet_of(redis: RedisServer, folder: Path, *, speed: int = 20, **config: Any) -> Fleet:
    fleet = Fleet(
        short=1,
        long=0,
        mock=("--speed", str(speed)),
        config={
            "entitlements": [entitlement("a", max_concurrency=LIMIT), entitlement("free")],
            "request_log": {"path": str(folder / "log.jsonl")},
            "usage_export": {"path": str(folder / "usage.jsonl")},
            "state": {"url": redis.url},
            **config,
        },
    )
    server = fleet.replicas[0].config["server"]
    server["workers"] = COUNT
    server["management_port"] = consecutive_ports(COUNT + 1)
    return fleet


def chat_as(fleet: Fleet, name: str, tokens: int = 4, **more: Any) -> httpx.Response:
    """A request over a connection of its own, dealt out by the kernel."""
    return post(fleet.url, f"sk-{name}", chat(tokens, **more))


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("replicas")


@pytest.fixture(scope="module")
def fleet(redis: RedisServer, folder: Path) -> Iterator[Fleet]:
    many = [
        {"name": name, "tenant": "wide", "model": MODEL, "slo_target_ms": 5_000} for name in MANY
    ]
    own = [entitlement("a", max_concurrency=LIMIT), entitlement("free")]
    wide = [{"name": "wide", "keys": [key("wide")]}]
    with fleet_of(redis, folder, entitlements=own + many, tenants=wide) as fleet:
        for url in fleet.replicas[0].managed_at:
            until(lambda url=url: _replicas_at(url) == COUNT)  # type: ignore[misc]
        yield fleet


def _replicas_at(url: str) -> float:
    page = httpx.get(url + "/metrics", trust_env=False).text
    return float(page.partition("\nsluice_replicas ")[2].partition("\n")[0])


def test_limits_leases_and_metrics_are_exact_over_both(fleet: Fleet, folder: Path) -> None:
    before = fleet.metrics()

    def ask(_: int) -> list[int]:
        return [chat_as(fleet, "a", 40).status_code for _ in range(6)]

    with ThreadPoolExecutor(8) as threads:
        found = Counter(chain.from_iterable(threads.map(ask, range(8))))
    assert set(found) == {200, 429}
    until(lambda: fleet.leases() == 0)
    after = fleet.metrics()
    counted = {
        outcome: sum(
            value - before.get(key, 0)
            for key, value in after.items()
            if key.startswith("sluice_requests_total") and f'outcome="{outcome}"' in key
        )
        for outcome in ("ok", "refused")
    }
    assert counted == {"ok": found[200], "refused": found[429]}
    key = {"authorization": "Bearer sk-a"}

    def refused() -> dict[str, int]:
        me = httpx.get(fleet.url + "/v1/sluice/me", headers=key, trust_env=False).json()
        counts: dict[str, int] = me["refused"]
        return counts

    # Replicas tell one another of refusals twice a second. Then whichever is asked knows all.
    until(lambda: all(refused() == {"concurrency": found[429]} for _ in range(4)))
    until(lambda: (folder / "usage.jsonl").read_text().count("\n") == found[200])
    until(lambda: (folder / "log.jsonl").read_text().count('"outcome"') == found.total())
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    assert most_at_once(line["admission"] for line in lines if "admission" in line) <= LIMIT
    served = Counter(line["request_id"].rpartition("-")[0] for line in lines if "outcome" in line)
    assert len(served) == COUNT, "both have served"


def most_at_once(leases: Iterable[dict[str, Any]]) -> int:
    """The most leases that were held at the same time, by the clock of this host."""
    changes = []
    for lease in leases:
        if "admitted_unix_s" in lease:
            changes += [(lease["admitted_unix_s"], 1), (lease["settled_unix_s"], -1)]
    return max(accumulate(change for _, change in sorted(changes)))


def test_what_an_admin_does_at_one_holds_at_both_within_two_seconds(fleet: Fleet) -> None:
    one, other = fleet.replicas[0].managed_at
    made = admin(
        one,
        "POST",
        "/admin/entitlements",
        json={"name": "new", "tenant": "t", "model": MODEL, "max_concurrency": 2},
    )
    key = made.json()["key"]

    def all_say(status: int) -> None:
        # The management port serves what the clients' port does, of one certain replica.
        until(lambda: all(post(url, key).status_code == status for url in (one, other)), 2.0)

    all_say(200)
    assert admin(one, "POST", "/admin/entitlements/new/suspend").status_code == 200
    all_say(403)
    assert admin(other, "DELETE", "/admin/entitlements/new").status_code == 204
    all_say(401)
    audits = [admin(url, "GET", "/admin/audit").json() for url in (one, other)]
    assert audits[0] == audits[1]
    assert {record["what"] for record in audits[0]["data"]} >= {"create", "suspend", "delete"}


def test_a_decision_a_drain_and_a_lease_are_found_by_either(fleet: Fleet) -> None:
    one, other = fleet.replicas[0].managed_at
    request_id = chat_as(fleet, "free").headers["x-request-id"]
    for url in (one, other):
        assert admin(url, "GET", f"/admin/decisions/{request_id}").json()["outcome"] == "ok"
        newest = admin(url, "GET", "/admin/decisions?limit=5").json()
        assert request_id in {record["request_id"] for record in newest}
    worker = fleet.engines[0].id
    assert admin(one, "POST", f"/admin/workers/{worker}/drain").status_code == 200

    def draining(url: str) -> bool:
        (model,) = admin(url, "GET", "/admin/pools").json()
        return bool(model["pools"][0]["workers"][0]["draining"])

    until(lambda: draining(other), 2.0)
    assert chat_as(fleet, "free").status_code == 503
    assert admin(other, "POST", f"/admin/workers/{worker}/drain?undo=true").status_code == 200
    until(lambda: not draining(one), 2.0)
    assert chat_as(fleet, "free").status_code == 200
    asked = {"model": MODEL, "input_tokens": 10, "max_tokens": 5}
    granted = post(one, "sk-free", asked, "/admission/authorize")
    usage = {
        "lease_id": granted.json()["lease_id"],
        "prompt_tokens": 10,
        "completion_tokens": 1,
    }
    told = [post(url, "sk-free", usage, "/admission/usage") for url in (other, one)]
    assert [answer.status_code for answer in told] == [200, 200]
    assert told[0].json() == told[1].json()
    unknown = {**usage, "lease_id": "x"}
    answer = post(other, "sk-free", unknown, "/admission/usage")
    assert answer.status_code == 404


def test_a_tenant_of_a_thousand_entitlements_is_served_by_either_alike(fleet: Fleet) -> None:
    one, other = fleet.replicas[0].managed_at
    headers = {"authorization": "Bearer sk-wide"}
    asked = {"model": MODEL, "input_tokens": 100, "max_tokens": 1_000}
    with httpx.Client(headers=headers, trust_env=False, timeout=30) as client:
        lease = client.post(one + "/admission/authorize", json=asked).json()
        usage = {"lease_id": lease["lease_id"], "prompt_tokens": 100, "completion_tokens": 5}
        settled = client.post(other + "/admission/usage", json=usage)
        assert (settled.status_code, settled.json()["charge_tokens"]) == (200, 105)
        assert client.post(one + CHAT, json=chat(stream=True)).status_code == 200
        seen: list[str] = []
        params: dict[str, str] = {"limit": "300"}
        while len(seen) < len(MANY):
            page = client.get(other + "/v1/sluice/me", params=params).json()
            seen += [entitlement["entitlement"] for entitlement in page["entitlements"]]
            params["after"] = page["next"]
        assert page["next"] is None
        assert seen == MANY

    def judged(path: str, auth: dict[str, str], of: str) -> int:
        rows = httpx.get(other + path, headers=auth, trust_env=False, timeout=30).json()[of]
        return sum(row["slo"]["met"] + row["slo"]["missed"] for row in rows if row["slo"])

    assert judged("/admin/entitlements?limit=1000", ADMIN, "data") == 1
    assert judged("/v1/sluice/me?limit=1000", headers, "entitlements") == 1


def test_a_tenant_finds_its_own_decision_whichever_replica_is_asked(fleet: Fleet) -> None:
    answer = chat_as(fleet, "free")
    path = f"{fleet.url}/v1/sluice/decisions/{answer.headers['x-request-id']}"
    for _ in range(8):  # new connections, dealt out by the kernel
        own, other = (
            httpx.get(path, headers={"authorization": f"Bearer {key}"}, trust_env=False)
            for key in ("sk-free", "sk-a")
        )
        assert (own.status_code, own.json()["tenant"]) == (200, "tenant-free")
        assert own.json()["worker"] == answer.headers["x-sluice-worker"]
        assert own.json()["story"][-1].startswith("The request was served")
        assert (other.status_code, other.headers["x-sluice-reason"]) == (404, "decision_not_found")


def test_clients_see_no_metrics_and_only_replicas_ask_replicas(fleet: Fleet) -> None:
    for path in ("/metrics", "/admin/pools", "/internal/replicas/decisions"):
        assert httpx.get(fleet.url + path, trust_env=False).status_code == 404
    for token in ("", "guess", ADMIN_KEY):
        answer = httpx.post(
            fleet.replicas[0].managed_at[0] + "/internal/replicas/decisions",
            content=b"5",
            headers={"authorization": f"Bearer {token}"} if token else {},
            trust_env=False,
        )
        assert answer.status_code == 401, token


def test_prometheus_is_told_where_the_replicas_are(fleet: Fleet) -> None:
    port = fleet.replicas[0].config["server"]["management_port"]
    (group,) = httpx.get(f"http://127.0.0.1:{port}/http_sd", trust_env=False).json()
    targets = [f"http://{target}" for target in group["targets"]]
    assert targets == fleet.replicas[0].managed_at


def test_a_killed_replica_s_leases_come_back_and_it_is_started_again(fleet: Fleet) -> None:
    assert fleet.gateway is not None
    pid = fleet.gateway.pid
    victims = children(pid)
    with ThreadPoolExecutor(LIMIT) as threads:
        running = [threads.submit(chat_as, fleet, "a", 4000) for _ in range(LIMIT)]
        until(lambda: fleet.leases() == LIMIT)
        refused = chat_as(fleet, "a")
        assert (refused.status_code, refused.headers["x-sluice-reason"]) == (429, "concurrency")
        held = [_leases_at(url) for url in fleet.replicas[0].managed_at]
        os.kill(victims[0], signal.SIGKILL)
        lost = 0
        for future in running:
            try:
                assert future.result(60).status_code == 200
            except httpx.TransportError:
                lost += 1
    assert lost in held, "its own clients, and no others"
    until(lambda: len(children(pid)) == COUNT and _all_answer(fleet))
    assert set(victims[1:]) < set(children(pid))

    def inflight() -> int:
        view = admin(fleet.replicas[0].managed_at[0], "GET", "/admin/entitlements/a").json()
        return sum(view["usage"]["inflight"].values())

    until(lambda: inflight() == 0, 60)  # within the leases' time to live
    assert [chat_as(fleet, "free").status_code for _ in range(6)] == [200] * 6


def _leases_at(url: str) -> float:
    page = httpx.get(url + "/metrics", trust_env=False).text
    return float(page.partition('\nsluice_leases{state="active"} ')[2].partition("\n")[0])


def _all_answer(fleet: Fleet) -> bool:
    try:
        return all(_replicas_at(url) >= COUNT for url in fleet.replicas[0].managed_at)
    except httpx.TransportError:
        return False


def test_sigterm_drains_every_replica(fleet: Fleet) -> None:
    assert fleet.gateway is not None
    with ThreadPoolExecutor(4) as threads:
        running = [threads.submit(chat_as, fleet, "free", 3000) for _ in range(4)]
        until(lambda: fleet.leases() == 4)
        fleet.gateway.send_signal(signal.SIGTERM)
        assert [future.result(60).status_code for future in running] == [200] * 4
    assert fleet.gateway.wait(15) == 0
    fleet.forget_gateway()


def test_one_replica_expects_the_hits_of_what_another_sent() -> None:
    with (
        RedisServer() as redis,
        Fleet(short=3, long=0, config={"state": {"url": redis.url}}, further=[{}]) as fleet,
    ):
        one, two = (replica.url for replica in fleet.replicas)
        until(lambda: _replicas_at(one) == _replicas_at(two) == 2)
        texts = [f"Document {number}. " * 900 for number in range(4)]
        sent = [_decision(one, text) for text in texts]
        assert all(record["scheduling"]["expected_hit_tokens"] == 0 for record in sent)
        time.sleep(2.0)
        again = [_decision(two, text) for text in texts]
        for first, second in zip(sent, again, strict=True):
            assert second["worker"] == first["worker"]
            expected = second["scheduling"]["expected_hit_tokens"]
            assert expected > 0.5 * second["usage"]["prompt_tokens"]
        page = httpx.get(two + "/metrics", trust_env=False).text
        assert "sluice_store_up 1" in page


def _decision(url: str, text: str) -> dict[str, Any]:
    """The record of a request, when it has ended."""
    answer = post(url, "", chat(5, text, stream=True))
    assert answer.status_code == 200
    path = f"/admin/decisions/{answer.headers['x-request-id']}"
    until(lambda: admin(url, "GET", path).status_code == 200)
    return dict(admin(url, "GET", path).json())


def test_a_replica_that_cannot_start_ends_the_gateway(redis: RedisServer, tmp_path: Path) -> None:
    fleet = fleet_of(redis, tmp_path, usage_export={"path": str(tmp_path)})
    with pytest.raises(ChildDied, match="ended with status 1"), fleet:
        pass


def test_replicas_end_when_their_supervisor_is_gone(redis: RedisServer, tmp_path: Path) -> None:
    with fleet_of(redis, tmp_path) as fleet:
        assert fleet.gateway is not None
        assert chat_as(fleet, "free").status_code == 200
        left = children(fleet.gateway.pid)
        fleet.kill_replica(fleet.replicas[0])
        until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in left))


def test_replicas_restarted_one_by_one_lose_no_request(redis: RedisServer, tmp_path: Path) -> None:
    with fleet_of(redis, tmp_path) as fleet, ThreadPoolExecutor(4) as threads:
        assert fleet.gateway is not None
        pid, done = fleet.gateway.pid, threading.Event()

        def ask(number: int) -> Counter[int]:
            found: Counter[int] = Counter()
            while not done.is_set():
                if number % 2:
                    found[chat_as(fleet, "free").status_code] += 1
                    continue
                with kept(fleet) as client:  # one that honours `connection: close`
                    found.update(client.post(CHAT, json=chat()).status_code for _ in range(20))
            return found

        asking = [threads.submit(ask, number) for number in range(4)]
        for victim in children(pid):
            os.kill(victim, signal.SIGTERM)
            until(lambda victim=victim: not Path(f"/proc/{victim}").exists())  # type: ignore[misc]
            until(lambda: len(children(pid)) == COUNT and _all_answer(fleet))
        done.set()
        found = sum((future.result(30) for future in asking), Counter[int]())
    assert set(found) == {200}


def test_a_draining_replica_accepts_no_connection_and_shows_its_metrics_to_the_end(
    redis: RedisServer, tmp_path: Path
) -> None:
    with fleet_of(redis, tmp_path, speed=5) as fleet, ThreadPoolExecutor(1) as threads:
        assert fleet.gateway is not None
        one, other = fleet.replicas[0].managed_at
        running = threads.submit(post, one, "sk-free", chat(4500))
        until(lambda: _leases_at(one) == 1)
        os.kill(children(fleet.gateway.pid)[0], signal.SIGTERM)
        until(lambda: httpx.get(one + "/ready", trust_env=False).status_code == 503)
        time.sleep(0.3)  # the next look at what has to be done
        before = requests_at(other)
        assert [chat_as(fleet, "free").status_code for _ in range(20)] == [200] * 20
        until(lambda: requests_at(other) == before + 20)
        assert _leases_at(one) == 1
        assert running.result(60).status_code == 200


def test_a_gateway_starts_while_the_replicas_of_one_that_was_killed_still_drain(
    redis: RedisServer, tmp_path: Path
) -> None:
    with fleet_of(redis, tmp_path, speed=5) as fleet, ThreadPoolExecutor(1) as threads:
        assert fleet.gateway is not None
        running = threads.submit(chat_as, fleet, "free", 6000)
        until(lambda: fleet.leases() == 1)
        left = children(fleet.gateway.pid)
        fleet.kill_replica(fleet.replicas[0])
        fleet.start_replica(fleet.replicas[0])
        fleet.wait_ready(fleet.replicas[0])
        assert any(Path(f"/proc/{pid}").exists() for pid in left), "one drains yet"
        assert chat_as(fleet, "free").status_code == 200
        assert running.result(60).status_code == 200


def kept(fleet: Fleet) -> httpx.Client:
    """A client that keeps its connection."""
    headers = {"authorization": "Bearer sk-free"}
    return httpx.Client(base_url=fleet.url, headers=headers, timeout=30, trust_env=False)


def requests_at(url: str) -> float:
    """Requests that one replica answered well."""
    page = httpx.get(url + "/metrics", trust_env=False).text.splitlines()
    lines = [line for line in page if line.startswith("sluice_requests_total{")]
    return sum(float(line.rpartition(" ")[2]) for line in lines if 'outcome="ok"' in line)
