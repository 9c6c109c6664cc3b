"""`sluice me`: what a client's own key opens, its limits and what is used of them."""

import os
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Final

import typer
from rich.markup import escape

from sluice.operate.admin_client import DEFAULT_URL, UrlOption
from sluice.operate.gateway_client import GatewayClient, NotRead
from sluice.terminal import JsonOption, console, echo_json, stop, table

_PAGE: Final = "1000"
VARIABLE: Final = "SLUICE_API_KEY"


def me(
    url: UrlOption = DEFAULT_URL,
    key: Annotated[
        str | None,
        typer.Option(
            help=f"Your key, which users of this machine can see here; rather set ${VARIABLE}.",
            show_default=False,
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Your own key at a gateway: its models, limits, use and refusals."""
    own = key or os.environ.get(VARIABLE, "")
    if not own:
        stop(f"no key: set ${VARIABLE} to the key that your requests are sent with", 2)
    client = GatewayClient(url, own, None)
    try:
        found = client.get("v1", "sluice", "me", params={"limit": _PAGE})
        while found.get("next"):
            more = client.get("v1", "sluice", "me", params={"limit": _PAGE, "after": found["next"]})
            found["entitlements"] += more["entitlements"]
            found["next"] = more["next"]
    except NotRead as error:
        if error.status == 401:
            stop(
                f"{client.url} does not know this key. It wants the key that your requests are "
                "sent with; an administrator's opens `sluice top` and `sluice workers`",
                2,
            )
        client.give_up(error)
    if as_json:
        echo_json(found)
        return
    shown = table("", "", "used", "of", "note", right=frozenset({"used", "of"}))
    for row in _rows(found):
        shown.add_row(*map(escape, row))
    console().print(shown)


Row = tuple[str, str, str, str, str]


def _rows(found: Mapping[str, Any]) -> Iterator[Row]:
    entitlements = found.get("entitlements")
    yield "tenant", found["tenant"], "", "", f"key {found['key']}" if found.get("key") else ""
    told = set()
    for one in [found] if entitlements is None else entitlements:
        yield from _entitlement(one)
        for limit in one.get("limits", ()):
            if limit["id"] not in told:
                told.add(limit["id"])
                yield _limit(limit)


def _entitlement(one: Mapping[str, Any]) -> Iterator[Row]:
    terms, usage = one.get("terms") or {}, one.get("usage") or {}
    yield one["entitlement"], f"model {one['model'] or 'any'}", "", "", one.get("state") or ""
    running = usage.get("in_flight")
    most = terms.get("max_concurrency") or terms.get("concurrency")
    if running is not None:
        of = sum(most.values()) if isinstance(most, Mapping) else most
        yield "", "requests running", f"{sum(running.values()):,}", _number(of), ""
        yield "", "tokens charged", f"{usage['used_tokens']:,}", "", "of no window"
    if terms.get("tokens_per_second") is not None:
        yield "", "tokens/s", "", f"{terms['tokens_per_second']:,.0f}", ""
    if usage.get("bucket_tokens") is not None:
        depth = _number(usage["bucket_depth_tokens"])
        yield "", "tokens at hand", f"{usage['bucket_tokens']:,.0f}", depth, "left of the burst"
    for reason, count in one["refused"].items():
        yield "", "refused", f"{count:,}", "", reason


def _limit(limit: Mapping[str, Any]) -> Row:
    window = f" per {limit['window']}" if limit["window"] else ""
    until = f"anew at {limit['resets_at']}" if limit["resets_at"] else ""
    of = f"{limit['scope']} {limit['name']}"
    return of, f"{limit['unit']}{window}", _number(limit["used"]), _number(limit["amount"]), until


def _number(value: float | str | None) -> str:
    return value if isinstance(value, str) else "" if value is None else f"{value:,.0f}"
