"""`sluice tenant`: who holds keys and entitlements at a running gateway."""

from typing import Annotated, Any

import typer

from sluice.operate.admin_client import AdminClient, connected
from sluice.operate.tables import card, key_table, tenant_table
from sluice.terminal import console, stop

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
@connected
def list_(
    client: AdminClient,
) -> None:
    """All tenants by name, those of the file included."""
    client.tell(client.rows("tenants"), lambda rows: console().print(tenant_table(rows)))


@tenant.command()
@connected
def show(
    client: AdminClient,
    name: Name,
) -> None:
    """One tenant, and its keys by name and fingerprint."""
    found = client.call("GET", "tenants", name)
    client.tell(found, _show)
    if not client.as_json:
        console().print(key_table(found["keys"]))


@tenant.command()
@connected
def create(
    client: AdminClient,
    name: Name,
    display_name: DisplayName = None,
    label: Label = None,
    entitlements: Prefer = None,
) -> None:
    """Create a tenant; `sluice entitlement create` gives it rights, `sluice key add` keys."""
    body = {"name": name, **fields_of(display_name, label, entitlements)}
    client.tell(client.call("POST", "tenants", body=body), _show)


@tenant.command()
@connected
def change(
    client: AdminClient,
    name: Name,
    display_name: DisplayName = None,
    label: Label = None,
    entitlements: Prefer = None,
    unset: Annotated[
        list[str] | None, typer.Option(help="Remove a field, such as `display-name`.")
    ] = None,
) -> None:
    """Change a tenant, effective at once. `--label` replaces all labels."""
    body = {**fields_of(display_name, label, entitlements), **removed(unset)}
    if not body:
        stop("nothing to change: give an option, see --help", 2)
    client.tell(client.call("PATCH", "tenants", name, body=body), _show)


@tenant.command()
@connected
def suspend(
    client: AdminClient,
    name: Name,
) -> None:
    """Refuse all of its keys from now on; running requests finish."""
    body = {"suspended": True}
    client.tell(client.call("PATCH", "tenants", name, body=body), _show)


@tenant.command()
@connected
def resume(
    client: AdminClient,
    name: Name,
) -> None:
    """Admit its keys again."""
    body = {"suspended": False}
    client.tell(client.call("PATCH", "tenants", name, body=body), _show)


@tenant.command()
@connected
def delete(
    client: AdminClient,
    name: Name,
    force: Annotated[
        bool, typer.Option("--force", help="Its entitlements and their keys, too.")
    ] = False,
) -> None:
    """Delete a tenant and its keys. Refused while entitlements name it, except with `--force`."""
    params = {"force": "true"} if force else {}
    said = client.call("DELETE", "tenants", name, params=params)
    gone = {"name": name, "deleted": True, **(said or {})}
    client.tell(gone, lambda _: typer.echo(f"{name}: deleted"))


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


def _show(found: dict[str, Any]) -> None:
    console().print(card({name: value for name, value in found.items() if name != "keys"}))
