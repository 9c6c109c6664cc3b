"""`sluice key`: the keys of tenants at a running gateway."""

import contextlib
import math
from typing import Annotated, Any, Final

import typer

from sluice.operate.admin_client import AdminClient, connected
from sluice.operate.tables import card, key_table
from sluice.operate.tenant import listed, removed
from sluice.terminal import console, stop

_NUMBERS: Final = frozenset({"tokens", "money", "warn_at"})
"""Fields of a budget that are no text."""

key = typer.Typer(
    name="key",
    help="Keys of a running gateway's tenants: add, list, rotate, suspend, expire, revoke.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

Tenant = Annotated[str, typer.Argument(help="The tenant.", show_default=False)]
Key = Annotated[str, typer.Argument(help="The key's name or fingerprint.", show_default=False)]
Models = Annotated[
    str | None,
    typer.Option(help="The only models that it opens, as a,b.", show_default=False),
]
Entitlements = Annotated[
    str | None,
    typer.Option(help="The entitlements that it uses, in order, as a,b.", show_default=False),
]
Expires = Annotated[
    str | None,
    typer.Option("--expires-at", help="2030-12-31T23:59:59Z; UTC without an offset."),
]
PerMinute = Annotated[
    int | None,
    typer.Option(
        "--requests-per-minute", help="Most requests in any 60 seconds.", show_default=False
    ),
]
AtOnce = Annotated[
    int | None,
    typer.Option("--max-concurrency", help="Most sequences in flight.", show_default=False),
]
Budgets = Annotated[
    list[str] | None,
    typer.Option(
        "--budget",
        help="As tokens=1000000,window=day or money=50,timezone=Europe/Berlin,warn_at=0.8. "
        "Those given replace all that it has.",
        show_default=False,
    ),
]
Hash = Annotated[
    str | None,
    typer.Option(
        "--sha256", help="Hash of a key that exists; absent: make one.", show_default=False
    ),
]


@key.command("list")
@connected
def list_(
    client: AdminClient,
    tenant: Tenant,
) -> None:
    """A tenant's keys by name and fingerprint."""
    found = client.call("GET", "tenants", tenant)["keys"]
    client.tell(found, lambda rows: console().print(key_table(rows)))


@key.command()
@connected
def add(
    client: AdminClient,
    tenant: Tenant,
    name: Annotated[str, typer.Argument(help="The key's name.", show_default=False)],
    models: Models = None,
    entitlements: Entitlements = None,
    expires_at: Expires = None,
    requests_per_minute: PerMinute = None,
    max_concurrency: AtOnce = None,
    budget: Budgets = None,
    sha256: Hash = None,
) -> None:
    """Add a key. Prints it; it is shown only once."""
    body = {
        "name": name,
        **_fields(models, entitlements, expires_at),
        **_limits(requests_per_minute, max_concurrency, budget),
    }
    if sha256 is not None:
        body["sha256"] = sha256
    client.tell(client.call("POST", "tenants", tenant, "keys", body=body), _show)


@key.command()
@connected
def change(
    client: AdminClient,
    tenant: Tenant,
    name: Key,
    models: Models = None,
    entitlements: Entitlements = None,
    expires_at: Expires = None,
    requests_per_minute: PerMinute = None,
    max_concurrency: AtOnce = None,
    budget: Budgets = None,
    unset: Annotated[
        list[str] | None, typer.Option(help="Remove a field, such as `models` or `budgets`.")
    ] = None,
) -> None:
    """Change a key, effective at once. Fields that are not named stay."""
    body = {
        **_fields(models, entitlements, expires_at),
        **_limits(requests_per_minute, max_concurrency, budget),
        **removed(unset),
    }
    if not body:
        stop("nothing to change: give an option, see --help", 2)
    _patch(client, tenant, name, body)


@key.command()
@connected
def rotate(
    client: AdminClient,
    tenant: Tenant,
    name: Key,
    grace: Annotated[
        float, typer.Option("--grace-s", help="Seconds that the old key still opens; 0 for none.")
    ] = 86_400.0,
    sha256: Hash = None,
) -> None:
    """Give a key a new value. Prints it; the old one opens a while longer."""
    body: dict[str, object] = {"grace_s": grace}
    if sha256 is not None:
        body["sha256"] = sha256
    made = client.call("POST", "tenants", tenant, "keys", name, "rotate", body=body)
    client.tell(made, _show)


@key.command()
@connected
def suspend(
    client: AdminClient,
    tenant: Tenant,
    name: Key,
) -> None:
    """Refuse a key from now on; running requests finish."""
    _patch(client, tenant, name, {"suspended": True})


@key.command()
@connected
def resume(
    client: AdminClient,
    tenant: Tenant,
    name: Key,
) -> None:
    """Admit a key again."""
    _patch(client, tenant, name, {"suspended": False})


@key.command()
@connected
def expire(
    client: AdminClient,
    tenant: Tenant,
    name: Key,
    at: Annotated[str, typer.Option(help="When, as 2030-12-31T23:59:59Z.", show_default=False)],
) -> None:
    """End a key at a time. To end it now, revoke it."""
    _patch(client, tenant, name, {"expires_at": at})


@key.command()
@connected
def revoke(
    client: AdminClient,
    tenant: Tenant,
    name: Key,
) -> None:
    """End a key for good, at once."""
    client.call("DELETE", "tenants", tenant, "keys", name)
    gone = {"tenant": tenant, "key": name, "revoked": True}
    client.tell(gone, lambda _: typer.echo(f"{tenant}: {name} revoked"))


def _fields(
    models: str | None, entitlements: str | None, expires_at: str | None
) -> dict[str, object]:
    """The fields that were given."""
    lists = {"models": models, "entitlements": entitlements}
    found: dict[str, object] = {k: listed(v) for k, v in lists.items() if v is not None}
    return found if expires_at is None else {**found, "expires_at": expires_at}


def _limits(
    requests_per_minute: int | None, max_concurrency: int | None, budgets: list[str] | None
) -> dict[str, object]:
    """The limits that were given."""
    given = {"requests_per_minute": requests_per_minute, "max_concurrency": max_concurrency}
    found: dict[str, object] = {name: most for name, most in given.items() if most is not None}
    if budgets:
        found["budgets"] = [_budget(text) for text in budgets]
    return found


def _budget(text: str) -> dict[str, object]:
    """A budget written as `tokens=1000000,window=day`; the gateway checks its fields."""
    found: dict[str, object] = {}
    for part in text.split(","):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not (name and equals and value):
            stop(f"--budget {text}: give NAME=VALUE,NAME=VALUE, as in tokens=1000000,window=day", 2)
        found[name] = _number(value) if name in _NUMBERS else value
    return found


def _number(value: str) -> object:
    """The number that it spells; other text as it is, which the gateway refuses by its name."""
    with contextlib.suppress(ValueError):
        return int(value)
    with contextlib.suppress(ValueError):
        if math.isfinite(number := float(value)):
            return number
    return value


def _patch(client: AdminClient, tenant: str, name: str, body: dict[str, object]) -> None:
    client.tell(client.call("PATCH", "tenants", tenant, "keys", name, body=body), _show)


def _show(made: dict[str, Any]) -> None:
    """Print a key's row, and a new key alone on the last line."""
    console().print(card(made))
    if "key" in made:
        typer.echo("The key, shown this once:", err=True)
        typer.echo(made["key"])
