"""`sluice workers`, `drain`, `undrain`, `reload`: what an operator does to a running gateway."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.markup import escape

from sluice.operate.admin_client import AdminClient, connected
from sluice.operate.tables import echo_changes
from sluice.terminal import console, echo_json, table

_ORDER: Final = ("down", "ejected", "draining", "up")
"""Of states: what needs somebody comes first."""
WorkerArgument = Annotated[
    str, typer.Argument(help="As `sluice workers` lists it.", show_default=False)
]


@connected
def workers(
    client: AdminClient,
) -> None:
    """Workers of a gateway: those that are out first, each with its cause."""
    found = list(_rows(client.call("GET", "pools")))
    found.sort(key=lambda row: (_ORDER.index(row["state"]), row["model"], row["worker"]))
    if client.as_json:
        echo_json(found)
        return
    shown = table("worker", "model", "pool", "state", "running", "cause")
    for row in found:
        shown.add_row(*(escape(str(row[name])) for name in row))
    console().print(shown)


@connected
def drain(
    client: AdminClient,
    worker: WorkerArgument,
    wait: Annotated[
        bool, typer.Option("--wait", help="Return once it serves nothing, on all replicas.")
    ] = False,
    timeout_s: Annotated[
        float, typer.Option(min=1, max=3600, help="The longest wait; then exit code 1.")
    ] = 600.0,
) -> None:
    """Take a worker out of the rotation; requests that run there finish."""
    params = {"wait": "true", "timeout_s": str(timeout_s)} if wait else {}
    found = _drain(client, worker, params)
    running = found.get("running")
    if client.as_json:
        echo_json(found)
    else:
        left = "" if running is None else f"; {running} requests still run there"
        typer.echo(f"{worker} gets no new requests{left}. Back with: sluice undrain {worker}")
    if running:
        raise typer.Exit(1)


@connected
def undrain(
    client: AdminClient,
    worker: WorkerArgument,
) -> None:
    """Return a drained worker to the rotation."""
    found = _drain(client, worker, {"undo": "true"})
    client.tell(found, lambda _: typer.echo(f"{worker} is in the rotation again, once it is ready"))


@connected
def reload(
    client: AdminClient,
    proof: Annotated[
        Path | None,
        typer.Option(
            exists=True, dir_okay=False, help="Attach what `sluice prove --out` wrote of that file."
        ),
    ] = None,
) -> None:
    """Have a gateway read its file anew; exit 2 and no change where the file is bad.

    With a proof of another file exit 1, and no change.
    """
    if proof is None:
        found = client.call("POST", "reload")
    else:
        content = proof.read_bytes()
        found = client.call("POST", "reload", params={"proof": "true"}, content=content)
    client.tell(found, lambda told: echo_changes(told["changes"], "nothing changed"))
    if proof is not None and not client.as_json:
        typer.echo("the proof is attached")


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
