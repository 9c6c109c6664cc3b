"""`sluice tenant`: who holds keys and entitlements at a running gateway."""

from typing import Annotated, Any

import typer

from sluice.operate.admin_client import DEFAULT_URL, AdminClient, KeyFileOption, UrlOption
from sluice.operate.tables import card, key_table, tenant_table
from sluice.terminal import JsonOption, console, echo_json, stop

PAGE = 1_000
"""Tenants requested per page."""

tenant = typer.Typer(
    name="tenant",
    help="Tenants of a running gateway. Their keys: `sluice key`; rights: `sluice entitlement`.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

Name = Annotated[str, typer.Argument(help="The tenant.", show_default=False)]
DisplayName = Annotated[
    str | None, typer.Option("--display-name", help="Its name for people.", show_default=False)
]
Label = Annotated[
    list[str] | None, typer.Option("--label", help="A note of your own, as NAME=TEXT.")
]
Prefer = Annotated[
    str | None,
    typer.Option(
        "--entitlements",
        help="Those that its keys use, in order, as a,b. Absent: all of the tenant's.",
        show_default=False,
    ),
]


@tenant.command("list")
def list_(
    url: UrlOption = DEFAULT_URL,
    admin_key_file: KeyFileOption = None,
    as_json: JsonOption = False,
) -> None:
    """All tenants by name, those of the file included."""
    client = AdminClient(url, admin_key_file)
    params: dict[str, str | int] = {"limit": PAGE}
    found: list[dict[str, Any]] = []
    while True:
        page = client.call("GET", "tenants", params=params)
        found += page["data"]
        if page["next"] is None:
            break
        params["after"] = page["next"]
    if as_json:
        echo_json(found)
    else:
        console().print(tenant_table(found))


@tenant.command()
def show(
    name: Name,
    url: UrlOption = DEFAULT_URL,
    admin_key_file: KeyFileOption = None,
    as_json: JsonOption = False,
) -> None:
    """One tenant, and its keys by name and fingerprint."""
    found = AdminClient(url, admin_key_file).call("GET", "tenants", name)
    if as_json:
        echo_json(found)
        return
    keys = found.pop("keys")
    console().print(card(found))
    console().print(key_table(keys))


@tenant.command()
def create(
    name: Name,
    display_name: DisplayName = None,
    label: Label = None,
    entitlements: Prefer = None,
    url: UrlOption = DEFAULT_URL,
    admin_key_file: KeyFileOption = None,
    as_json: JsonOption = False,
) -> None:
    """Create a tenant; `sluice entitlement create` gives it rights, `sluice key add` keys."""
    body = {"name": name, **fields_of(display_name, label, entitlements)}
    _tell(AdminClient(url, admin_key_file).call("POST", "tenants", body=body), as_json)


@tenant.command()
def change(
    name: Name,
    display_name: DisplayName = None,
    label: Label = None,
    entitlements: Prefer = None,
    unset: Annotated[
        list[str] | None, typer.Option(help="Remove a field, such as `display-name`.")
    ] = None,
    url: UrlOption = DEFAULT_URL,
    admin_key_file: KeyFileOption = None,
    as_json: JsonOption = False,
) -> None:
    """Change a tenant, effective at once. `--label` replaces all labels."""
    body = {**fields_of(display_name, label, entitlements), **removed(unset)}
    if not body:
        stop("nothing to change: give an option, see --help", 2)
    _tell(AdminClient(url, admin_key_file).call("PATCH", "tenants", name, body=body), as_json)


@tenant.command()
def suspend(
    name: Name,
    url: UrlOption = DEFAULT_URL,
    admin_key_file: KeyFileOption = None,
    as_json: JsonOption = False,
) -> None:
    """Refuse all of its keys from now on; running requests finish."""
    body = {"suspended": True}
    _tell(AdminClient(url, admin_key_file).call("PATCH", "tenants", name, body=body), as_json)


@tenant.command()
def resume(
    name: Name,
    url: UrlOption = DEFAULT_URL,
    admin_key_file: KeyFileOption = None,
    as_json: JsonOption = False,
) -> None:
    """Admit its keys again."""
    body = {"suspended": False}
    _tell(AdminClient(url, admin_key_file).call("PATCH", "tenants", name, body=body), as_json)


@tenant.command()
def delete(
    name: Name,
    force: Annotated[
        bool, typer.Option("--force", help="Its entitlements and their keys, too.")
    ] = False,
    url: UrlOption = DEFAULT_URL,
    admin_key_file: KeyFileOption = None,
    as_json: JsonOption = False,
) -> None:
    """Delete a tenant and its keys. Refused while entitlements name it, except with `--force`."""
    params = {"force": "true"} if force else {}
    said = AdminClient(url, admin_key_file).call("DELETE", "tenants", name, params=params)
    if as_json:
        echo_json({"name": name, "deleted": True, **(said or {})})
    else:
        typer.echo(f"{name}: deleted")


def fields_of(
    display_name: str | None, labels: list[str] | None, entitlements: str | None
) -> dict[str, object]:
    """The fields that were given."""
    found: dict[str, object] = {}
    if display_name is not None:
        found["display_name"] = display_name
    if labels is not None:
        pairs = [label.partition("=") for label in labels]
        for name, equals, text in pairs:
            if not (name and equals and text):
                stop(f"--label {name}: give NAME=TEXT", 2)
        found["labels"] = {name: text for name, _, text in pairs}
    if entitlements is not None:
        found["entitlements"] = listed(entitlements)
    return found


def removed(unset: list[str] | None) -> dict[str, object]:
    """The fields to remove."""
    return {field.replace("-", "_"): None for field in unset or ()}


def listed(given: str) -> list[str]:
    """The names of `a,b`."""
    return [name.strip() for name in given.split(",") if name.strip()]


def _tell(found: dict[str, Any], as_json: bool) -> None:
    if as_json:
        echo_json(found)
    else:
        found.pop("keys", None)
        console().print(card(found))
