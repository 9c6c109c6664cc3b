"""`sluice budget`: what is used of budgets and of keys' limits, and more of one for its window."""

from typing import Annotated, Any

import typer

from sluice.fitted_table import fitted
from sluice.operate.admin_client import AdminClient, connected
from sluice.terminal import console, echo_json

_COLUMNS = ("id", "used", "reserved", "amount", "added", "unit", "resets at")
_RIGHT = frozenset({"used", "reserved", "amount", "added"})
_LEFT_OUT_FIRST = ("added", "reserved", "resets at")

budget = typer.Typer(
    name="budget",
    help="Budgets and limits of keys of a running gateway.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


@budget.command("list")
@connected
def list_(
    client: AdminClient,
    of: Annotated[
        str | None, typer.Option("--of", help="Only those whose id has this in it.")
    ] = None,
) -> None:
    """All budgets and limits of keys, by id."""
    found = [each for each in client.rows("budgets") if of is None or of in each["id"]]
    if client.as_json:
        echo_json(found)
        return
    out = console()
    rows = [_row(each) for each in found]
    table, left_out = fitted(rows, _COLUMNS, out.width, drop=_LEFT_OUT_FIRST, right=_RIGHT)
    out.print(table)
    if left_out:
        typer.echo(f"left out for want of room: {', '.join(left_out)}", err=True)


@budget.command("raise")
@connected
def raise_(
    client: AdminClient,
    name: Annotated[str, typer.Argument(metavar="ID", help="As `sluice budget list` shows it.")],
    by: Annotated[
        float, typer.Option(help="Tokens, or units of the currency; below 0 takes away.")
    ],
) -> None:
    """Add to a budget until its window ends."""
    amount = int(by) if by == int(by) else by
    found = client.call("POST", "budgets", name, "raise", body={"by": amount})
    if client.as_json:
        echo_json(found)
        return
    typer.echo(
        f"{name}: {found['amount']} and {found['added']} more until {found['resets_at']}, "
        f"{found['used']} used"
    )


def _row(found: dict[str, Any]) -> dict[str, str]:
    shown = {name: str(found[name]) for name in ("id", "used", "reserved", "amount", "unit")}
    added = str(found["added"]) if float(found["added"]) else ""
    return {**shown, "added": added, "resets at": found["resets_at"] or ""}
