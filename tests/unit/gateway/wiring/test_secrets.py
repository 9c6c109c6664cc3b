"""Every setting that takes text hides what is secret in it, or is known to hold nothing secret."""

import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from fastapi.routing import APIRoute
from pydantic import Secret, SecretStr

from gateway.control.admin import admin_router
from gateway.settings import Config, ConfigError, load, parse, remarks
from gateway.settings.compare import changes, compare
from gateway.settings.loading import _parts
from gateway.settings.types import Section
from gateway.wiring.app import Gateway
from sluice.check import summary
from tests.control import control_of

CANARY = "canary-4d7a"
FORMS = (
    *(CANARY, f"https://me:{CANARY}@h.example:1", f"https://:{CANARY}@h.example/x"),
    *(f"redis://:{CANARY}@h:1/0", f"redis+cluster://me:{CANARY}@h:1,h:2", f"dns://:{CANARY}@h:1"),
)
"""A secret, and URLs that hold one."""
_OF_ENGINES = ("tls", "workers.model", "workers.ca_file")
PUBLIC = (
    *("server.host", "server.tls", "server.admin_keys.name", "currency", "aliases"),
    *("request_log", "usage_export", "ledger", "auth.jwt.issuer", "auth.jwt.audience"),
    *("auth.jwt.ca_file", "auth.jwt.tenant", "auth.jwt.entitlements_claim", "auth.jwt.role"),
    *("models.name", "models.aliases", "models.loras", "models.fallbacks", "models.scheduling"),
    *("models.compression", "models.pools.tls", "models.pools.workers.model"),
    *(f"models.pools.{p}.{name}" for p in ("prefill", "decode") for name in _OF_ENGINES),
    *("models.pools.workers.ca_file", "entitlements.name", "entitlements.tenant"),
    *("entitlements.model", "entitlements.concurrency", "tenants.name", "tenants.display_name"),
    *("tenants.labels", "tenants.entitlements", "tenants.keys.name", "tenants.keys.models"),
    *("tenants.keys.entitlements",),
)
"""Names, claims and paths of files (their beginnings): no secrets, and shown."""
TEXT = """
version: 1
server:
  allowed_origins: ["https://page.example"]
  admin_key: sk-admin
  viewer_key: sk-viewer
  admin_keys: [{name: one, sha256: "sha256:DIGEST-1", role: owner}]
state: {url: "redis://h:1/0", password: pw}
batches: {url: "s3://bucket"}
auth: {jwt: [{issuer: "https://id.example", jwks: "https://id.example/keys", audience: [s]}]}
models:
  - name: m
    pools:
      all:
        max_model_len: 8192
        max_num_seqs: 8
        workers: [{url: "http://a:1", api_key: sk, kv_events: "tcp://a:2"}, {discover: "dns://engines:1"}]
  - name: n
    pools:
      all:
        max_model_len: 8192
        prefill:
          max_num_seqs: 8
          workers:
            - {url: "http://b:1", api_key: sk, kv_events: "tcp://b:2"}
            - {discover: "dns://prefill:1"}
        decode:
          max_num_seqs: 8
          workers:
            - {url: "http://c:1", api_key: sk, kv_events: "tcp://c:2"}
            - {discover: "dns://decode:1"}
        transfer: {kind: vllm}
entitlements:
  - {name: e, tenant: t, model: m, api_keys: ["sha256:DIGEST-2"],
     budgets: [{tokens: 1, window: day, timezone: UTC}]}
tenants:
  - name: t
    budgets: [{tokens: 1, window: day, timezone: UTC}]
    keys: [{name: k, sha256: "DIGEST-3", budgets: [{tokens: 1, window: day, timezone: UTC}]}]
"""
FILE = re.sub(r"DIGEST-(.)", lambda found: found[1] * 64, TEXT)


def settings_of(section: type[Section], above: str = "") -> Iterator[str]:
    """Every setting that takes text, by its path without numbers and names of pools."""
    for name, field in section.model_fields.items():
        parts = [part for part in _parts(field.annotation) if isinstance(part, type)]
        inner = next((part for part in parts if issubclass(part, Section)), None)
        if inner is not None:
            yield from settings_of(inner, f"{above}{name}.")
        elif any(issubclass(part, str | Path | SecretStr | Secret) for part in parts):
            yield above + name


def places(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Every text of a file."""
    inner = value.items() if isinstance(value, dict) else enumerate(value)
    for step, each in inner:
        if isinstance(each, str):
            yield (*path, step)
        elif isinstance(each, dict | list):
            yield from places(each, (*path, step))


PLACES = {
    ".".join(step for step in path if isinstance(step, str) and step != "all"): path
    for path in places(yaml.safe_load(FILE))
}
SECRET = {
    *("server.admin_key", "server.viewer_key", "state.url", "state.password"),
    *("models.pools.workers.api_key", "models.pools.prefill.workers.api_key"),
    "models.pools.decode.workers.api_key",
}
"""Settings that take a secret, or a URL with one; the others refuse it."""
LOOKED_AT = [name for name in settings_of(Config) if not name.startswith(PUBLIC)]


def with_canary(setting: str, form: str) -> str:
    found = yaml.safe_load(FILE)
    if setting == "state.url":
        del found["state"]["password"]
    inner = found
    for step in PLACES[setting][:-1]:
        inner = inner[step]
    inner[PLACES[setting][-1]] = form
    return yaml.safe_dump(found)


def read(text: str, environ: dict[str, str] | None) -> tuple[Config | None, str]:
    """The configuration, and what is told of a bad one."""
    try:
        return parse(text, "sluice.yaml", environ), ""
    except ConfigError as error:
        return None, f"{error}{error!r}{error.problems}"


def everything_about(running: Config, after: Config) -> str:
    addresses = [pool.addresses for m in after.models for pool in m.all_pools.values()]
    both = [changes(running, after), changes(after, running)]
    both += [compare(running, after).changes, compare(after, running).changes]
    found = (after, after.model_dump(), after.model_dump_json(), summary(after), remarks(after))
    return f"{found}{both}{addresses}"


@pytest.mark.parametrize("setting", LOOKED_AT)
def test_a_secret_is_shown_nowhere(setting: str) -> None:
    running, taken = parse(FILE, "sluice.yaml", {}), False
    for form in FORMS[1:] if setting == "auth.jwt.jwks" else FORMS:  # without ://, a file's name
        text = with_canary(setting, form)
        for environ, more in (({}, "extra: 1\n"), ({}, ""), (None, "extra: 1\n"), (None, "")):
            after, told = read(text + more, environ)
            if after is not None:
                taken = True
                told = everything_about(running, after)
            assert CANARY not in told
    assert taken == (setting in SECRET)


async def test_a_gateway_tells_no_secret_on_its_routes_and_in_its_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    config = yaml.safe_load(FILE)
    config["server"] |= {"admin_key": f"{CANARY}-a", "viewer_key": f"{CANARY}-v"}
    config["state"] = {"url": f"redis://:{CANARY}-r@127.0.0.1:9/0"}
    del config["auth"]
    config["models"][0]["pools"]["all"]["workers"] = [
        {"url": "http://127.0.0.1:9", "api_key": f"{CANARY}-e"}
    ]
    file = tmp_path / "sluice.yaml"
    file.write_text(yaml.safe_dump(config))
    gateway = Gateway(load(file), port=8080)
    headers = {"authorization": f"Bearer {CANARY}-a"}
    app: Any = gateway.data_plane
    transport = httpx.ASGITransport(app=app)
    async with (
        gateway.pools.running(gateway.pipeline.extend),
        httpx.AsyncClient(transport=transport, base_url="http://h", headers=headers) as client,
    ):
        await gateway.prober.look([(gateway.models[0].fleet.pools[0], 0)])
        routes = [r for r in admin_router(control_of()).routes if isinstance(r, APIRoute)]
        plain = [(how, r.path) for r in routes for how in r.methods or () if "{" not in r.path]
        plain += [("GET", f"/dashboard/{path}") for path in ("snapshot", "history", "decisions")]
        answers = [await client.request(how, path) for how, path in plain]
        answers += [await client.get(path) for path in ("/metrics", "/ready", "/health")]
        file.write_text(file.read_text().replace("-r@", "-r2@").replace(f"{CANARY}-v", "other"))
        answers.append(await client.post("/admin/reload"))
        sent = file.read_text().replace("-r2@", "-r3@")
        answers.append(await client.post("/admin/reload?dry_run=1", content=sent))
        assert [answer.status_code for answer in answers[-2:]] == [200, 200], answers[-2].text
    for answer in answers:
        assert CANARY not in answer.text, answer.request.url
    assert CANARY not in caplog.text
    for part in (gateway.reloading, gateway.prober, gateway.upstream):
        await part.close()
