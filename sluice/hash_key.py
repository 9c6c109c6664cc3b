"""`sluice hash-key`: print the hash of an API key in the form that entitlements list it."""

import hashlib
import json
import secrets
import sys
from typing import Annotated

import typer

from sluice.terminal import JsonOption


def hash_key(
    key: Annotated[
        str | None, typer.Argument(help="The key; read from stdin when absent.", show_default=False)
    ] = None,
    new: Annotated[bool, typer.Option("--new", help="Make a new random key first.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Print `sha256:…` of an API key. An argument stays in the shell's history: prefer stdin."""
    if new and key is not None:
        _refuse("--new makes a key: give none")
    if new:
        key = "sk-" + secrets.token_urlsafe(32)
    elif key is None and sys.stdin.isatty():
        key = str(typer.prompt("key", hide_input=True, err=True))
    elif key is None:
        key = sys.stdin.readline().rstrip("\r\n")
    if not key or not all("!" <= char <= "~" for char in key):
        _refuse("a key is visible ASCII without blanks, at least one character")
    hashed = hashed_key(key)
    if as_json:
        typer.echo(json.dumps({"key": key, "hash": hashed} if new else {"hash": hashed}))
        return
    if new:
        typer.echo(key)
    typer.echo(hashed)


def hashed_key(key: str) -> str:
    """`sha256:` and the hex digest of the key's bytes."""
    return f"sha256:{hashlib.sha256(key.encode()).hexdigest()}"


def _refuse(message: str) -> None:
    typer.echo(message, err=True)
    raise typer.Exit(2)
