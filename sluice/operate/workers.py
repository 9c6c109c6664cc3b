"""`sluice workers`, `drain`, `undrain`, `reload`: what an operator does to a running gateway."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Final

import typer
from rich.markup import escape

from sluice.operate.admin_client import DEFAULT_URL, AdminClient, KeyFileOption, UrlOption
from sluice.operate.tables import echo_changes
from sluice.terminal import JsonOption, console, echo_json, table

_ORDER: Final = ("down", "ejected", "draining", "up")
"""Of states: what needs somebody comes first."""
WorkerArgument = Annotated[
    str, typer.Argument(help="As `sluice workers` lists it.", show_default=False)
]


def workers(
    url: UrlOption = DEFAULT_URL,
    admin_key_file: KeyFileOption = None,
    as_json: JsonOption = False,
) -> None:
    """Workers of a gateway: those that are out first, each with its cause."""
    found = list(_rows(AdminClient(url, admin_key_file).call("GET", "pools")))
    found.sort(key=lambda row: (_ORDER.index(row["state"]), row["model"], row["worker"]))
    if as_json:
        echo_json(found)
        return
    shown = table("worker", "model", "pool", "state", "running", "cause")
    for row in found:
        shown.add_row(*(escape(str(row[name])) for name in row))
    console().print(shown)


def drain(
    worker: WorkerArgument,
    wait: Annotated[
        bool, typer.Option("--wait", help="Return once it serves nothing, on all replicas.")
    ] = False,
    timeout_s: Annotated[
        float, typer.Option(min=1, max=3600, help="The longest wait; then exit code 1.")
    ] = 600.0,
    url: UrlOption = DEFAULT_URL,
    admin_key_file: KeyFileOption = None,
    as_json: JsonOption = False,
) -> None:
    """Take a worker out of the rotation; requests that run there finish."""
    params = {"wait": "true", "timeout_s": str(timeout_s)} if wait else {}
    found = _drain(AdminClient(url, admin_key_file), worker, params)
    running = found.get("running")
    if as_json:
        echo_json(found)
    else:
        left = "" if running is None else f"; {running} requests still run there"
        typer.echo(f"{worker} gets no new requests{left}. Back with: sluice undrain {worker}")
    if running:
        raise typer.Exit(1)


def undrain(
    worker: WorkerArgument,
    url: UrlOption = DEFAULT_URL,
    admin_key_file: KeyFileOption = None,
    as_json: JsonOption = False,
) -> None:
    """Return a drained worker to the rotation."""
    found = _drain(AdminClient(url, admin_key_file), worker, {"undo": "true"})
    if as_json:
        echo_json(found)
    else:
        typer.echo(f"{worker} is in the rotation again, once it is ready")


def reload(
    url: UrlOption = DEFAULT_URL,
    admin_key_file: KeyFileOption = None,
    as_json: JsonOption = False,
) -> None:
    """Have a gateway read its file anew; exit 2 and no change where the file is bad."""
    found = AdminClient(url, admin_key_file).call("POST", "reload")
    if as_json:
        echo_json(found)
    else:
        echo_changes(found["changes"], "nothing changed")


def _drain(client: AdminClient, worker: str, params: Mapping[str, str]) -> dict[str, Any]:
    limit_s = float(params.get("timeout_s", 0)) + 30
    found: dict[str, Any] = client.call(
        "POST", "workers", worker, "drain", params=params, limit_s=limit_s
    )
    return found


def _rows(models: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for model in models:
        for pool in model["pools"]:
            for worker in pool["workers"]:
                yield {
                    "worker": worker["id"],
                    "model": model["model"],
                    "pool": pool["name"],
                    "state": _state(worker),
                    "running": worker["active_sequences"],
                    "cause": _cause(worker),
                }


def _state(worker: Mapping[str, Any]) -> str:
    if worker["draining"]:
        return "draining"
    if not worker["up"]:
        return "down"
    return "ejected" if worker["ejected_for_s"] > 0 else "up"


def _cause(worker: Mapping[str, Any]) -> str:
    if worker["not_ready"]:
        return str(worker["not_ready"])
    if worker["ejected_for_s"] > 0:
        return f"it failed or asked for a pause; tried again in {worker['ejected_for_s']:.0f} s"
    return str(worker["remark"] or "")
