"""The admin API of a running gateway, for the verbs of tenants, keys and entitlements.

Exit codes: 1 when the gateway could not be reached or failed, 2 when it refused the request
(400, 404) or the key. The admin key is never an argument: every user of the machine can see
arguments.
"""

import functools
import inspect
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, NoReturn
from urllib.parse import quote

import typer

from sluice.terminal import JsonOption, echo_json, stop

DEFAULT_URL: Final = "http://127.0.0.1:8080"
URL_VARIABLE: Final = "SLUICE_URL"
KEY_VARIABLE: Final = "SLUICE_ADMIN_KEY"
LIMIT_S: Final = 30.0
PAGE: Final = 1_000
"""Rows requested per page."""
_BAD_INPUT: Final = frozenset({400, 401, 403, 404, 413})
_INSTEAD: Final = {
    "entitlement_not_found": "`sluice entitlement list` shows those that there are.",
    "worker_not_found": "`sluice workers` lists them.",
    "entitlement_exists": "`sluice entitlement change` gives it other terms.",
    "tenant_not_found": "`sluice tenant list` shows those that there are; the verbs of "
    "entitlements are `sluice entitlement VERB NAME`.",
    "tenant_exists": "`sluice tenant change` changes it.",
}
"""Error code -> hint for the command line; the gateway's own hint names an HTTP route."""

UrlOption = Annotated[
    str,
    typer.Option(
        "--url", envvar=URL_VARIABLE, help="The gateway: its management port where it has one."
    ),
]
KeyFileOption = Annotated[
    Path | None,
    typer.Option(
        "--admin-key-file",
        help=f"File with the admin key; without it ${KEY_VARIABLE}.",
        show_default=False,
    ),
]


class AdminClient:
    """Calls the gateway; every failure ends the command with a message and an exit code."""

    def __init__(self, url: str, key_file: Path | None, *, as_json: bool = False) -> None:
        """Read the key; nothing is sent yet."""
        self.as_json = as_json
        self._url = url.rstrip("/")
        self._source = f"${KEY_VARIABLE}" if key_file is None else str(key_file)
        self._headers = {"authorization": f"Bearer {_admin_key(key_file)}"}

    def call(
        self,
        method: str,
        *path: str,
        params: Mapping[str, str | int] | None = None,
        body: Mapping[str, object] | None = None,
        content: bytes | None = None,
        limit_s: float = LIMIT_S,
    ) -> Any:
        """Call `path` below /admin (one part each, unquoted); returns JSON, or None if empty.

        `content` is sent as it is, in place of a `body`.
        """
        import httpx

        where = "/".join(quote(part, safe="") for part in ("admin", *path))
        try:
            # No proxies and no .netrc from the environment: the key goes to the gateway alone.
            with httpx.Client(timeout=limit_s, trust_env=False) as client:
                answer = client.request(
                    method,
                    f"{self._url}/{where}",
                    params=params,
                    json=body,
                    content=content,
                    headers=self._headers,
                )
        except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
            stop(f"--url {self._url}: {error}", 2)
        except httpx.HTTPError as error:
            stop(f"{self._url}: {error}", 1)
        try:
            found = answer.json() if answer.content else None
        except ValueError:
            stop(f"{self._url}: {answer.status_code}, not JSON: is this a gateway?", 1)
        if not answer.is_success:
            self._refused(answer.status_code, found)
        if isinstance(found, dict) and (warning := found.get("warning")):
            typer.echo(f"warning: {warning}", err=True)
        return found

    def rows(self, *path: str, **only: str | None) -> list[dict[str, Any]]:
        """Every row of a list, page by page."""
        params: dict[str, str | int] = {"limit": PAGE}
        params |= {name: value for name, value in only.items() if value is not None}
        found: list[dict[str, Any]] = []
        while True:
            page = self.call("GET", *path, params=params)
            found += page["data"]
            if page["next"] is None:
                return found
            params["after"] = page["next"]

    def tell(self, found: Any, show: Callable[[Any], None]) -> None:
        """Print an answer: as JSON where the command was asked for it, else as `show` does."""
        if self.as_json:
            echo_json(found)
        else:
            show(found)

    def _refused(self, status: int, found: object) -> NoReturn:
        """Phrase a refusal for the command line; the gateway's message addresses API clients."""
        error = found.get("error") if isinstance(found, dict) else None
        reported = error if isinstance(error, dict) else {}
        problem = str(reported.get("message") or f"{self._url}: {status}")
        reason = str(reported.get("code"))
        if status == 401:
            problem = f"the gateway refuses the admin key of {self._source}"
        elif reason in _INSTEAD:
            problem = f"{problem.partition('. ')[0]}. {_INSTEAD[reason]}"
        stop(problem, 2 if status in _BAD_INPUT else 1, reason=reason)


def _admin_key(key_file: Path | None) -> str:
    if key_file is None:
        key = os.environ.get(KEY_VARIABLE, "")
        source = f"${KEY_VARIABLE}"
    else:
        source = str(key_file)
        try:
            key = key_file.read_text(encoding="utf-8").strip()
        except (OSError, ValueError) as error:
            stop(f"{key_file}: {error}", 2)
    if not key:
        stop(f"no admin key: set ${KEY_VARIABLE} or give --admin-key-file", 2)
    if not all("!" <= char <= "~" for char in key):
        stop(f"{source}: a key is visible ASCII without blanks", 2)
    return key


def _connection(
    url: UrlOption = DEFAULT_URL,
    admin_key_file: KeyFileOption = None,
    as_json: JsonOption = False,
) -> AdminClient:
    return AdminClient(url, admin_key_file, as_json=as_json)


def connected(command: Callable[..., None]) -> Callable[..., None]:
    """A command that takes a client first, with the options that say which gateway it calls."""
    own, options = inspect.signature(command), inspect.signature(_connection).parameters

    @functools.wraps(command)
    def run(**given: Any) -> None:
        connection = {name: given.pop(name) for name in options}
        command(_connection(**connection), **given)

    parameters = [*list(own.parameters.values())[1:], *options.values()]
    run.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
    return run
