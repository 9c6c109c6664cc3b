"""What administrators denied opens nothing, whatever happens to the file, Redis and gateways."""

import hashlib
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from bench.common.fleet import ADMIN_KEY, MODEL, Fleet, RedisServer
from tests.integration.test_tenants_at_run_time import status, until

OWN, SPARE, WEB, LIVE = "sk-own", "sk-spare", "sk-web", "sk-live"


def hashed(key: str) -> str:
    return f"sha256:{hashlib.sha256(key.encode()).hexdigest()}"


def sections() -> dict[str, Any]:
    """Of the file: an entitlement with two keys of its own, and a tenant with two keys."""
    chat = {"name": "chat", "tenant": "acme", "model": MODEL}
    return {
        "entitlements": [
            {**chat, "api_keys": [hashed(OWN), hashed(SPARE)]},
            {**chat, "name": "paused", "tenant": "calm", "api_keys": [hashed("sk-paused")]},
        ],
        "tenants": [
            {
                "name": "acme",
                "keys": [{"name": n[3:], "sha256": hashed(n)} for n in (WEB, LIVE)],
            }
        ],
    }


class Operator:
    """Changes one gateway and its file."""

    def __init__(self, fleet: Fleet, at: int = 0) -> None:
        self.url = fleet.replicas[at].url
        command = fleet.replicas[at].command
        self.file = Path(command[command.index("-c") + 1])

    def asks(self, method: str, path: str, body: Any = None) -> Any:
        headers = {"authorization": f"Bearer {ADMIN_KEY}"}
        answer = httpx.request(
            method, f"{self.url}/admin/{path}", json=body, headers=headers, timeout=20
        )
        assert answer.is_success, answer.text
        return answer.json() if answer.content else None

    def revokes_own(self, key: str) -> None:
        fingerprint = hashlib.sha256(key.encode()).hexdigest()[:8]
        self.asks("DELETE", f"entitlements/chat/keys/{fingerprint}")

    def reloads(self, **changed: Any) -> None:
        config = {**yaml.safe_load(self.file.read_text()), **changed}
        self.file.write_text(yaml.safe_dump(config))
        self.asks("POST", "reload")

    def opens(self, *keys: str) -> list[int]:
        return [status(self.url, key) for key in keys]


@contextmanager
def fleet_on(state: str, gateways: int = 1) -> Iterator[Fleet]:
    config = {"state": {"url": state}, **sections()}
    further: list[dict[str, Any]] = [{}] * (gateways - 1)
    with Fleet(short=1, long=0, mock=("--speed", "50"), config=config, further=further) as fleet:
        yield fleet


def deny(operator: Operator) -> str:
    """Revoke, suspend, delete; the key of what was deleted."""
    asked = {"name": "gone", "tenant": "acme", "model": MODEL}
    gone = str(operator.asks("POST", "entitlements", asked)["key"])
    operator.revokes_own(OWN)
    operator.asks("DELETE", "tenants/acme/keys/web")
    operator.asks("POST", "entitlements/paused/suspend")
    operator.asks("DELETE", "entitlements/gone")
    return gone


DENIED = [401, 401, 403, 401]


@pytest.mark.redis
@pytest.mark.parametrize("back", ["older", "empty"])
def test_a_reload_while_redis_is_away_lifts_nothing(redis_server: RedisServer, back: str) -> None:
    with fleet_on(redis_server.url) as fleet:
        operator = Operator(fleet)
        asked = {"name": "early", "tenant": "acme", "model": MODEL}
        early = str(operator.asks("POST", "entitlements", asked)["key"])
        with redis_server.client() as client:
            older = {key: client.dump(key) for key in client.scan_iter()}
        gone = deny(operator)
        asked = {"name": "late", "tenant": "acme", "model": MODEL}
        late = str(operator.asks("POST", "entitlements", asked)["key"])
        denied = (OWN, WEB, "sk-paused", gone)
        assert operator.opens(*denied) == DENIED

        redis_server.kill()
        operator.asks("POST", "reload")
        assert operator.opens(*denied) == DENIED
        redis_server.start()
        if back == "older":
            with redis_server.client() as client, client.pipeline() as pipe:
                pipe.flushall()
                for key, held in older.items():
                    pipe.restore(key, 0, held)
                pipe.execute()
        assert until(lambda: operator.opens(SPARE) == [200], 15)
        seconds = time.monotonic()
        while time.monotonic() - seconds < 3:  # whatever the next polls find
            assert operator.opens(*denied) == DENIED
        assert operator.opens(SPARE, LIVE, early, late) == [200] * 4, "what was made is there"


def returned(operator: Operator) -> None:
    """All sections leave the file, and come back."""
    operator.reloads(entitlements=[], tenants=[])
    assert operator.opens(OWN, SPARE, WEB, LIVE) == [401] * 4
    operator.reloads(**sections())


def test_a_section_that_leaves_the_file_and_returns_lifts_nothing(tmp_path: Path) -> None:
    with fleet_on(f"sqlite:///{tmp_path}/sluice.db") as fleet:
        operator = Operator(fleet)
        gone = deny(operator)
        returned(operator)
        assert operator.opens(OWN, WEB, "sk-paused", gone) == DENIED
        assert operator.opens(SPARE, LIVE) == [200, 200]
        operator.asks("POST", "entitlements/paused/resume")
        assert operator.opens("sk-paused") == [200]


def test_no_number_of_revocations_forgets_the_first(tmp_path: Path) -> None:
    with fleet_on(f"sqlite:///{tmp_path}/sluice.db") as fleet:
        operator = Operator(fleet)
        operator.revokes_own(OWN)
        first = str(operator.asks("POST", "entitlements/chat/keys")["key"])
        operator.revokes_own(first)
        for _ in range(100):
            operator.revokes_own(str(operator.asks("POST", "entitlements/chat/keys")["key"]))
        changed = sections()
        changed["entitlements"][0]["slo_target_ms"] = 700
        changed["entitlements"][0]["api_keys"] = [hashed(OWN), hashed(first)]
        operator.reloads(**changed)
        assert operator.opens(OWN, first) == [401, 401]
        returned(operator)
        assert operator.opens(OWN, first, SPARE) == [401, 401, 200]


@pytest.mark.redis
def test_a_denial_holds_on_every_gateway_whose_file_still_lists_the_key(
    redis_server: RedisServer,
) -> None:
    with fleet_on(redis_server.url, gateways=2) as fleet:
        here, there = Operator(fleet), Operator(fleet, 1)
        changed = sections()
        changed["tenants"][0]["keys"].append({"name": "more", "sha256": hashed("sk-more")})
        there.reloads(**changed)
        gone = deny(here)

        def denied() -> bool:
            return there.opens(OWN, WEB, "sk-paused", gone) == DENIED

        assert until(denied)
        assert there.opens(SPARE, LIVE, "sk-more") == [200] * 3
        there.reloads(**sections())
        assert denied()
