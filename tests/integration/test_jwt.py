"""Tokens of an identity provider over real sockets: they open what keys do, and nothing else."""

import hashlib
import json
import secrets
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import httpx
import pytest

from bench.common.fleet import ADMIN_KEY, MODEL, Fleet
from tests import asking
from tests.issuer import AUDIENCE, NAME, Issuer, forged

KEY = "sk-still-a-key"
REQUESTS = 300
"""In a round of measuring."""
INTERVAL_S = 10.0
"""Of reads of the issuer's keys because of unknown ones."""


@contextmanager
def guarded(issuer: Issuer, log: Path | None = None, **rules: Any) -> Iterator[Fleet]:
    """A gateway that trusts the issuer's tokens beside a key."""
    fleet = Fleet(short=1, long=0, mock=("--speed", "50"))
    config = fleet.replicas[0].config
    config["auth"] = {
        "jwt": [{"issuer": NAME, "jwks": issuer.url, "audience": [AUDIENCE], **rules}]
    }
    config["entitlements"] = [
        {"name": "chat", "tenant": "acme", "model": MODEL, "service_class": "elastic"},
        {"name": "batch", "tenant": "acme", "model": MODEL, "service_class": "spot"},
    ]
    config["tenants"] = [{"name": "acme", "keys": [{"name": "web", "sha256": sha256(KEY)}]}]
    if log is not None:
        config["request_log"] = {"path": str(log)}
    with fleet:
        yield fleet


def sha256(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def post(fleet: Fleet, token: str, **headers: str) -> httpx.Response:
    told = {name.replace("_", "-"): value for name, value in headers.items()}
    return asking.post(fleet.url, token, **told)


def get(fleet: Fleet, token: str, path: str) -> httpx.Response:
    return asking.get(fleet.url, token, path)


def reason(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.headers.get("x-sluice-reason", "")


def test_a_token_opens_what_a_key_does_and_goes_no_further(tmp_path: Path) -> None:
    log = tmp_path / "requests.jsonl"
    with (
        Issuer().serving() as issuer,
        guarded(issuer, log, entitlements_claim="sluice.entitlements") as fleet,
    ):
        token = issuer.token(sluice={"entitlements": ["batch", "chat"]})
        answer = post(fleet, token, x_request_id="r1")
        assert answer.status_code == 200, answer.text
        record = fleet.decision("r1")
        assert (record["tenant"], record["entitlement"], record["key"]) == (
            *("acme", "batch", "jwt:alice"),
        )
        assert post(fleet, token, x_sluice_entitlement="chat").status_code == 200
        one = issuer.token(sluice={"entitlements": ["chat"]})
        assert reason(post(fleet, one, x_sluice_entitlement="batch")) == (
            *(403, "entitlement_not_of_key"),
        )
        assert get(fleet, token, "/v1/models").json()["data"][0]["id"] == MODEL
        me = get(fleet, token, "/v1/sluice/me").json()
        assert (me["tenant"], me["key"]) == ("acme", "jwt:alice")
        assert [each["entitlement"] for each in me["entitlements"]] == ["batch", "chat"]
        assert get(fleet, token, "/v1/sluice/decisions/r1").status_code == 200
        granted = httpx.post(
            fleet.url + "/admission/authorize",
            json={"model": MODEL, "input_tokens": 10},
            headers={"x-api-key": token},
            trust_env=False,
        )
        assert granted.status_code == 200, granted.text
        assert post(fleet, KEY).status_code == 200

        reached = json.dumps(fleet.engines[0].last(20))
        assert "hello there" in reached
        time.sleep(0.8)  # the log is flushed twice a second
        for written in (reached, log.read_text(), json.dumps(record)):
            assert token not in written
            assert token.rpartition(".")[2] not in written
        assert fleet.metrics()['sluice_jwt_checks_total{result="ok"}'] == 2, "each token once"


def test_a_wrong_token_is_told_what_is_wrong_with_it() -> None:
    with Issuer().serving() as issuer, guarded(issuer) as fleet:
        now = time.time()
        claims = {"iss": NAME, "aud": AUDIENCE, "tenant": "acme", "exp": now + 600}
        wrong = {
            issuer.token(exp=now - 60): (401, "token_expired"),
            issuer.token(nbf=now + 600): (401, "token_not_yet_valid"),
            issuer.token(aud="other"): (401, "token_audience_wrong"),
            issuer.token(iss="https://other"): (401, "token_issuer_unknown"),
            issuer.token(head={"kid": "no-such"}): (401, "token_key_unknown"),
            forged({"alg": "none"}, claims): (401, "token_algorithm_refused"),
            forged({"alg": "RS256", "kid": "k1"}, claims): (401, "token_signature_wrong"),
            "eyJ" + "x" * 9_000: (401, "token_too_large"),
            "eyJunk": (401, "token_malformed"),
            issuer.token(tenant="nobody"): (403, "token_tenant_unknown"),
            issuer.token(tenant=None): (403, "token_without_tenant"),
        }
        for token, expected in wrong.items():
            answer = post(fleet, token)
            assert reason(answer) == expected
            error = answer.json()["error"]
            assert set(error) == {"message", "type", "param", "code"}
            assert error["message"].startswith("The token")
            assert token not in answer.text
        assert "'nobody'" in post(fleet, issuer.token(tenant="nobody")).text
        assert (
            "Ask 'https://id.example' for one for: sluice"
            in post(fleet, issuer.token(aud="other")).text
        )
        assert reason(get(fleet, "eyJunk", "/v1/models")) == (401, "token_malformed")
        assert post(fleet, issuer.token()).status_code == 200


def test_keys_rotate_under_load_without_a_refusal() -> None:
    with Issuer().serving() as issuer, guarded(issuer) as fleet:
        assert post(fleet, issuer.token()).status_code == 200
        time.sleep(INTERVAL_S + 0.5)
        statuses: Counter[int] = Counter()

        def client(number: int) -> None:
            for turn in range(12):
                if (number, turn) == (0, 4):
                    issuer.rotate("k2")
                statuses[post(fleet, issuer.token(sub=f"{number}-{turn}")).status_code] += 1

        with ThreadPoolExecutor(8) as threads:
            list(threads.map(client, range(8)))
        assert statuses == {200: 96}
        assert issuer.reads == 2


def test_a_storm_of_unknown_keys_reads_the_issuers_keys_once_an_interval() -> None:
    with Issuer().serving() as issuer, guarded(issuer) as fleet:
        good = issuer.token()
        assert post(fleet, good).status_code == 200
        time.sleep(INTERVAL_S)
        began_s = time.monotonic()

        def storm(_: int) -> tuple[int, str]:
            return reason(post(fleet, issuer.token(head={"kid": secrets.token_hex(4)})))

        with ThreadPoolExecutor(32) as threads:
            found = Counter(threads.map(storm, range(200)))
        took_s = time.monotonic() - began_s
        assert set(found) <= {(401, "token_key_unknown"), (503, "token_keys_unavailable")}
        assert issuer.reads <= 2 + took_s / INTERVAL_S
        assert post(fleet, good).status_code == 200


def test_without_the_issuer_keys_serve_and_tokens_wait_for_it() -> None:
    issuer = Issuer()
    issuer.away = True
    with issuer.serving(), guarded(issuer) as fleet:
        assert post(fleet, KEY).status_code == 200
        answer = post(fleet, issuer.token())
        assert reason(answer) == (503, "token_keys_unavailable")
        assert answer.headers["x-should-retry"] == "true"
        issuer.away = False
        until_s = time.monotonic() + 2 * INTERVAL_S
        while (served := post(fleet, issuer.token())).status_code == 503:
            assert time.monotonic() < until_s
            time.sleep(0.5)
        assert served.status_code == 200
        issuer.away = True
        issuer.rotate("k2")
        del issuer.keys["k2"]
        assert post(fleet, issuer.token()).status_code == 200, "the known keys serve"


@pytest.mark.parametrize("role", ["viewer", "operator", "owner"])
def test_a_claim_gives_a_role_and_the_audit_names_who_acted(role: str) -> None:
    with Issuer().serving() as issuer, guarded(issuer, role_claim="groups") as fleet:
        token = issuer.token(tenant=None, groups=["staff", role], sub="bob")
        assert get(fleet, token, "/admin/pools").status_code == 200
        headers = {"authorization": f"Bearer {token}"}
        suspended = httpx.post(
            f"{fleet.url}/admin/entitlements/batch/suspend", headers=headers, trust_env=False
        )
        drained = httpx.post(
            f"{fleet.url}/admin/workers/{fleet.engines[0].id}/drain?undo=true",
            headers=headers,
            trust_env=False,
        )
        assert drained.status_code == (403 if role == "viewer" else 200)
        if role == "owner":
            assert suspended.status_code == 200
            audit = get(fleet, token, "/admin/audit").json()["data"]
            assert (audit[0]["who"], audit[0]["what"]) == ("jwt:bob", "suspend")
        else:
            assert reason(suspended) == (403, f"{role}_cannot_change")
        nobody = issuer.token(groups="staff")
        assert reason(get(fleet, nobody, "/admin/pools")) == (403, "token_without_role")
        assert get(fleet, ADMIN_KEY, "/admin/pools").status_code == 200


@pytest.mark.alone
def test_a_token_costs_a_request_at_most_a_fifth_more_than_a_key() -> None:
    """CPU of the gateway's process for each request, keys and tokens by turns.

    Each request has another of some tokens than the one before it, so that no head is recognised.
    """
    with Issuer().serving() as issuer, guarded(issuer) as fleet:
        assert fleet.gateway is not None
        clock = Path(f"/proc/{fleet.gateway.pid}/schedstat")
        callers = {"key": [KEY], "token": [issuer.token(sub=f"user-{n}") for n in range(20)]}
        costs: dict[str, list[float]] = {name: [] for name in callers}
        with closing(HTTPConnection("127.0.0.1", fleet.port)) as connection:
            for turn in range(7):
                for name, keys in callers.items():
                    begun_ns = int(clock.read_text().split()[0])
                    for number in range(REQUESTS):
                        ask(connection, keys[number % len(keys)], number)
                    spent_ns = int(clock.read_text().split()[0]) - begun_ns
                    if turn:  # the first one warms up
                        costs[name].append(spent_ns / REQUESTS / 1000)
        ratio = statistics.median(
            token / key for key, token in zip(costs["key"], costs["token"], strict=True)
        )
        said = {name: round(statistics.median(found)) for name, found in costs.items()}
        print(f"CPU-us a request: {said}, ratio {ratio:.3f}")
        assert ratio <= 1.2, costs
        checks = fleet.metrics()['sluice_jwt_checks_total{result="ok"}']
        assert checks == len(callers["token"]), "each token was verified once"


def ask(connection: HTTPConnection, key: str, number: int) -> None:
    body = json.dumps({"model": MODEL, "prompt": "hi", "max_tokens": 1})
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    headers["x-request-id"] = f"r{number}"
    connection.request("POST", "/v1/completions", body, headers)
    answer = connection.getresponse()
    answer.read()
    assert answer.status == 200
