"""Admin keys, roles and token issuers change by a reload, over real sockets."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import yaml

from bench.common.fleet import ADMIN_KEY, MODEL, Fleet
from gateway.payload.head import digest_of
from tests.asking import post
from tests.issuer import AUDIENCE, Issuer

FRAMES = 15
"""Of the dashboard, one a second."""
FIRST, SECOND = "https://one.example", "https://two.example"


def named(key: str, role: str) -> dict[str, str]:
    digest = digest_of(key.encode()).hex()
    return {"name": key.replace("-", "."), "sha256": f"sha256:{digest}", "role": role}


class Edited:
    """A fleet whose gateway's file changes."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.file: dict[str, Any] = yaml.safe_load(fleet.replicas[0].file.read_text())

    def reload(self, key: str = ADMIN_KEY) -> httpx.Response:
        self.fleet.replicas[0].file.write_text(yaml.safe_dump(self.file))
        return self.ask("POST", "/admin/reload", key)

    def reloaded(self, key: str = ADMIN_KEY) -> None:
        answer = self.reload(key)
        assert (answer.status_code, answer.json()["restart_needed"]) == (200, []), answer.text

    def ask(self, method: str, path: str, key: str, **more: Any) -> httpx.Response:
        headers = {"authorization": f"Bearer {key}"}
        url = self.fleet.url + path
        return httpx.request(method, url, headers=headers, trust_env=False, timeout=20, **more)

    def status(self, key: str, path: str = "/admin/pools", method: str = "GET") -> int:
        return self.ask(method, path, key).status_code

    def chat(self, key: str) -> int:
        return post(self.fleet.url, key).status_code


@contextmanager
def edited(**config: Any) -> Iterator[Edited]:
    with Fleet(short=1, long=0, mock=("--speed", "50"), config=config) as fleet:
        yield Edited(fleet)


def test_an_admin_key_that_left_the_file_opens_nothing_from_the_reload_on() -> None:
    with edited() as world:
        server = world.file["server"]
        server["admin_keys"] = [named("sk-one", "viewer"), named("sk-two", "owner")]
        world.reloaded()
        assert (world.status("sk-one"), world.status("sk-two")) == (200, 200)
        assert world.status("sk-one", "/admin/reload", "POST") == 403
        with httpx.stream(
            "GET",
            f"{world.fleet.url}/dashboard/events",
            headers={"authorization": "Bearer sk-one"},
            trust_env=False,
            timeout=20,
        ) as watching:
            frames = watching.iter_bytes()
            assert next(frames)
            server["admin_keys"] = [named("sk-two", "operator")]
            server["admin_key"] = "sk-new"
            world.reloaded()
            assert len(list(frames)) < FRAMES, "ends, although its key was good when it began"
        assert [world.status(key) for key in ("sk-one", ADMIN_KEY, "sk-two", "sk-new")] == [
            *(401, 401, 200, 200),
        ]
        assert world.status("sk-two", "/admin/tenants/none", "DELETE") == 403


def test_issuers_come_and_go_by_a_reload() -> None:
    entitlement = {"name": "e", "tenant": "acme", "model": MODEL}
    with (
        Issuer(FIRST).serving() as first,
        Issuer(SECOND).serving() as second,
        edited(entitlements=[entitlement]) as world,
    ):
        tokens = first.token(), second.token()
        assert [world.chat(token) for token in tokens] == [401, 401]
        world.file["auth"] = {"jwt": [rules(first)]}
        world.reloaded()
        assert [world.chat(token) for token in tokens] == [200, 401]
        first.away, reads = True, first.reads
        world.file["auth"] = {"jwt": [rules(first, tenant_claim="tenant"), rules(second)]}
        world.reloaded()
        assert [world.chat(token) for token in tokens] == [200, 200]
        assert first.reads == reads, "its keys are known"
        world.file["auth"]["jwt"] = [rules(second, tenants=["acme"], role_claim="groups")]
        world.reloaded()
        assert [world.chat(token) for token in tokens] == [401, 200]
        owner = second.token(groups=["owner"])
        assert world.status(owner) == 200
        del world.file["auth"]
        world.reloaded()
        assert [world.chat(token) for token in tokens] == [401, 401]
        assert world.status(owner) == 401


def test_a_gateway_that_only_tokens_closed_does_not_open_by_a_reload() -> None:
    with Issuer(FIRST).serving() as issuer, edited(auth={"jwt": [rules(issuer)]}) as world:
        assert world.chat("anything") == 401
        del world.file["auth"]
        world.reloaded()
        assert world.chat("anything") == 401
        admin: Any = {"headers": {"authorization": f"Bearer {ADMIN_KEY}"}, "trust_env": False}
        tenants = f"{world.fleet.url}/admin/tenants"
        assert httpx.post(tenants, json={"name": "acme"}, **admin).status_code == 201
        assert httpx.delete(f"{tenants}/acme", **admin).status_code == 204
        assert world.chat("anything") == 401


def test_a_bad_auth_section_refuses_the_reload_with_line_and_fix() -> None:
    with Issuer(FIRST).serving() as issuer, edited(auth={"jwt": [rules(issuer)]}) as world:
        world.file["entitlements"] = [{"name": "e", "tenant": "acme", "model": MODEL}]
        world.reloaded()
        good = world.file["auth"]
        for bad, said in (
            ({"jwt": [{**rules(issuer), "algorithms": ["HS256"]}]}, "is not a choice here"),
            ({"jwt": [{**rules(issuer), "jwks": "no-such.json"}]}, "cannot read the file"),
            ({"jwt": [{**rules(issuer), "ca_file": __file__}]}, "no certificate in the file"),
            ({"jwt": [rules(issuer), rules(issuer)]}, "list an issuer once"),
        ):
            world.file["auth"] = bad
            answer = world.reload()
            assert answer.status_code == 400
            message = answer.json()["error"]["message"]
            assert said in message
            assert f"{world.fleet.replicas[0].file}:" in message
            assert world.chat(issuer.token()) == 200
        world.file["auth"] = good
        world.reloaded()


def rules(issuer: Issuer, **more: Any) -> dict[str, Any]:
    return {"issuer": issuer.name, "jwks": issuer.url, "audience": [AUDIENCE], **more}
