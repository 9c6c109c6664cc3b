"""Several worker processes behind one port: as exact as one, and none the worse when one dies."""

import hashlib
import json
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

import httpx
import pytest

from bench.fleet import ADMIN_KEY, MODEL, Fleet
from sluice.children import ChildDied

CHAT = "/v1/chat/completions"
ADMIN = {"authorization": f"Bearer {ADMIN_KEY}"}
LIMIT = 3


def entitlement(name: str, **more: Any) -> dict[str, Any]:
    digest = hashlib.sha256(f"sk-{name}".encode()).hexdigest()
    return {
        "name": name,
        "tenant": f"tenant-{name}",
        "model": MODEL,
        "api_keys": [f"sha256:{digest}"],
        **more,
    }


def fleet_of(workers: int, folder: Path, **config: Any) -> Fleet:
    fleet = Fleet(
        short=1,
        long=0,
        mock=("--speed", "20"),
        config={
            "entitlements": [entitlement("a", max_concurrency=LIMIT), entitlement("free")],
            "request_log": {"path": str(folder / "log.jsonl")},
            "usage_export": {"path": str(folder / "usage.jsonl")},
            **config,
        },
    )
    fleet.replicas[0].config["server"]["workers"] = workers
    return fleet


class Client:
    """One client on one connection: whatever it asks, one worker answers."""

    def __init__(self, fleet: Fleet) -> None:
        self.http = httpx.Client(base_url=fleet.url, timeout=30, trust_env=False)
        self.port = 0

    def chat(self, name: str, tokens: int = 4, **more: Any) -> httpx.Response:
        body = {
            "model": MODEL,
            "messages": [{"role": "user", "content": "hello there"}],
            "max_tokens": tokens,
            "mock_output_tokens": tokens,
            **more,
        }
        return self.http.post(CHAT, json=body, headers={"authorization": f"Bearer sk-{name}"})

    def admin(self, method: str, path: str, **more: Any) -> httpx.Response:
        return self.http.request(method, path, headers=ADMIN, **more)


Clients = Callable[[Fleet, int], list[Client]]


@pytest.fixture
def clients() -> Iterator[Clients]:
    """Makes clients, each connected: the parent deals them out in turn."""
    made: list[Client] = []

    def make(fleet: Fleet, count: int) -> list[Client]:
        for _ in range(count):
            made.append(Client(fleet))
            stream = made[-1].http.get("/health").extensions["network_stream"]
            made[-1].port = stream.get_extra_info("client_addr")[1]
        return made[-count:]

    yield make
    for client in made:
        client.http.close()


def wait_until(true: Callable[[], Any], limit_s: float = 15.0) -> None:
    end_s = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < end_s, "did not happen in time"
        time.sleep(0.05)


def children(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(child) for child in text.split()]


def holder(pids: list[int], client: Client) -> int:
    """Which of these processes has a client's connection: the parent deals, and deals anew."""
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[2].endswith(f":{client.port:04X}"):
            for pid in pids:
                links = [entry.readlink() for entry in Path(f"/proc/{pid}/fd").iterdir()]
                if Path(f"socket:[{fields[9]}]") in links:
                    return pid
    raise AssertionError("nobody has it")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("workers")


@pytest.fixture(scope="module")
def fleet(folder: Path) -> Iterator[Fleet]:
    with fleet_of(2, folder) as fleet:
        yield fleet


def test_limits_leases_and_metrics_are_exact_over_both(
    fleet: Fleet, folder: Path, clients: Clients
) -> None:
    before = fleet.metrics()
    assert before["sluice_gateway_processes"] == 2
    many = clients(fleet, 8)

    def ask(client: Client) -> list[int]:
        return [client.chat("a", 40).status_code for _ in range(6)]

    with ThreadPoolExecutor(8) as threads:
        found = Counter(chain.from_iterable(threads.map(ask, many)))
    assert set(found) == {200, 429}
    wait_until(lambda: fleet.leases() == 0)
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
    for client in many[:2]:
        me = client.http.get("/v1/sluice/me", headers=key).json()
        assert me["refused"] == {"concurrency": found[429]}
    assert sums(after) == sums(fleet.metrics()), "whichever is asked"
    wait_until(lambda: (folder / "usage.jsonl").read_text().count("\n") == found[200])
    wait_until(lambda: (folder / "log.jsonl").read_text().count('"outcome"') == found.total())
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    assert {"terms", "entitlement"} <= {line.get("event") for line in lines}
    assert most_at_once(line for line in lines if "admitted_unix_s" in line) == LIMIT


def sums(page: dict[str, float]) -> dict[str, float]:
    """What a page adds up: its counters and histograms."""
    ends = ("_total", "_bucket", "_sum", "_count")
    return {k: v for k, v in page.items() if k.partition("{")[0].endswith(ends)}


def most_at_once(records: Iterable[dict[str, Any]]) -> int:
    """The most leases that were held at the same time, by the parent's clock."""
    changes = []
    for record in records:
        changes += [(record["admitted_unix_s"], 1), (record["settled_unix_s"], -1)]
    return max(accumulate(change for _, change in sorted(changes)))


def test_each_gets_its_share_of_the_clients(fleet: Fleet, clients: Clients) -> None:
    time.sleep(1)  # the parent has heard of all clients that left: who has fewer gets the next
    many = clients(fleet, 16)
    ids = [client.chat("free").headers["x-request-id"] for client in many]
    served = Counter(request_id.rpartition("-")[0] for request_id in ids)
    assert sorted(served.values()) == [8, 8]


def test_one_busy_client_is_passed_on_between_them(fleet: Fleet, clients: Clients) -> None:
    (busy,) = clients(fleet, 1)
    served: Counter[str] = Counter()
    end_s = time.monotonic() + 20
    while len(served) < 2:
        assert time.monotonic() < end_s, "one worker had all of it"
        answer = busy.chat("free", 1)
        assert answer.status_code == 200
        served[answer.headers["x-request-id"].rpartition("-")[0]] += 1


def test_what_an_admin_does_at_one_holds_at_both(fleet: Fleet, clients: Clients) -> None:
    one, other = clients(fleet, 2)
    made = one.admin(
        "POST",
        "/admin/entitlements",
        json={"name": "new", "tenant": "t", "model": MODEL, "max_concurrency": 2},
    )
    key = {"authorization": f"Bearer {made.json()['key']}"}
    assert other.http.get("/v1/sluice/me", headers=key).status_code == 200
    body = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
    for client in (one, other):
        assert client.http.post(CHAT, json=body, headers=key).status_code == 200
    assert one.admin("POST", "/admin/entitlements/new/suspend").status_code == 200
    assert other.http.post(CHAT, json=body, headers=key).status_code == 403
    assert other.admin("DELETE", "/admin/entitlements/new").status_code == 204
    assert one.http.post(CHAT, json=body, headers=key).status_code == 401
    audits = [client.admin("GET", "/admin/audit").json() for client in (one, other)]
    assert audits[0] == audits[1]
    assert {record["what"] for record in audits[0]["data"]} >= {"create", "suspend", "delete"}


def test_a_decision_a_drain_and_a_lease_are_found_by_either(fleet: Fleet, clients: Clients) -> None:
    one, other = clients(fleet, 2)
    request_id = one.chat("free").headers["x-request-id"]
    for client in (one, other):
        assert client.admin("GET", f"/admin/decisions/{request_id}").json()["outcome"] == "ok"
        newest = client.admin("GET", "/admin/decisions?limit=5").json()
        assert request_id in {record["request_id"] for record in newest}
    worker = fleet.engines[0].id
    assert one.admin("POST", f"/admin/workers/{worker}/drain").status_code == 200
    assert other.chat("free").status_code == 503
    assert other.admin("POST", f"/admin/workers/{worker}/drain?undo=true").status_code == 200
    wait_until(lambda: one.chat("free").status_code == 200)
    key = {"authorization": "Bearer sk-free"}
    asked = {"model": MODEL, "input_tokens": 10, "max_tokens": 5}
    granted = one.http.post("/admission/authorize", json=asked, headers=key).json()
    usage = {"lease_id": granted["lease_id"], "prompt_tokens": 10, "completion_tokens": 1}
    told = [c.http.post("/admission/usage", json=usage, headers=key) for c in (other, one)]
    assert [answer.status_code for answer in told] == [200, 200]
    assert told[0].json() == told[1].json()
    unknown = other.http.post("/admission/usage", json={**usage, "lease_id": "x"}, headers=key)
    assert unknown.status_code == 404


def test_a_killed_worker_s_leases_come_back_and_it_is_started_again(
    fleet: Fleet, clients: Clients
) -> None:
    assert fleet.gateway is not None
    pid = fleet.gateway.pid
    victims = children(pid)
    many = clients(fleet, 4)
    with ThreadPoolExecutor(LIMIT) as threads:
        running = [threads.submit(client.chat, "a", 4000) for client in many[:LIMIT]]
        wait_until(lambda: fleet.leases() == LIMIT)
        refused = many[3].chat("a")
        assert (refused.status_code, refused.headers["x-sluice-reason"]) == (429, "concurrency")
        held = [holder(victims, client) for client in many[:LIMIT]]
        victim = held[0]
        os.kill(victim, signal.SIGKILL)
        lost = 0
        for future in running:
            try:
                future.result(60)
            except httpx.TransportError:
                lost += 1
        assert lost == held.count(victim), "its own clients, and no others"
    wait_until(lambda: fleet.leases() == 0)
    wait_until(lambda: len(children(pid)) == 2 and fleet.metrics()["sluice_gateway_processes"] == 2)
    assert set(victims) - {victim} < set(children(pid))
    again = clients(fleet, 6)
    assert [client.chat("free").status_code for client in again] == [200] * 6
    view = again[0].admin("GET", "/admin/entitlements/a").json()
    assert sum(view["usage"]["inflight"].values()) == 0
    assert (
        view["usage"]["debited_tokens"] - view["usage"]["refunded_tokens"]
        == view["usage"]["used_tokens"]
    )


def test_sigterm_drains_every_worker(fleet: Fleet, clients: Clients) -> None:
    assert fleet.gateway is not None
    many = clients(fleet, 2)
    with ThreadPoolExecutor(2) as threads:
        running = [threads.submit(client.chat, "free", 900) for client in many]
        wait_until(lambda: fleet.leases() == 2)
        fleet.gateway.send_signal(signal.SIGTERM)
        assert [future.result(60).status_code for future in running] == [200, 200]
    assert fleet.gateway.wait(15) == 0
    fleet.forget_gateway()


def test_a_worker_that_cannot_start_ends_the_gateway(tmp_path: Path) -> None:
    fleet = fleet_of(2, tmp_path, usage_export={"path": str(tmp_path)})
    with pytest.raises(ChildDied, match="ended with status 1"), fleet:
        pass


def test_workers_end_when_their_parent_is_gone(tmp_path: Path, clients: Clients) -> None:
    url = f"sqlite:///{tmp_path / 'state.db'}"
    with fleet_of(2, tmp_path, state={"url": url}) as fleet:
        assert fleet.gateway is not None
        (one,) = clients(fleet, 1)
        assert one.chat("free").status_code == 200
        left = children(fleet.gateway.pid)
        fleet.kill_replica(fleet.replicas[0])
        wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in left))
