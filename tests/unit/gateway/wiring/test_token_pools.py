"""Limits that keys get at run time count for every model, also ones without limits in the file.

Where they cannot be counted they are refused.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gateway.errors import Unavailable
from gateway.settings import load
from gateway.tenancy.keyring import authenticate
from gateway.wiring import token_pools
from gateway.wiring.app import Gateway
from tests import builders
from tests.tenancy_fakes import digest

WHO = "me"
MODEL = """
  - name: NAME
    pools:
      only: {max_model_len: 4096, max_num_seqs: 8, workers: ["http://127.0.0.1:9/NAME"]}
"""


def written(path: Path, state: str, *models: str) -> Path:
    listed = "".join(MODEL.replace("NAME", name) for name in models)
    rights = "".join(f"  - {{name: for-{m}, tenant: acme, model: {m}}}\n" for m in models)
    path.write_text(
        f"version: 1\nserver: {{admin_key: sk-admin}}\nstate: {{url: '{state}'}}\n"
        f"models:{listed}entitlements:\n{rights}"
    )
    return path


@asynccontextmanager
async def running(file: Path) -> AsyncIterator[Gateway]:
    async with Gateway(load(file)).running() as gateway:
        yield gateway


async def ask(gateway: Gateway, model: str, number: int, key: str = "sk-web") -> Any:
    """A lease for a request with this key. Raises Refusal."""
    principal = authenticate(gateway.pools.keyring, digest(key), 1.0)
    (chosen,) = principal.choices[model]
    known = builders.ask(f"{model}{number}", model=model, cost_tokens=10)
    asked = msgspec.structs.replace(known, entitlement=chosen.entitlement, limits=chosen.limits)
    return await gateway.store.admit(asked)


async def shown(gateway: Gateway) -> dict[str, Any]:
    """What is used, by the id of each limit."""
    page: Any = await gateway.pools.budgets.page(None, 9)
    return {each["id"]: each["used"] for each in page["data"]}


def limited(**limits: Any) -> dict[str, Any]:
    return {"name": "web", "sha256": digest("sk-web").hex(), **limits}


async def test_the_first_limit_of_a_key_has_every_model_managed(tmp_path: Path) -> None:
    async with running(written(tmp_path / "f.yaml", "memory://", "m", "n")) as gateway:
        tenants = gateway.pools.tenants
        await tenants.create({"name": "acme"}, WHO)
        await tenants.add_key("acme", {"name": "plain"}, WHO)
        assert not gateway.pools.manages("m")
        await tenants.add_key("acme", limited(requests_per_minute=2), WHO)
        assert gateway.pools.manages("m")
        assert gateway.pools.manages("n")
        for number, model in enumerate("mn"):
            await ask(gateway, model, number)
        assert await shown(gateway) == {"key:acme/web:requests:minute": 2}


async def test_limits_are_counted_after_a_restart_and_for_a_model_that_a_reload_adds(
    tmp_path: Path,
) -> None:
    state = f"sqlite:///{tmp_path}/sluice.db"
    file = written(tmp_path / "f.yaml", state, "m")
    async with running(file) as gateway:
        await gateway.pools.tenants.create({"name": "acme"}, WHO)
        await gateway.pools.tenants.add_key("acme", limited(budgets=[{"tokens": 100}]), WHO)
        await ask(gateway, "m", 0)
    async with running(file) as gateway:
        assert gateway.pools.manages("m")
        assert await shown(gateway) == {"key:acme/web:tokens:month": 10}
        written(file, state, "m", "n")
        await gateway.reloading.reload()
        assert gateway.pools.manages("n")
        await ask(gateway, "n", 1)
        assert await shown(gateway) == {"key:acme/web:tokens:month": 20}

        await gateway.pools.tenants.change_key("acme", "web", {"budgets": None}, WHO)
        assert await shown(gateway) == {}
        written(file, state, "m")
        await gateway.reloading.reload()
        assert not gateway.pools.manages("m"), "nothing has limits any more"


async def test_a_failure_to_have_streams_reserve_more_is_logged_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(token_pools, "EXTEND_EVERY_S", 0.0)
    calls, again = iter(range(2)), asyncio.Event()

    def extend() -> None:
        if next(calls, None) == 0:
            raise ValueError("a defect")
        again.set()

    pools = Gateway(load(written(tmp_path / "f.yaml", "memory://", "m"))).pools
    async with pools.running(extend), asyncio.timeout(5):
        await again.wait()
    assert "having streams reserve more failed" in caplog.text


async def test_no_key_opens_before_a_file_that_may_deny_it_was_read(tmp_path: Path) -> None:
    state = tmp_path / "sluice.db"
    state.write_text("no database, although it was one")
    async with running(written(tmp_path / "f.yaml", f"sqlite:///{state}", "m")) as gateway:
        with pytest.raises(Unavailable, match="which keys are revoked"):
            authenticate(gateway.pools.keyring, digest("sk-web"), 1.0)
