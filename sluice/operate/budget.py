"""`sluice budget`: what is used of budgets and of keys' limits, and more of one for its window."""

from typing import Annotated, Any

import typer

from sluice.fitted_table import fitted
from sluice.operate.admin_client import DEFAULT_URL, AdminClient, KeyFileOption, UrlOption
from sluice.terminal import JsonOption, console, echo_json

PAGE = 1_000
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
def list_(
    of: Annotated[
        str | None, typer.Option("--of", help="Only those whose id has this in it.")
    ] = None,
    url: UrlOption = DEFAULT_URL,
    admin_key_file: KeyFileOption = None,
    as_json: JsonOption = False,
) -> None:
    """All budgets and limits of keys, by id."""
    client = AdminClient(url, admin_key_file)
    params: dict[str, str | int] = {"limit": PAGE}
    found: list[dict[str, Any]] = []
    while True:
        page = client.call("GET", "budgets", params=params)
        found += [each for each in page["data"] if of is None or of in each["id"]]
        if page["next"] is None:
            break
        params["after"] = page["next"]
    if as_json:
        echo_json(found)
        return
    out = console()
    rows = [_row(each) for each in found]
    table, left_out = fitted(rows, _COLUMNS, out.width, drop=_LEFT_OUT_FIRST, right=_RIGHT)
    out.print(table)
    if left_out:
        typer.echo(f"left out for want of room: {', '.join(left_out)}", err=True)


@budget.command("raise")
def raise_(
    name: Annotated[str, typer.Argument(metavar="ID", help="As `sluice budget list` shows it.")],
    by: Annotated[
        float, typer.Option(help="Tokens, or units of the currency; below 0 takes away.")
    ],
    url: UrlOption = DEFAULT_URL,
    admin_key_file: KeyFileOption = None,
    as_json: JsonOption = False,
) -> None:
    """Add to a budget until its window ends."""
    amount = int(by) if by == int(by) else by
    client = AdminClient(url, admin_key_file)
    found = client.call("POST", "budgets", name, "raise", body={"by": amount})
    if as_json:
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
