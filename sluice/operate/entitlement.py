"""`sluice entitlement`: who may use which model of a running gateway, and how much of it."""

from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from sluice.operate import tables
from sluice.operate.admin_client import AdminClient, connected
from sluice.terminal import console, echo_json, stop

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
Pace = Annotated[float | None, _option("--slo-tpot-ms", "Time per token that it expects.")]
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
@connected
def list_(
    client: AdminClient,
    model: Annotated[str | None, typer.Option(help="Only this model's.")] = None,
    of: Annotated[str | None, typer.Option("--tenant", help="Only this tenant's.")] = None,
) -> None:
    """All entitlements, oldest first."""
    client.tell(client.rows("entitlements", model=model, tenant=of), _show_list)


@entitlement.command()
@connected
def show(
    client: AdminClient,
    name: Name,
) -> None:
    """Show one entitlement: terms, counters, fingerprints of its keys."""
    found = client.call("GET", "entitlements", name)
    client.tell(found, lambda row: console().print(tables.card(row)))


@entitlement.command()
@connected
def create(
    client: AdminClient,
    name: Name,
    of: Annotated[
        str, typer.Option("--tenant", help="The tenant that owns it.", show_default=False)
    ],
    model: Annotated[str, typer.Option(help="The model's name.", show_default=False)],
    service_class: Class = None,
    slo_target_ms: Slo = None,
    slo_tpot_ms: Pace = None,
    tokens_per_second: Rate = None,
    max_tokens_per_second: RateLimit = None,
    kv_cache_gib: Kv = None,
    max_kv_cache_gib: KvLimit = None,
    concurrency: Concurrency = None,
    max_concurrency: Limit = None,
    mode: Mode = None,
    expires_at: Expires = None,
) -> None:
    """Create an entitlement. Prints its key, which is shown only once."""
    fields = _fields_of(
        service_class=service_class,
        slo_target_ms=slo_target_ms,
        slo_tpot_ms=slo_tpot_ms,
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
    made = client.call("POST", "entitlements", body=body)
    if client.as_json:
        echo_json(made)
        return
    shown = {field: made[field] for field in (*body, "service_class", "keys")}
    console().print(tables.card(shown))
    _tell_key(made)


@entitlement.command()
@connected
def change(
    client: AdminClient,
    name: Name,
    of: Tenant = None,
    service_class: Class = None,
    slo_target_ms: Slo = None,
    slo_tpot_ms: Pace = None,
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
) -> None:
    """Change terms, effective at once. Fields that are not named stay."""
    body = _fields_of(
        tenant=of,
        service_class=service_class,
        slo_target_ms=slo_target_ms,
        slo_tpot_ms=slo_tpot_ms,
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
    _change(client, "PATCH", name, body=body)


@entitlement.command()
@connected
def suspend(
    client: AdminClient,
    name: Name,
) -> None:
    """Refuse its requests from now on; running ones finish."""
    _change(client, "POST", name, "suspend")


@entitlement.command()
@connected
def resume(
    client: AdminClient,
    name: Name,
) -> None:
    """Admit its requests again."""
    _change(client, "POST", name, "resume")


@entitlement.command()
@connected
def expire(
    client: AdminClient,
    name: Name,
    at: Annotated[
        str | None, typer.Option(help="When, as 2030-12-31T23:59:59Z; now when absent.")
    ] = None,
) -> None:
    """End it, now or at a time. Its requests are refused from then on."""
    body: dict[str, object] | None = None if at is None else {"at": at}
    _change(client, "POST", name, "expire", body=body)


@entitlement.command()
@connected
def delete(
    client: AdminClient,
    name: Name,
) -> None:
    """Delete it. Refused while it has requests in flight."""
    client.call("DELETE", "entitlements", name)
    client.tell({"name": name, "deleted": True}, lambda _: typer.echo(f"{name}: deleted"))


@keys.command("add")
@connected
def add(
    client: AdminClient,
    name: Name,
) -> None:
    """Add a second live key. Prints it; it is shown only once."""
    _change(client, "POST", name, "keys")


@keys.command("revoke")
@connected
def revoke(
    client: AdminClient,
    name: Name,
    fingerprint: Annotated[str, typer.Argument(help="As `sluice entitlement show` lists it.")],
) -> None:
    """End a key at once."""
    _change(client, "DELETE", name, "keys", fingerprint)


@entitlement.command()
@connected
def export(
    client: AdminClient,
    crd: Annotated[
        bool, typer.Option("--crd", help="As TokenPools and TokenEntitlements of Kubernetes.")
    ] = False,
    pool: Annotated[
        str | None, typer.Option(help="Only this pool of the models.", show_default=False)
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option(
            "-c",
            "--config",
            help="The gateway's file: it knows hashes of keys, and rates of pools.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Print all entitlements as manifests; on stderr, what these cannot say."""
    from sluice.config_file import load_or_exit
    from sluice.imports.report import Report, told
    from sluice.operate import crd_export

    if not crd:
        stop("give --crd: manifests are the only form", 2)
    config = None if file is None else load_or_exit(file)
    report = Report("the gateway")
    objects = crd_export.manifests(
        client.rows("entitlements"),
        client.call("GET", "pools"),
        client.rows("budgets"),
        report,
        pool=pool,
        config=config,
    )
    if client.as_json:
        lines = [msgspec.to_builtins(line) for line in report.lines]
        echo_json({"manifests": objects, "lines": lines})
        return
    typer.echo(crd_export.text_of(objects), nl=False)
    for line in told(report.lines, crd_export.HEADS):
        typer.echo(line, err=True)


@entitlement.command()
@connected
def audit(
    client: AdminClient,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="How many, newest first.")] = 100,
) -> None:
    """List the newest changes, those of all replicas."""
    found = client.call("GET", "audit", params={"limit": limit})["data"]
    client.tell(found, _show_audit)


def _show_audit(found: list[dict[str, Any]]) -> None:
    for line in tables.audit(found):
        typer.echo(line)


def _show_list(found: list[dict[str, Any]]) -> None:
    out = console()
    table, left_out = tables.listing(found, out.width)
    out.print(table)
    if left_out:
        typer.echo(f"left out for want of room: {', '.join(left_out)}", err=True)


def _change(
    client: AdminClient, method: str, *path: str, body: dict[str, object] | None = None
) -> None:
    """Make a change and print the changed fields; `path` begins with the entitlement's name."""
    name = path[0]
    before = {} if client.as_json else client.call("GET", "entitlements", name)
    after = client.call(method, "entitlements", *path, body=body)
    if client.as_json:
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
