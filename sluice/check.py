"""`sluice check`: validate a configuration and show what it describes."""

import asyncio
import json
import os
import re
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.markup import escape
from rich.table import Table

from gateway.settings import Config, EntitlementConfig, ModelConfig, remarks
from gateway.settings.tenants import TenantConfig
from gateway.settings.token_pools import managed
from gateway.wiring.process_limits import memory_limit, memory_shortage
from planner.catalogue import MODELS
from sluice.config_file import DEFAULT, ConfigOption, load_or_exit
from sluice.operate.admin_client import DEFAULT_URL, URL_VARIABLE, AdminClient
from sluice.operate.tables import echo_changes
from sluice.terminal import JsonOption, console, stop, table

_RIGHT = frozenset({"window", "b_short", "slots", "keys"})
_BASE_URL = re.compile(r"(https?://[^\s\"',\]}]+?)/v1/?(?=[\s\"',\]}]|$)", re.MULTILINE)
"""As clients of an engine write its URL."""


def check(
    extra: Annotated[list[str] | None, typer.Argument(hidden=True)] = None,
    config: ConfigOption = DEFAULT,
    as_json: JsonOption = False,
    live: Annotated[
        bool, typer.Option("--live", help="Also probe every engine once, as the gateway would.")
    ] = False,
    diff: Annotated[
        str | None,
        typer.Option(
            "--diff",
            metavar="URL",
            help="Show what the file of -c would change in the gateway there; the key is "
            "$SLUICE_ADMIN_KEY.",
        ),
    ] = None,
) -> None:
    """Check a configuration file and show what it describes. Exit code 2 when it is bad.

    With --live exit code 1 when an engine is not ready or not as the file says.
    """
    _well_formed(extra, config, diff)
    loaded = load_or_exit(config, as_json=as_json)
    if diff is not None:
        _diff(config, diff, as_json=as_json)
        return
    notes = _shortened(loaded, config.read_text(encoding="utf-8")) + _kv_bytes(loaded)
    if said := memory_shortage(loaded.server.max_held_body_bytes or 0, memory_limit()):
        notes.append(said)
    if live:
        _live(loaded, notes, as_json=as_json)
        return
    found = summary(loaded)
    found["remarks"] += notes
    if as_json:
        typer.echo(json.dumps({"ok": True, "file": str(config), **found}, indent=2))
        return
    out = console()
    out.print(_pools(loaded))
    if loaded.entitlements:
        out.print(_entitlements(loaded))
    if loaded.tenants:
        out.print(_tenants(loaded))
    for line in found["remarks"]:
        typer.echo(f"note: {line}")
    typer.echo(f"{config}: ok")


def _well_formed(extra: list[str] | None, config: Path, diff: str | None) -> None:
    """Show the right form where the file or the gateway stands in the wrong place."""
    url = diff is not None and diff.startswith(("http://", "https://"))
    if extra or (diff is not None and not url):
        file = extra[0] if extra else diff if config == DEFAULT else config
        gateway = f" --diff {diff if url else os.environ.get(URL_VARIABLE, DEFAULT_URL)}"
        form = f"sluice check -c {file}{'' if diff is None else gateway}"
        stop(f"the file is an option, and --diff names a gateway; write: {form}", 2)


def _shortened(config: Config, text: str) -> list[str]:
    """One notice per worker whose URL the file ends in /v1, which the gateway adds itself."""
    pools = [pool for model in config.models for pool in model.all_pools.values()]
    urls = {worker.url for pool in pools for worker in pool.workers}
    return [
        f"{url}/v1 is read as {url}, for the gateway adds the path: remove /v1"
        for url in dict.fromkeys(_BASE_URL.findall(text))
        if url in urls
    ]


def _kv_bytes(config: Config) -> list[str]:
    """One notice per model whose KV cache is not counted although the catalogue knows its size."""
    found = []
    for model in config.models:
        named = [each for name, each in MODELS.items() if name in model.name.lower()]
        if model.kv_bytes_per_token is None and named:
            known = max(named, key=lambda each: len(each.name))
            found.append(
                f"{model.name}: its KV cache is not counted; with 16-bit values add "
                f"kv_bytes_per_token: {known.kv_bytes_per_token(2):.0f} ({known.name})"
            )
    return found


def _diff(file: Path, url: str, *, as_json: bool) -> None:
    """Show what a file would change in a running gateway."""
    found = AdminClient(url, None).call(
        "POST", "reload", params={"dry_run": "true"}, content=file.read_bytes()
    )
    if as_json:
        typer.echo(json.dumps({"ok": True, **found}, indent=2))
        return
    echo_changes(found["changes"], "nothing would change")
    if found["not_compared"]:
        typer.echo(f"not compared: {', '.join(found['not_compared'])}")


def _live(config: Config, notes: list[str], *, as_json: bool) -> None:
    """Show how the engines answer; exits with 1 for problems."""
    from gateway.wiring.live_check import look

    findings = asyncio.run(look(config))
    bad = any(finding.problem for finding in findings)
    if as_json:
        rows = [msgspec.structs.asdict(finding) for finding in findings]
        typer.echo(json.dumps({"ok": not bad, "workers": rows, "remarks": notes}, indent=2))
    else:
        found = table("model", "pool", "worker", "ready", "problem", "fix")
        for each in findings:
            cells = (each.model, each.pool, each.worker, "yes" if each.ready else "no")
            found.add_row(*map(escape, (*cells, each.problem, each.fix)))
        console().print(found)
        for line in notes:
            typer.echo(f"note: {line}")
    if bad:
        raise typer.Exit(1)


def summary(config: Config) -> dict[str, Any]:
    """Summary of the configuration, without secrets."""
    return {
        "listen": f"{config.server.host}:{config.server.port}",
        "state": str(config.state.url),
        "models": [{**_model(model), "managed": managed(config, model)} for model in config.models],
        "entitlements": [_entitlement(entitlement) for entitlement in config.entitlements],
        "aliases": {alias.name: dict(alias.split) for alias in config.aliases},
        "tenants": [_tenant(tenant) for tenant in config.tenants],
        "remarks": remarks(config),
    }


def _model(model: ModelConfig) -> dict[str, Any]:
    windows = {name: pool.max_model_len for name, pool in model.pools.items()}
    boundaries = dict(zip(windows, model.boundaries, strict=False))
    return {
        "name": model.name,
        "aliases": list(model.aliases),
        "fallbacks": list(model.fallbacks),
        "mode": model.mode,
        "pools": [
            {
                "name": name,
                "max_model_len": windows[name.partition("/")[0]],
                "max_num_seqs": pool.max_num_seqs,
                "slots": pool.slots,
                "boundary": boundaries.get(name),
                "workers": [address.id for address in pool.addresses],
            }
            for name, pool in model.all_pools.items()
        ],
    }


def _entitlement(entitlement: EntitlementConfig) -> dict[str, Any]:
    expires = entitlement.expires_at
    return {
        "name": entitlement.name,
        "tenant": entitlement.tenant,
        "model": entitlement.model,
        "service_class": entitlement.service_class,
        "mode": entitlement.mode,
        "api_keys": len(entitlement.api_keys),
        "expires_at": expires.isoformat() if expires else None,
    }


def _tenant(tenant: TenantConfig) -> dict[str, Any]:
    return {
        "name": tenant.name,
        "display_name": tenant.display_name,
        "labels": dict(tenant.labels),
        "keys": [
            {
                "name": key.name,
                "models": None if key.models is None else list(key.models),
                "entitlements": None if key.entitlements is None else list(key.entitlements),
                "expires_at": key.expires_at.isoformat() if key.expires_at else None,
                "suspended": key.suspended,
            }
            for key in tenant.keys
        ],
    }


def _pools(config: Config) -> Table:
    found = table("model", "pool", "window", "b_short", "slots", "workers", right=_RIGHT)
    for model in map(_model, config.models):
        names = ", ".join([model["name"], *model["aliases"]])
        for pool in model["pools"]:
            boundary = "" if pool["boundary"] is None else str(pool["boundary"])
            workers = "\n".join(pool["workers"])
            found.add_row(
                escape(names),
                escape(pool["name"]),
                str(pool["max_model_len"]),
                boundary,
                str(pool["slots"]),
                escape(workers),
            )
            names = ""
    return found


def _entitlements(config: Config) -> Table:
    found = table("entitlement", "tenant", "model", "class", "keys", "expires", right=_RIGHT)
    for row in map(_entitlement, config.entitlements):
        cells = (row["name"], row["tenant"], row["model"], row["service_class"])
        expires = row["expires_at"] or "never"
        found.add_row(*map(escape, cells), str(row["api_keys"]), expires)
    return found


def _tenants(config: Config) -> Table:
    found = table("tenant", "key", "models", "entitlements", "expires", right=_RIGHT)
    for tenant in map(_tenant, config.tenants):
        shown = escape(tenant["display_name"] or tenant["name"])
        for key in tenant["keys"]:
            lists = [", ".join(key[part] or ("all",)) for part in ("models", "entitlements")]
            ends = "suspended" if key["suspended"] else key["expires_at"] or "never"
            found.add_row(shown, *map(escape, (key["name"], *lists, ends)))
            shown = ""
    return found
