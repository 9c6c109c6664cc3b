"""What gateways learned, across restarts and replicas, with real stores; and without them."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import httpx
import pytest

from bench.common.fleet import ADMIN_KEY, MODEL, Fleet, RedisServer
from gateway.admission import admission
from gateway.admission.token_pool import LEASE_TTL_S
from gateway.store.sqlite_leases import SqliteLeases
from tests.asking import entitlement, post, until
from tests.token_pools import entitled, pool

ROOT = Path(__file__).parents[2]
TEXT = "The river rose in the night and by morning the lower road was gone. " * 24
LEARNED = ("categories", "templates", "media", "expected_output_tokens")


KEYED = [entitlement("state")]
"""The file's own entitlement serves while what is kept elsewhere cannot be read."""


def teach(fleet: Fleet, count: int = 30) -> None:
    headers = {"authorization": "Bearer sk-state"}
    with httpx.Client(trust_env=False, timeout=30, headers=headers) as client:
        for n in range(count):
            body = {
                "model": MODEL,
                "messages": [{"role": "user", "content": TEXT[n:] if n % 3 else "Hello."}],
                "max_tokens": 9,
                "mock_output_tokens": 5,
            }
            assert client.post(fleet.url + "/v1/chat/completions", json=body).status_code == 200
    fleet.wait_until_idle()


def learned(fleet: Fleet) -> dict[str, Any]:
    """What GET /admin/pools shows of it, without the process's own counts."""
    (model,) = fleet.admin("/admin/pools").json()
    return {name: model["estimator"][name] for name in LEARNED}


def store_up(fleet: Fleet) -> float:
    return fleet.metrics()["sluice_store_up"]


def stop(fleet: Fleet) -> None:
    """End the gateway as an orchestrator does."""
    assert fleet.gateway is not None
    gateway = fleet.gateway
    gateway.send_signal(signal.SIGTERM)
    assert gateway.wait(10) == 0
    fleet.forget_gateway()


def test_a_restart_keeps_what_was_learned_in_sqlite(tmp_path: Path) -> None:
    config = {"state": {"url": f"sqlite:///{tmp_path / 'sluice.db'}"}}
    with Fleet(short=1, long=1, config=config) as fleet:
        assert store_up(fleet) == 1
        teach(fleet)
        before = learned(fleet)
        stop(fleet)
    assert before["categories"]["prose"]["n"] > 15
    with Fleet(short=1, long=1, config=config) as fleet:
        assert learned(fleet) == before
        assert store_up(fleet) == 1


def test_a_bad_state_file_does_not_keep_it_from_serving(tmp_path: Path) -> None:
    """Where no administrator can have denied a key in it."""
    file = tmp_path / "sluice.db"
    file.write_bytes(b"no database" * 500)
    config = {"state": {"url": f"sqlite:///{file}"}, "entitlements": KEYED}
    with Fleet(short=1, long=1, config=config, server={"admin_key": None}) as fleet:
        teach(fleet, 5)
        assert store_up(fleet) == 0
        stop(fleet)
    assert file.read_bytes() == b"no database" * 500


@pytest.mark.redis
def test_two_gateways_share_what_one_learned(redis_server: RedisServer) -> None:
    config = {"state": {"url": redis_server.url}}
    with Fleet(short=1, long=1, config=config) as one, Fleet(short=1, long=1, config=config) as two:
        teach(one)
        mine = learned(one)["categories"]["prose"]
        assert mine["n"] > 15
        close = pytest.approx(mine["mean"], rel=0.005)
        until(lambda: learned(two)["categories"]["prose"]["n"] >= mine["n"])
        assert learned(two)["categories"]["prose"]["mean"] == close
        assert learned(two)["templates"]["chat"]["n"] > 0
        stop(one)
        stop(two)
    with Fleet(short=1, long=1, config=config) as three:
        assert learned(three)["categories"]["prose"]["mean"] == close


@pytest.mark.redis
def test_a_gateway_starts_without_its_redis_and_finds_it_later(own_server: RedisServer) -> None:
    own_server.kill()
    config = {"state": {"url": own_server.url}, "entitlements": KEYED}
    with Fleet(short=1, long=1, config=config, server={"admin_key": None}) as fleet:
        assert store_up(fleet) == 0
        teach(fleet, 10)
        own_server.start()
        until(lambda: store_up(fleet) == 1)
        with own_server.client() as client:
            until(lambda: client.dbsize() >= 1)


@pytest.mark.redis
def test_a_gateway_that_administrators_change_serves_once_it_has_read_redis(
    own_server: RedisServer,
) -> None:
    config = {"state": {"url": own_server.url}, "entitlements": KEYED}
    with Fleet(short=1, long=1, config=config) as fleet:
        owner = {"authorization": f"Bearer {ADMIN_KEY}"}
        path = fleet.url + "/admin/entitlements/state/suspend"
        assert httpx.post(path, headers=owner).status_code == 200
        (replica,) = fleet.replicas
        fleet.kill_replica(replica)
        own_server.hang()
        fleet.start_replica(replica)
        until(lambda: asked(fleet) is not None, 30.0)
        assert asked(fleet) == (503, "keys_not_read")
        ready = httpx.get(fleet.url + "/ready")
        assert (ready.status_code, "state store" in ready.json()["status"]) == (503, True)
        own_server.resume()
        until(lambda: httpx.get(fleet.url + "/ready").status_code == 200, 20.0)
        assert asked(fleet) == (403, "entitlement_suspended")


def asked(fleet: Fleet) -> tuple[int, str] | None:
    """Status and code of a request's refusal; None while no gateway listens."""
    try:
        answer = post(fleet.url, "sk-state")
    except httpx.TransportError:
        return None
    return answer.status_code, answer.json()["error"]["code"]


@pytest.mark.redis
@pytest.mark.parametrize("kind", ["killed", "hanging"])
def test_redis_away_fails_and_delays_no_request(
    own_server: RedisServer, tmp_path: Path, kind: str
) -> None:
    """None spends more than 50 ms in the gateway; that it is away and back is told."""
    log = tmp_path / "requests.jsonl"
    config = {"state": {"url": own_server.url}, "request_log": {"path": str(log)}}
    body = {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 8}
    body |= {"model": MODEL, "mock_output_tokens": 4}
    statuses: list[int] = []
    over = Event()

    def ask(url: str) -> None:
        with httpx.Client(trust_env=False, timeout=30) as client:
            while not over.wait(0.02):
                answer = client.post(url + "/v1/chat/completions", json=body)
                statuses.append(answer.status_code)

    with (
        Fleet(short=1, long=1, mock=("--speed", "100"), config=config) as fleet,
        ThreadPoolExecutor(4) as clients,
    ):
        asking = [clients.submit(ask, fleet.url) for _ in range(4)]
        try:
            time.sleep(1.5)
            own_server.kill() if kind == "killed" else own_server.hang()
            until(lambda: not store_up(fleet))
            time.sleep(1.0)
            own_server.start() if kind == "killed" else own_server.resume()
            until(lambda: bool(store_up(fleet)))
            time.sleep(1.0)
        finally:
            over.set()
        for each in asking:
            each.result()
        fleet.wait_until_idle()
    records = [json.loads(line) for line in log.read_bytes().splitlines()]
    held_ms = [record["timing"]["overhead_ms"] for record in records if "timing" in record]
    assert len(held_ms) == len(statuses) > 100  # on a quiet machine 1,000
    assert set(statuses) == {200}
    assert max(held_ms) <= 50.0


SKIPPED = """
import pytest

@pytest.mark.redis
def test_it(redis_server): ...
"""


@pytest.mark.parametrize(("ci", "status"), [("true", 1), ("", 0)])
def test_ci_fails_where_a_redis_test_would_be_skipped(tmp_path: Path, ci: str, status: int) -> None:
    (tmp_path / "conftest.py").write_text((ROOT / "tests/conftest.py").read_text())
    (tmp_path / "test_it.py").write_text(SKIPPED)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = redis: needs it\n")
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)],
        env={**os.environ, "CI": ci, "PATH": str(tmp_path), "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == status, run.stdout
    assert ("may not be skipped in CI" in run.stdout) == bool(ci)


def test_nobody_comes_in_without_a_key_while_kept_entitlements_cannot_be_read(
    tmp_path: Path,
) -> None:
    file = tmp_path / "sluice.db"
    file.write_bytes(b"no database" * 500)
    config = {"state": {"url": f"sqlite:///{file}"}}
    with Fleet(short=1, long=1, config=config, idle=True) as fleet:
        fleet.start_replica(fleet.replicas[0])
        until(lambda: asked(fleet) is not None, 30.0)
        assert asked(fleet) == (503, "keys_not_read")


# -- a gateway's process that is killed while it holds leases, and the one that comes after it


HOLDER = """
import asyncio, pathlib, sys, time
from gateway.store.sqlite_leases import SqliteLeases
from gateway.admission import admission
from tests.token_pools import entitled, granted, pool

async def main():
    book = pool(entitled(tokens_per_s=100.0, baseline=8), slots=(8,))
    kept = SqliteLeases(pathlib.Path(sys.argv[1]), {"m": book}, book.limits)
    await kept.start()
    for number in range(5):
        granted(book, f"l{number}", at=time.time(), kv_bytes=10)
    admission.settle(book, "l0", 30, time.time())
    await asyncio.sleep(1.5)
    print("saved", flush=True)
    granted(book, "lost", at=time.time())
    await asyncio.sleep(60)

asyncio.run(main())
"""


async def test_a_killed_process_s_leases_return_within_their_time(tmp_path: Path) -> None:
    path = tmp_path / "sluice.db"
    holder = await asyncio.create_subprocess_exec(
        sys.executable, "-c", HOLDER, str(path), cwd=ROOT, stdout=subprocess.PIPE
    )
    try:
        assert holder.stdout is not None
        async with asyncio.timeout(20):
            assert await holder.stdout.readline() == b"saved\n"
    finally:
        holder.send_signal(signal.SIGKILL)
        await holder.wait()

    now_s = time.time()
    token_pool = pool(entitled(tokens_per_s=100.0, baseline=8), slots=(8,))
    kept = SqliteLeases(path, {"m": token_pool}, token_pool.limits)
    await kept.start()
    account = token_pool.accounts["e"]
    assert set(token_pool.leases) - {"lost"} == {"l1", "l2", "l3", "l4"}
    assert token_pool.pools[0].inflight == account.total == len(token_pool.leases)
    assert token_pool.pools[0].kv_bytes == 40
    assert account.used == 30
    assert account.debited - account.refunded == 30 + 100 * len(token_pool.leases)

    admission.reap(token_pool, now_s + LEASE_TTL_S)
    assert (token_pool.pools[0].inflight, account.total, account.kv_bytes) == (0, 0, 0)
    assert account.debited - account.refunded == account.used
    assert account.used in (430, 530)
    await kept.close()
