"""`sluice key`: the keys of tenants at a running gateway."""

import contextlib
import math
from typing import Annotated, Any, Final

import typer

from sluice.operate.admin_client import DEFAULT_URL, AdminClient, KeyFileOption, UrlOption
from sluice.operate.tables import card, key_table
from sluice.operate.tenant import listed, removed
from sluice.terminal import JsonOption, console, echo_json, stop

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
def list_(
    tenant: Tenant,
    url: UrlOption = DEFAULT_URL,
    admin_key_file: KeyFileOption = None,
    as_json: JsonOption = False,
) -> None:
    """A tenant's keys by name and fingerprint."""
    found = AdminClient(url, admin_key_file).call("GET", "tenants", tenant)["keys"]
    if as_json:
        echo_json(found)
    else:
        console().print(key_table(found))


@key.command()
def add(
    tenant: Tenant,
    name: Annotated[str, typer.Argument(help="The key's name.", show_default=False)],
    models: Models = None,
    entitlements: Entitlements = None,
    expires_at: Expires = None,
    requests_per_minute: PerMinute = None,
    max_concurrency: AtOnce = None,
    budget: Budgets = None,
    sha256: Hash = None,
    url: UrlOption = DEFAULT_URL,
    admin_key_file: KeyFileOption = None,
    as_json: JsonOption = False,
) -> None:
    """Add a key. Prints it; it is shown only once."""
    body = {
        "name": name,
        **_fields(models, entitlements, expires_at),
        **_limits(requests_per_minute, max_concurrency, budget),
    }
    if sha256 is not None:
        body["sha256"] = sha256
    client = AdminClient(url, admin_key_file)
    _tell(client.call("POST", "tenants", tenant, "keys", body=body), as_json)


@key.command()
def change(
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
    url: UrlOption = DEFAULT_URL,
    admin_key_file: KeyFileOption = None,
    as_json: JsonOption = False,
) -> None:
    """Change a key, effective at once. Fields that are not named stay."""
    body = {
        **_fields(models, entitlements, expires_at),
        **_limits(requests_per_minute, max_concurrency, budget),
        **removed(unset),
    }
    if not body:
        stop("nothing to change: give an option, see --help", 2)
    _patch(AdminClient(url, admin_key_file), tenant, name, body, as_json)


@key.command()
def rotate(
    tenant: Tenant,
    name: Key,
    grace: Annotated[
        float, typer.Option("--grace-s", help="Seconds that the old key still opens; 0 for none.")
    ] = 86_400.0,
    sha256: Hash = None,
    url: UrlOption = DEFAULT_URL,
    admin_key_file: KeyFileOption = None,
    as_json: JsonOption = False,
) -> None:
    """Give a key a new value. Prints it; the old one opens a while longer."""
    body: dict[str, object] = {"grace_s": grace}
    if sha256 is not None:
        body["sha256"] = sha256
    client = AdminClient(url, admin_key_file)
    _tell(client.call("POST", "tenants", tenant, "keys", name, "rotate", body=body), as_json)


@key.command()
def suspend(
    tenant: Tenant,
    name: Key,
    url: UrlOption = DEFAULT_URL,
    admin_key_file: KeyFileOption = None,
    as_json: JsonOption = False,
) -> None:
    """Refuse a key from now on; running requests finish."""
    _patch(AdminClient(url, admin_key_file), tenant, name, {"suspended": True}, as_json)


@key.command()
def resume(
    tenant: Tenant,
    name: Key,
    url: UrlOption = DEFAULT_URL,
    admin_key_file: KeyFileOption = None,
    as_json: JsonOption = False,
) -> None:
    """Admit a key again."""
    _patch(AdminClient(url, admin_key_file), tenant, name, {"suspended": False}, as_json)


@key.command()
def expire(
    tenant: Tenant,
    name: Key,
    at: Annotated[str, typer.Option(help="When, as 2030-12-31T23:59:59Z.", show_default=False)],
    url: UrlOption = DEFAULT_URL,
    admin_key_file: KeyFileOption = None,
    as_json: JsonOption = False,
) -> None:
    """End a key at a time. To end it now, revoke it."""
    _patch(AdminClient(url, admin_key_file), tenant, name, {"expires_at": at}, as_json)


@key.command()
def revoke(
    tenant: Tenant,
    name: Key,
    url: UrlOption = DEFAULT_URL,
    admin_key_file: KeyFileOption = None,
    as_json: JsonOption = False,
) -> None:
    """End a key for good, at once."""
    AdminClient(url, admin_key_file).call("DELETE", "tenants", tenant, "keys", name)
    if as_json:
        echo_json({"tenant": tenant, "key": name, "revoked": True})
    else:
        typer.echo(f"{tenant}: {name} revoked")


def _fields(
    models: str | None, entitlements: str | None, expires_at: str | None
) -> dict[str, object]:
    """The fields that were given."""
    found: dict[str, object] = {}
    if models is not None:
        found["models"] = listed(models)
    if entitlements is not None:
        found["entitlements"] = listed(entitlements)
    if expires_at is not None:
        found["expires_at"] = expires_at
    return found


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


def _patch(
    client: AdminClient, tenant: str, name: str, body: dict[str, object], as_json: bool
) -> None:
    _tell(client.call("PATCH", "tenants", tenant, "keys", name, body=body), as_json)


def _tell(made: dict[str, Any], as_json: bool) -> None:
    """Print a key's row, and a new key alone on the last line."""
    if as_json:
        echo_json(made)
        return
    console().print(card(made))
    if "key" in made:
        typer.echo("The key, shown this once:", err=True)
        typer.echo(made["key"])
