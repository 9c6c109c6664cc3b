"""`sluice why`: the story of one request in sentences, from a gateway or a request log."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
import typer
from rich.markup import escape

from gateway.records.decision import DecisionRecord
from gateway.records.story import Step, steps_of
from sluice.operate.gateway_client import (
    DEFAULT_URL,
    GatewayClient,
    KeyFileOption,
    KeyOption,
    NotRead,
    UrlOption,
)
from sluice.terminal import JsonOption, console, echo_json, stop, table

_REFUSED: Final = frozenset({401, 403, 404})
"""After these another route may have the answer: a tenant's key opens only its own."""


def why(
    request_id: Annotated[str, typer.Argument(help="As in x-request-id.", show_default=False)],
    url: UrlOption = DEFAULT_URL,
    key: KeyOption = None,
    admin_key_file: KeyFileOption = None,
    log: Annotated[
        Path | None,
        typer.Option("--log", help="Read a request log, no gateway.", show_default=False),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Why a request went as it did: every decision, its reason and its time."""
    if log is None:
        found = _asked(GatewayClient(url, key, admin_key_file), request_id)
    else:
        found = _logged(log, request_id)
    try:
        steps = steps_of(msgspec.convert(found, DecisionRecord))
    except msgspec.ValidationError as error:
        stop(f"this record is of another version: {error}", 1)
    if as_json:
        echo_json({"steps": [msgspec.to_builtins(step) for step in steps], "record": found})
        return
    shown = table("step", "time", "", right=frozenset({"time"}))
    shown.columns[2].overflow = "fold"
    for step in steps:
        shown.add_row(step.name, _time(step), escape(step.text))
    console().print(shown)


def _asked(client: GatewayClient, request_id: str) -> Mapping[str, Any]:
    """The record as the presented key may see it: an operator's view, or else a tenant's."""
    routes = [("admin", "decisions"), ("v1", "sluice", "decisions")]
    if not client.key:
        routes = [("dashboard", "decisions")]
    problem = NotRead("")
    for route in routes:
        try:
            found: Mapping[str, Any] = client.get(*route, request_id)
        except NotRead as error:
            # What the route of an accepted key says counts more than that another is closed.
            if not problem.status or error.status == 404:
                problem = error
            if error.status not in _REFUSED:
                break
        else:
            record: Mapping[str, Any] = found.get("record", found)
            return record
    return client.give_up(problem)


def _logged(log: Path, request_id: str) -> Mapping[str, Any]:
    """The last record of a request in a log."""
    found: Mapping[str, Any] | None = None
    try:
        with log.open(encoding="utf-8") as lines:
            for line in lines:
                if request_id in line:
                    record = json.loads(line)
                    found = record if record.get("request_id") == request_id else found
    except (OSError, ValueError) as error:
        stop(f"{log}: {error}", 2)
    if found is None:
        stop(f"{log}: no request with the id '{request_id}'", 2)
    return found


def _time(step: Step) -> str:
    if step.duration_ms is None:
        return "-"
    ms = step.start_ms or 0.0 if step.name == "settle" else step.duration_ms
    return f"{ms / 1000:.2f} s" if ms >= 1000 else f"{ms:.1f} ms"
