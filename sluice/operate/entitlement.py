"""`sluice entitlement`: who may use which model of a running gateway, and how much of it."""

from typing import Annotated, Any

import typer

from sluice.operate import tables
from sluice.operate.admin_client import (
    DEFAULT_URL,
    AdminClient,
    KeyFileOption,
    UrlOption,
)
from sluice.terminal import JsonOption, console, echo_json, stop

PAGE = 1_000
"""Entitlements requested per page."""

entitlement = typer.Typer(
    name="entitlement",
    help="Entitlements of a running gateway: who may use it, and how much.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _option(flag: str, words: str) -> Any:
    return typer.Option(flag, help=words, show_default=False)


Tenant = Annotated[str | None, _option("--tenant", "Whose it is.")]
Class = Annotated[
    str | None, _option("--class", "dedicated, guaranteed, elastic, spot or preemptible.")
]
Slo = Annotated[float | None, _option("--slo-target-ms", "Time to first token that it expects.")]
Rate = Annotated[float | None, _option("--tokens-per-second", "Input and output tokens.")]
RateLimit = Annotated[float | None, _option("--max-tokens-per-second", "The same with borrowing.")]
Kv = Annotated[float | None, _option("--kv-cache-gib", "KV cache of its requests in flight.")]
KvLimit = Annotated[float | None, _option("--max-kv-cache-gib", "The most of it.")]
Concurrency = Annotated[str | None, _option("--concurrency", "Baseline: 32, or short=28,long=4.")]
Limit = Annotated[int | None, _option("--max-concurrency", "The most sequences in flight.")]
Mode = Annotated[str | None, _option("--mode", "enforce or observe.")]
Expires = Annotated[
    str | None, _option("--expires-at", "2030-12-31T23:59:59Z; UTC without an offset.")
]
keys = typer.Typer(help="An entitlement's keys.", no_args_is_help=True)
entitlement.add_typer(keys, name="keys")

Name = Annotated[str, typer.Argument(help="The entitlement.", show_default=False)]


@entitlement.command("list")
def list_(
    model: Annotated[str | None, typer.Option(help="Only this model's.")] = None,
    of: Annotated[str | None, typer.Option("--tenant", help="Only this tenant's.")] = None,
    url: UrlOption = DEFAULT_URL,
    admin_key_file: KeyFileOption = None,
    as_json: JsonOption = False,
) -> None:
    """All entitlements, oldest first."""
    client = AdminClient(url, admin_key_file)
    params: dict[str, str | int] = {"limit": PAGE}
    params |= {k: v for k, v in (("model", model), ("tenant", of)) if v is not None}
    found: list[dict[str, Any]] = []
    while True:
        page = client.call("GET", "entitlements", params=params)
        found += page["data"]
        if page["next"] is None:
            break
        params["after"] = page["next"]
    if as_json:
        echo_json(found)
        return
    out = console()
    table, left_out = tables.listing(found, out.width)
    out.print(table)
    if left_out:
        typer.echo(f"left out for want of room: {', '.join(left_out)}", err=True)


@entitlement.command()
def show(
    name: Name,
    url: UrlOption = DEFAULT_URL,
    admin_key_file: KeyFileOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show one entitlement: terms, counters, fingerprints of its keys."""
    found = AdminClient(url, admin_key_file).call("GET", "entitlements", name)
    if as_json:
        echo_json(found)
    else:
        console().print(tables.card(found))


@entitlement.command()
def create(
    name: Name,
    of: Annotated[
        str, typer.Option("--tenant", help="The tenant that owns it.", show_default=False)
    ],
    model: Annotated[str, typer.Option(help="The model's name.", show_default=False)],
    service_class: Class = None,
    slo_target_ms: Slo = None,
    tokens_per_second: Rate = None,
    max_tokens_per_second: RateLimit = None,
    kv_cache_gib: Kv = None,
    max_kv_cache_gib: KvLimit = None,
    concurrency: Concurrency = None,
    max_concurrency: Limit = None,
    mode: Mode = None,
    expires_at: Expires = None,
    url: UrlOption = DEFAULT_URL,
    admin_key_file: KeyFileOption = None,
    as_json: JsonOption = False,
) -> None:
    """Create an entitlement. Prints its key, which is shown only once."""
    fields = _fields_of(
        service_class=service_class,
        slo_target_ms=slo_target_ms,
        tokens_per_second=tokens_per_second,
        max_tokens_per_second=max_tokens_per_second,
        kv_cache_gib=kv_cache_gib,
        max_kv_cache_gib=max_kv_cache_gib,
        concurrency=concurrency,
        max_concurrency=max_concurrency,
        mode=mode,
        expires_at=expires_at,
    )
    body = {"name": name, "tenant": of, "model": model, **fields}
    made = AdminClient(url, admin_key_file).call("POST", "entitlements", body=body)
    if as_json:
        echo_json(made)
        return
    shown = {field: made[field] for field in (*body, "service_class", "keys")}
    console().print(tables.card(shown))
    _tell_key(made)


@entitlement.command()
def change(
    name: Name,
    of: Tenant = None,
    service_class: Class = None,
    slo_target_ms: Slo = None,
    tokens_per_second: Rate = None,
    max_tokens_per_second: RateLimit = None,
    kv_cache_gib: Kv = None,
    max_kv_cache_gib: KvLimit = None,
    concurrency: Concurrency = None,
    max_concurrency: Limit = None,
    mode: Mode = None,
    expires_at: Expires = None,
    unset: Annotated[
        list[str] | None, typer.Option(help="Remove a field, such as `tokens_per_second`.")
    ] = None,
    url: UrlOption = DEFAULT_URL,
    admin_key_file: KeyFileOption = None,
    as_json: JsonOption = False,
) -> None:
    """Change terms, effective at once. Fields that are not named stay."""
    body = _fields_of(
        tenant=of,
        service_class=service_class,
        slo_target_ms=slo_target_ms,
        tokens_per_second=tokens_per_second,
        max_tokens_per_second=max_tokens_per_second,
        kv_cache_gib=kv_cache_gib,
        max_kv_cache_gib=max_kv_cache_gib,
        concurrency=concurrency,
        max_concurrency=max_concurrency,
        mode=mode,
        expires_at=expires_at,
    )
    for field in (field.replace("-", "_") for field in unset or ()):
        if field in body:
            stop(f"--unset {field}: it is also given a value", 2)
        body[field] = None
    if not body:
        stop("nothing to change: give an option, see --help", 2)
    _change(AdminClient(url, admin_key_file), as_json, "PATCH", name, body=body)


@entitlement.command()
def suspend(
    name: Name,
    url: UrlOption = DEFAULT_URL,
    admin_key_file: KeyFileOption = None,
    as_json: JsonOption = False,
) -> None:
    """Refuse its requests from now on; running ones finish."""
    _change(AdminClient(url, admin_key_file), as_json, "POST", name, "suspend")


@entitlement.command()
def resume(
    name: Name,
    url: UrlOption = DEFAULT_URL,
    admin_key_file: KeyFileOption = None,
    as_json: JsonOption = False,
) -> None:
    """Admit its requests again."""
    _change(AdminClient(url, admin_key_file), as_json, "POST", name, "resume")


@entitlement.command()
def expire(
    name: Name,
    at: Annotated[
        str | None, typer.Option(help="When, as 2030-12-31T23:59:59Z; now when absent.")
    ] = None,
    url: UrlOption = DEFAULT_URL,
    admin_key_file: KeyFileOption = None,
    as_json: JsonOption = False,
) -> None:
    """End it, now or at a time. Its requests are refused from then on."""
    body: dict[str, object] | None = None if at is None else {"at": at}
    _change(AdminClient(url, admin_key_file), as_json, "POST", name, "expire", body=body)


@entitlement.command()
def delete(
    name: Name,
    url: UrlOption = DEFAULT_URL,
    admin_key_file: KeyFileOption = None,
    as_json: JsonOption = False,
) -> None:
    """Delete it. Refused while it has requests in flight."""
    AdminClient(url, admin_key_file).call("DELETE", "entitlements", name)
    if as_json:
        echo_json({"name": name, "deleted": True})
    else:
        typer.echo(f"{name}: deleted")


@keys.command("add")
def add(
    name: Name,
    url: UrlOption = DEFAULT_URL,
    admin_key_file: KeyFileOption = None,
    as_json: JsonOption = False,
) -> None:
    """Add a second live key. Prints it; it is shown only once."""
    _change(AdminClient(url, admin_key_file), as_json, "POST", name, "keys")


@keys.command("revoke")
def revoke(
    name: Name,
    fingerprint: Annotated[str, typer.Argument(help="As `sluice entitlement show` lists it.")],
    url: UrlOption = DEFAULT_URL,
    admin_key_file: KeyFileOption = None,
    as_json: JsonOption = False,
) -> None:
    """End a key at once."""
    _change(AdminClient(url, admin_key_file), as_json, "DELETE", name, "keys", fingerprint)


@entitlement.command()
def audit(
    limit: Annotated[int, typer.Option(min=1, max=1000, help="How many, newest first.")] = 100,
    url: UrlOption = DEFAULT_URL,
    admin_key_file: KeyFileOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the newest changes, those of all replicas."""
    found = AdminClient(url, admin_key_file).call("GET", "audit", params={"limit": limit})["data"]
    if as_json:
        echo_json(found)
    else:
        for line in tables.audit(found):
            typer.echo(line)


def _change(
    client: AdminClient,
    as_json: bool,
    method: str,
    *path: str,
    body: dict[str, object] | None = None,
) -> None:
    """Make a change and print the changed fields; `path` begins with the entitlement's name."""
    name = path[0]
    before = {} if as_json else client.call("GET", "entitlements", name)
    after = client.call(method, "entitlements", *path, body=body)
    if as_json:
        echo_json(after)
        return
    for line in tables.changes(before, after) or ["nothing changed"]:
        typer.echo(f"{name}: {line}")
    _tell_key(after)


def _tell_key(made: dict[str, Any]) -> None:
    """Print a new key alone on the last line."""
    if "key" in made:
        typer.echo("Its key, shown this once:", err=True)
        typer.echo(made["key"])


def _fields_of(*, concurrency: str | None, **given: object) -> dict[str, object]:
    """The fields that were given; `concurrency` as a number or by pool."""
    fields = {name: value for name, value in given.items() if value is not None}
    if concurrency is not None:
        try:
            if "=" in concurrency:
                parts = [part.partition("=") for part in concurrency.split(",")]
                fields["concurrency"] = {pool.strip(): int(most) for pool, _, most in parts}
            else:
                fields["concurrency"] = int(concurrency)
        except ValueError:
            stop("--concurrency: give a whole number, or pool=number,pool=number", 2)
    return fields
