"""A proof beside reality, over real sockets: attached, counted, reviewed, and detached."""

import json
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from typer.testing import Result

from bench.common.fleet import ADMIN_KEY, MODEL, Fleet
from gateway.records.proof import Claim, Interval, Proof, Verdict
from tests.asking import ADMIN, admin, chat, entitlement, post
from tests.browser import until
from tests.running import sluice

SERVED = 450
"""Enough to say that 99 % hold."""
LOST = 60
ID = "0123456789ab"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("proof")


@pytest.fixture(scope="module")
def fleet(folder: Path) -> Iterator[Fleet]:
    entitlements = [
        entitlement("web", max_concurrency=64),
        entitlement("slow", max_concurrency=64),
        entitlement("capped", max_concurrency=1),
    ]
    log = {"path": str(folder / "requests.jsonl")}
    with Fleet(config={"entitlements": entitlements, "request_log": log}) as fleet:
        yield fleet


def claim(kind: Any, name: str, verdict: Verdict, kept: float, **more: Any) -> Claim:
    bounds = Interval(value=kept, low=kept - 0.002, high=min(1.0, kept + 0.002))
    return Claim(
        kind=kind, name=name, model=MODEL, verdict=verdict, reason="so", kept=bounds, **more
    )


def proof_of(file: Path) -> Proof:
    return Proof(
        id=ID,
        config_sha256=sha256(file.read_bytes()).hexdigest(),
        verdict="breaks",
        findings=(
            claim("entitlement", "slow", "holds", 0.995, slo_ms=1e-6),  # nobody keeps that
            claim("entitlement", "capped", "breaks", 0.5),
            claim("entitlement", "web", "holds", 0.996, requests_per_s=1000.0),
            claim("pool", "short", "holds", 1.0),
        ),
    )


def attach(fleet: Fleet, folder: Path) -> Result:
    file = folder / "proof.json"
    file.write_bytes(msgspec.json.encode(proof_of(fleet.replicas[0].file)))
    return sluice("reload", "--url", fleet.url, "--proof", file, SLUICE_ADMIN_KEY=ADMIN_KEY)


def reviewed(*arguments: object) -> tuple[int, dict[str, Any]]:
    found = sluice("prove", "--review", ID, *arguments, "--json", SLUICE_ADMIN_KEY=ADMIN_KEY)
    shown = json.loads(found.stdout)
    return found.exit_code, {f"{one['kind']} {one['name']}": one for one in shown["compared"]}


def test_a_proof_of_another_file_is_refused_and_nothing_changes(fleet: Fleet, folder: Path) -> None:
    file = fleet.replicas[0].file
    other = folder / "other.yaml"
    other.write_text(file.read_text() + "# another\n")
    answer = admin(
        fleet.url,
        "POST",
        "/admin/reload?proof=true",
        content=msgspec.json.encode(proof_of(other)),
    )
    assert (answer.status_code, answer.headers["x-sluice-reason"]) == (409, "proof_of_another_file")
    assert sha256(file.read_bytes()).hexdigest()[:12] in answer.json()["error"]["message"]
    assert fleet.metrics()["sluice_config_last_reload_successful"] == 1
    for body, status in ((b"{}", 400), (b" " * (1 << 20) + b"{}", 413)):
        answer = admin(fleet.url, "POST", "/admin/reload?proof=true", content=body)
        assert answer.status_code == status
    assert admin(fleet.url, "GET", "/admin/proof").status_code == 404


def test_what_came_of_it_is_the_same_by_the_log_and_by_the_gateway(
    fleet: Fleet, folder: Path
) -> None:
    assert post(fleet.url, "sk-web").status_code == 200  # before: it does not count
    attached = attach(fleet, folder)
    assert attached.exit_code == 0, attached.output
    assert "the proof is attached" in attached.stdout
    (event, *_) = fleet.admin("/admin/audit").json()["data"]
    assert (event["what"], event["after"]["proof"]) == ("attach_proof", ID)

    with httpx.Client(trust_env=False, timeout=30) as client:

        def ask(name: str, **more: Any) -> int:
            headers = {"authorization": f"Bearer sk-{name}"}
            url = f"{fleet.url}/v1/chat/completions"
            return client.post(url, json=chat(1, **more), headers=headers).status_code

        assert [ask("web") for _ in range(SERVED)] == [200] * SERVED
        assert [ask("slow", stream=True) for _ in range(LOST)] == [200] * LOST

    log = folder / "requests.jsonl"
    assert admin(fleet.url, "POST", "/admin/reload").status_code == 200  # the same file
    code, by_gateway = reviewed("--url", fleet.url)
    until_lines(log, SERVED + LOST)
    assert reviewed("--log", log)[0] == code == 1
    by_log = reviewed("--log", log)[1]
    for name in ("entitlement web", "entitlement slow"):
        assert by_log[name]["measured"] == by_gateway[name]["measured"]
    assert by_log["pool short"]["requests"] == SERVED + LOST
    assert {name: one["result"] for name, one in by_log.items()} == {
        "entitlement slow": "wrong",
        "entitlement capped": "cannot tell",
        "entitlement web": "agreed",
        "pool short": "agreed",
    }
    assert "no request since" in by_log["entitlement capped"]["words"]
    assert by_log["entitlement slow"]["words"].endswith("it breaks")
    counted = fleet.metrics()
    assert counted['sluice_proved_requests_total{entitlement="web",result="kept"}'] == SERVED


def until_lines(log: Path, count: int) -> None:
    until(lambda: log.read_text().count('"outcome"') >= count, "the log is written")


def test_another_file_ends_it(fleet: Fleet, folder: Path) -> None:
    shown = httpx.get(f"{fleet.url}/admin/proof", headers=ADMIN, trust_env=False).json()
    assert shown["id"] == ID
    assert shown["counts"]["web"] == {"kept": SERVED, "lost": 0, "limited": 0}
    file = fleet.replicas[0].file
    file.write_text(file.read_text() + "# another\n")
    assert admin(fleet.url, "POST", "/admin/reload").status_code == 200
    assert admin(fleet.url, "GET", "/admin/proof").status_code == 404
    assert post(fleet.url, "sk-web").status_code == 200
    log = folder / "requests.jsonl"
    until_lines(log, SERVED + LOST + 2)
    assert reviewed("--log", log)[1]["entitlement web"]["requests"] == SERVED
