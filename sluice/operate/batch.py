"""`sluice batch`: send a file of requests, follow it, and fetch what came of it."""

import json
import os
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Final

import typer
from rich.markup import escape

from sluice.operate.admin_client import DEFAULT_URL, UrlOption
from sluice.operate.gateway_client import GatewayClient, NotRead
from sluice.operate.me import VARIABLE
from sluice.terminal import JsonOption, console, echo_json, progress_bar, refuse, stop, table

POLL_S: Final = 2.0
_PAGE: Final = "100"
_ENDED: Final = frozenset({"completed", "failed", "expired", "cancelled"})

batch = typer.Typer(
    name="batch",
    help=f"Batches of a running gateway: yours, by the key in ${VARIABLE}.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
IdArgument = Annotated[str, typer.Argument(metavar="ID", help="As `sluice batch list` shows it.")]


@batch.command()
def submit(
    file: Annotated[
        Path, typer.Argument(exists=True, dir_okay=False, help="Requests, one a line.")
    ],
    window: Annotated[str, typer.Option(help="Time for all of it: 90m, 24h, 7d.")] = "24h",
    accept_late: Annotated[
        bool, typer.Option("--accept-late", help="Take it also where no end can be promised.")
    ] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Follow it to its end.")] = False,
    url: UrlOption = DEFAULT_URL,
    as_json: JsonOption = False,
) -> None:
    """Upload a file of requests and have it run; tells when it will probably have ended."""
    client = _client(url)
    with file.open("rb") as opened:
        endpoint = _endpoint(opened, file)
        with progress_bar() as progress:
            shown = progress.wrap_file(opened, file.stat().st_size, description="uploading")
            form: dict[str, Any] = {
                "data": {"purpose": "batch"},
                "files": {"file": (file.name, shown)},
            }
            stored = _asked(client, "POST", "files", timeout=None, **form)
    asked = {
        "input_file_id": stored["id"],
        "endpoint": endpoint,
        "completion_window": window,
        "sluice": {"accept_late": accept_late},
    }
    made = _asked(client, "POST", "batches", json=asked)
    if not as_json:
        _tell(made)
    if watch and made["status"] not in _ENDED:
        made = _followed(client, made["id"])
        if not as_json:
            _tell(made)
    if as_json:
        echo_json(made)
    _exit(made)


@batch.command("list")
def list_(url: UrlOption = DEFAULT_URL, as_json: JsonOption = False) -> None:
    """Your batches, newest first."""
    client, params = _client(url), {"limit": _PAGE}
    rows: list[dict[str, Any]] = []
    while True:
        page = _asked(client, "GET", "batches", params=params)
        rows += page["data"]
        if not page["has_more"]:
            break
        params["after"] = page["last_id"]
    if as_json:
        echo_json(rows)
        return
    shown = table("batch", "model", "status", "done", "of", "end", right=frozenset({"done", "of"}))
    for row in rows:
        counts = row["request_counts"]
        done, total = f"{counts['completed'] + counts['failed']:,}", f"{counts['total']:,}"
        cells = (row["id"], row["model"] or "", row["status"], done, total, _ends(row))
        shown.add_row(*map(escape, cells))
    console().print(shown)


@batch.command()
def watch(name: IdArgument, url: UrlOption = DEFAULT_URL, as_json: JsonOption = False) -> None:
    """Follow a batch to its end, with the time left; Ctrl-C leaves it running."""
    made = _followed(_client(url), name)
    if as_json:
        echo_json(made)
    else:
        _tell(made)
    _exit(made)


@batch.command()
def cancel(name: IdArgument, url: UrlOption = DEFAULT_URL, as_json: JsonOption = False) -> None:
    """End a batch; what it has done stays."""
    made = _asked(_client(url), "POST", "batches", name, "cancel")
    if as_json:
        echo_json(made)
    else:
        _tell(made)


@batch.command()
def fetch(
    name: IdArgument,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File for the answers; ID_output.jsonl.")
    ] = None,
    errors: Annotated[
        Path | None, typer.Option("--errors", help="File for the others; ID_error.jsonl.")
    ] = None,
    url: UrlOption = DEFAULT_URL,
    as_json: JsonOption = False,
) -> None:
    """Download what came of a batch that has ended."""
    client = _client(url)
    made = _asked(client, "GET", "batches", name)
    if made["status"] not in _ENDED:
        stop(f"{name} is {made['status']}: `sluice batch watch {name}` waits for its end", 1)
    written: dict[str, str] = {}
    wanted = (("output", output), ("error", errors))
    for kind, path in wanted:
        if (file := made[f"{kind}_file_id"]) is not None:
            target = path or Path(f"{made['id']}_{kind}.jsonl")
            _download(client, file, target)
            written[kind] = str(target)
    if as_json:
        echo_json(written)
    else:
        typer.echo("\n".join(f"{kind}: {path}" for kind, path in written.items()) or "no output")


def _client(url: str) -> GatewayClient:
    key = os.environ.get(VARIABLE, "")
    return GatewayClient(url, key, None)


def _asked(client: GatewayClient, method: str, *path: str, **more: Any) -> Any:
    try:
        return client.call(method, "v1", *path, **more)
    except NotRead as error:
        if error.status == 401:
            stop(f"{client.url} does not know this key: set ${VARIABLE} to your own", 2)
        stop(str(error), 2 if 400 <= error.status < 500 else 1)


def _endpoint(opened: BinaryIO, file: Path) -> str:
    """The path that the first request names; the file is then read from its start again."""
    first = next((line for line in opened if line.strip()), b"")
    opened.seek(0)
    try:
        return str(json.loads(first)["url"])
    except (ValueError, TypeError, KeyError):
        fix = 'write {"custom_id": "1", "method": "POST", "url": "/v1/...", "body": {...}}'
        refuse(f"{file}: its first line is not a request of a batch", fix)


def _followed(client: GatewayClient, name: str) -> dict[str, Any]:
    with progress_bar() as progress:
        task = progress.add_task(name, total=None)
        while True:
            made: dict[str, Any] = _asked(client, "GET", "batches", name)
            counts = made["request_counts"]
            progress.update(
                task,
                description=made["status"],
                total=counts["total"] or None,
                completed=counts["completed"] + counts["failed"],
            )
            if made["status"] in _ENDED:
                return made
            time.sleep(POLL_S)


def _tell(made: dict[str, Any]) -> None:
    counts, own = made["request_counts"], made["sluice"]
    done = f"{counts['completed']:,} answered, {counts['failed']:,} failed of {counts['total']:,}"
    typer.echo(f"{made['id']}: {made['status']}, {done}")
    if made["status"] not in _ENDED:
        typer.echo(_ends(made))
    if own["message"]:
        typer.echo(own["message"])
    for problem in (made["errors"] or {}).get("data", ()):
        where = "the file" if problem.get("line") is None else f"line {problem['line']}"
        typer.echo(f"{where}: {problem['message']} ({problem['code']})")


def _ends(made: dict[str, Any]) -> str:
    own, status = made["sluice"], made["status"]
    if status in _ENDED:
        return f"{status} {datetime.fromtimestamp(made[f'{status}_at'], UTC).isoformat()}"
    for name, words in (("promised_by", "promised by"), ("finish_p95", "expected by")):
        if own[name]:
            return f"{words} {own[name]}"
    until = datetime.fromtimestamp(made["expires_at"], UTC).isoformat()
    return f"unpromised, expires {until}"


def _download(client: GatewayClient, file: str, target: Path) -> None:
    part = target.with_name(f"{target.name}.part")
    try:
        with part.open("wb") as opened:
            for piece in _pieces(client, file):
                opened.write(piece)
        part.replace(target)
    except OSError as error:
        stop(f"{target}: {error.strerror}", 1)


def _pieces(client: GatewayClient, file: str) -> Iterator[bytes]:
    try:
        yield from client.pieces("v1", "files", file, "content")
    except NotRead as error:
        stop(str(error), 1)


def _exit(made: dict[str, Any]) -> None:
    if made["status"] in {"failed", "expired"}:
        raise typer.Exit(1)
