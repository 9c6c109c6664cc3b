"""Token pools over real sockets: the official client waits as told, tenants are kept apart."""

import json
import sqlite3
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import openai

from bench.common.fleet import MODEL, Fleet
from tests import asking
from tests.admission_replay import replay
from tests.asking import CHAT, admin, bearer, chat, entitlement, until


def fleet_of(
    *entitlements: dict[str, Any], model: dict[str, Any] | None = None, **more: Any
) -> Fleet:
    config = {"entitlements": list(entitlements), **more.pop("config", {})}
    return Fleet(config=config, model=model or {}, **{"short": 1, "long": 0, **more})


def post(fleet: Fleet, name: str, tokens: int = 8, **more: Any) -> httpx.Response:
    return asking.post(fleet.url, f"sk-{name}", chat(tokens, **more))


def test_the_official_client_waits_as_told_and_completes() -> None:
    limited = entitlement("a", max_concurrency=2)
    with fleet_of(limited, mock=("--speed", "10")) as fleet, ThreadPoolExecutor(4) as threads:
        client = openai.OpenAI(base_url=fleet.url + "/v1", api_key="sk-a", max_retries=4)

        def ask(_: int) -> str | None:
            answer = client.chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": "hi"}], max_tokens=30
            )
            return answer.choices[0].finish_reason

        # Both places are taken before the client comes: no matter how late its threads start,
        # its first attempts are over the limit.
        held = [threads.submit(post, fleet, "a", 600, stream=True) for _ in range(2)]
        until(lambda: fleet.metrics()[f'sluice_pool_inflight{{model="{MODEL}",pool="short"}}'] == 2)
        assert all(threads.map(ask, range(2)))
        refused = fleet.metrics()[
            'sluice_admission_total{decision="denied",entitlement="a",reason="concurrency"}'
        ]
        assert refused >= 2, "both came while no place was free"
        assert all(f.result(60).status_code == 200 for f in held)


def test_a_refusal_says_what_who_and_how_long() -> None:
    with fleet_of(
        entitlement("a", tokens_per_second=1.0, max_tokens_per_second=1.0),
        short_window=128,
        mock=("--speed", "50"),
    ) as fleet:
        answers = [post(fleet, "a", 60) for _ in range(4)]
        refused = answers[-1]
        assert refused.status_code == 429
        error = refused.json()["error"]
        assert (error["type"], error["code"]) == ("tokens", "rate_limit_exceeded")
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        assert int(refused.headers["retry-after-ms"]) >= 1000
        assert refused.headers["x-should-retry"] == "true"
        assert refused.headers["x-sluice-reason"] == "tokens"
        assert int(refused.headers["x-ratelimit-remaining-tokens"]) < 60
        assert answers[0].headers["x-ratelimit-limit-tokens"] == "128"


def test_a_protected_tenant_displaces_preemptible_streams() -> None:
    with (
        fleet_of(
            entitlement("g", "guaranteed", concurrency=2),
            entitlement("p", "preemptible"),
            model={"admission": {"headroom": 0, "reclaim_ms": 200}},
            short_slots=2,
            mock=("--speed", "1"),
        ) as fleet,
        ThreadPoolExecutor(4) as threads,
    ):
        low = [threads.submit(post, fleet, "p", 2000, stream=True) for _ in range(2)]
        until(lambda: fleet.metrics()[f'sluice_pool_inflight{{model="{MODEL}",pool="short"}}'] == 2)
        started_s = time.monotonic()
        high = post(fleet, "g", 4)
        assert high.status_code == 200
        assert time.monotonic() - started_s < 5.0, "2,000 tokens would take many times that"
        ended = [f.result(60) for f in low]
        broken = [a for a in ended if "evicted" in a.text]
        assert len(broken) == 1, "one place was needed, one gave way"
        until(lambda: fleet.engines[0].running() == 0)
        until(lambda: fleet.metrics()['sluice_leases{state="active"}'] == 0)


def test_lost_workers_degrade_the_newest_reserve_and_their_return_restores_it() -> None:
    slots = f'sluice_pool_slots{{model="{MODEL}",pool="short"}}'
    with (
        fleet_of(
            entitlement("old", "guaranteed", concurrency=4),
            entitlement("new", "guaranteed", concurrency=4),
            short=2,
            short_slots=4,
            mock=("--speed", "1"),
        ) as fleet,
        ThreadPoolExecutor(4) as threads,
    ):
        assert post(fleet, "new").status_code == 200
        fleet.kill_engine(fleet.engines[1])
        until(lambda: fleet.metrics()[slots] == 4)
        assert post(fleet, "new").status_code == 200, "nobody else is there"
        held = [threads.submit(post, fleet, "old", 400, stream=True) for _ in range(3)]
        until(lambda: post(fleet, "new").status_code == 503)
        refused = post(fleet, "new")
        assert refused.headers["x-sluice-reason"] == "entitlement_degraded"
        assert post(fleet, "old").status_code == 200
        fleet.start_engine(fleet.engines[1])
        until(lambda: post(fleet, "new").status_code == 200, 20.0)
        assert all(f.result(60).status_code == 200 for f in held)


def test_a_lost_pool_leaves_the_reserve_in_another_and_spot_makes_way_for_the_rest() -> None:
    inflight = f'sluice_pool_inflight{{model="{MODEL}",pool="long"}}'
    with (
        fleet_of(
            entitlement("g", "guaranteed", concurrency={"short": 3, "long": 1}),
            entitlement("s", "spot"),
            model={"admission": {"headroom": 0}},
            short=1,
            long=1,
            long_slots=4,
            mock=("--speed", "1"),
        ) as fleet,
        ThreadPoolExecutor(8) as threads,
    ):
        fleet.kill_engine(fleet.engines[0])
        until(lambda: post(fleet, "s", 8).headers.get("x-sluice-pool") == "long")
        spot = [threads.submit(post, fleet, "s", 400, stream=True) for _ in range(4)]
        until(lambda: fleet.metrics()[inflight] == 4)
        long_prompt = [{"role": "user", "content": "hello there " * 1500}]
        for more in ({"messages": long_prompt}, {}, {}):
            answer = post(fleet, "g", 8, **more)
            assert (answer.status_code, answer.headers["x-sluice-pool"]) == (200, "long")
        assert all(f.result(60).status_code == 200 for f in spot)


def test_buckets_and_ledgers_survive_a_restart_in_sqlite(tmp_path: Path) -> None:
    file = tmp_path / "sluice.db"
    config = {"state": {"url": f"sqlite:///{file}"}}
    spent = entitlement("a", tokens_per_second=0.001, max_tokens_per_second=0.001)
    with fleet_of(spent, config=config, short_window=128, mock=("--speed", "50")) as fleet:
        statuses = [post(fleet, "a", 60).status_code for _ in range(4)]
        assert statuses[0] == 200
        assert statuses[-1] == 429
    with closing(sqlite3.connect(file)) as db:
        assert db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] > 0
    with fleet_of(spent, config=config, short_window=128, mock=("--speed", "50")) as fleet:
        assert post(fleet, "a", 60).status_code == 429, "a restart is no way to a full bucket"


def test_the_log_replayed_through_the_policy_gives_the_same_decisions(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    tenants = [
        entitlement("g", "guaranteed", concurrency=2),
        entitlement("e", concurrency=2, slo_target_ms=500, tokens_per_second=40),
        entitlement("f", concurrency=2, slo_target_ms=30_000, tokens_per_second=40),
        entitlement("s", "spot"),
    ]
    with (
        fleet_of(
            *tenants,
            model={"mode": "observe"},
            config={"request_log": {"path": str(log)}},
            short_slots=6,
            short_window=512,
            mock=("--speed", "2"),
        ) as fleet,
        ThreadPoolExecutor(12) as threads,
    ):
        end_s = time.monotonic() + 12.0

        def ask(n: int) -> int:
            count = 0
            while time.monotonic() < end_s:
                name = "gefs"[(n + count) % 4]
                stream = count % 3 == 0
                assert post(fleet, name, 10 + 7 * (n % 5), stream=stream).status_code == 200
                count += 1
            return count

        asked = sum(threads.map(ask, range(12)))
        until(lambda: fleet.metrics()['sluice_leases{state="active"}'] == 0)
        until(lambda: log.read_text().count('"lease_id"') == asked)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert sum(line.get("event") == "tick" for line in lines) >= 2
    found = replay(lines, MODEL)
    assert len(found) == asked
    assert [r for r in found if r.logged != r.decided] == []
    assert {r.decided for r in found} > {""}, "somebody would have been refused"


def test_no_lease_is_left_by_a_storm_of_leaving_clients() -> None:
    with fleet_of(
        entitlement("g", "guaranteed", concurrency=8),
        entitlement("s", "spot"),
        short_slots=16,
        mock=("--speed", "2"),
    ) as fleet:
        stop = threading.Event()

        def leave(name: str) -> None:
            while not stop.is_set():
                body = chat(500, stream=True)
                try:
                    httpx.post(
                        fleet.url + CHAT, json=body, headers=bearer(f"sk-{name}"), timeout=0.15
                    )
                except httpx.TimeoutException:
                    continue

        threads = [threading.Thread(target=leave, args=(n,)) for n in "gsgs"]
        for thread in threads:
            thread.start()
        time.sleep(2.0)
        stop.set()
        for thread in threads:
            thread.join()
        until(lambda: fleet.metrics()['sluice_leases{state="active"}'] == 0)
        for name in "gs":
            (view,) = [
                e
                for e in admin(fleet.url, "GET", "/admin/entitlements").json()["data"]
                if e["name"] == name
            ]
            usage = view["usage"]
            assert usage["debited_tokens"] - usage["refunded_tokens"] == usage["used_tokens"], view


def test_kept_targets_are_told_to_the_tenant_and_the_admin() -> None:
    patient = entitlement("patient", slo_target_ms=30_000, slo_tpot_ms=20_000, max_concurrency=2)
    hasty = entitlement("hasty", slo_target_ms=1, slo_tpot_ms=1)
    with (
        fleet_of(patient, hasty, mock=("--speed", "4")) as fleet,
        ThreadPoolExecutor(2) as threads,
    ):
        for name in ("patient", "hasty"):
            assert post(fleet, name, stream=True).status_code == 200
            assert post(fleet, name).status_code == 200, "not a stream: not judged"
        held = [threads.submit(post, fleet, "patient", 600, stream=True) for _ in range(2)]
        until(lambda: fleet.metrics()[f'sluice_pool_inflight{{model="{MODEL}",pool="short"}}'] == 2)
        assert post(fleet, "patient", stream=True).status_code == 429
        assert all(f.result(60).status_code == 200 for f in held)
        shown = admin(fleet.url, "GET", "/admin/entitlements").json()["data"]
        found = {each["name"]: each["slo"] for each in shown}
        assert found["patient"] == {
            "target_ms": 30_000,
            "met": 3,
            "missed": 0,
            "refused": 1,
            "attainment": 1.0,
        }
        me = httpx.get(
            fleet.url + "/v1/sluice/me", headers={"authorization": "Bearer sk-hasty"}, timeout=10
        ).json()
        assert me["slo"] == found["hasty"]
        assert (me["slo"]["missed"], me["slo"]["attainment"]) == (1, 0.0)
        assert fleet.metrics()['sluice_slo_requests_total{entitlement="hasty",met="false"}'] == 1
        paces = {each["name"]: each["slo_tpot"] for each in shown}
        assert (paces["patient"]["met"], paces["patient"]["target_ms"]) == (3, 20_000)
        assert me["slo_tpot"] == paces["hasty"]
        assert (me["slo_tpot"]["missed"], me["slo_tpot"]["attainment"]) == (1, 0.0)
