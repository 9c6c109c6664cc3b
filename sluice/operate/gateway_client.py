"""Calls of a running gateway by `sluice top`, `why`, `me` and `batch`, with the key at hand."""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, NoReturn
from urllib.parse import quote

import httpx
import typer

from sluice.operate.admin_client import DEFAULT_URL, KEY_VARIABLE, KeyFileOption, UrlOption
from sluice.terminal import stop

__all__ = ["DEFAULT_URL", "GatewayClient", "KeyFileOption", "KeyOption", "NotRead", "UrlOption"]

KeyOption = Annotated[
    str | None,
    typer.Option(
        "--key",
        help=f"The key itself, which users of this machine can see; rather set ${KEY_VARIABLE}.",
        show_default=False,
    ),
]
_LIMIT_S: Final = 10.0
_BAD_INPUT: Final = frozenset({400, 401, 403, 404})


class NotRead(Exception):
    """The gateway did not give what was asked for."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status
        """0 if the gateway was not reached."""


class GatewayClient:
    """Requests to one gateway."""

    def __init__(self, url: str, key: str | None, key_file: Path | None) -> None:
        """Without a key the gateway must show its figures to everybody, as the demo's does."""
        self.url = url.rstrip("/")
        self.key = _key(key, key_file)
        self._headers = {"authorization": f"Bearer {self.key}"} if self.key else {}

    def get(self, *path: str, params: Mapping[str, str] | None = None) -> Any:
        """The JSON at a path (one part each, unquoted). Raises NotRead."""
        return self.call("GET", *path, params=params)

    def call(self, method: str, *path: str, **more: Any) -> Any:
        """The JSON that a call of a path answers; `more` as httpx takes it. Raises NotRead."""
        where = "/".join(quote(part, safe="") for part in path)
        try:
            with self._client() as client:
                answer = client.request(method, f"{self.url}/{where}", **more)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise NotRead(f"{self.url}: {error}") from error
        return _content(self.url, answer)

    def pieces(self, *path: str) -> Iterator[bytes]:
        """The bytes at a path, as they come. Raises NotRead."""
        where = "/".join(quote(part, safe="") for part in path)
        try:
            with self._client() as client, client.stream("GET", f"{self.url}/{where}") as answer:
                if not answer.is_success:
                    answer.read()
                    _content(self.url, answer)
                yield from answer.iter_bytes()
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise NotRead(f"{self.url}: {error}") from error

    def events(self, query: Mapping[str, str]) -> Iterator[dict[str, Any]]:
        """The dashboard's figures, once a second, until the gateway ends them. Raises NotRead."""
        try:
            with (
                self._client() as client,
                client.stream("GET", f"{self.url}/dashboard/events", params=query) as answer,
            ):
                if not answer.is_success:
                    answer.read()
                    _content(self.url, answer)
                for line in answer.iter_lines():
                    if line.startswith("data: "):
                        yield json.loads(line.removeprefix("data: "))
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise NotRead(f"{self.url}: {error}") from error

    def give_up(self, error: NotRead) -> NoReturn:
        """End the command with what a person at the terminal can do."""
        problem = str(error)
        if error.status == 401 and self.key:
            problem = f"{self.url} refuses this key"
        elif error.status == 401:
            problem = f"{self.url} asks for a key: set ${KEY_VARIABLE}, or give --admin-key-file"
        stop(problem, 2 if error.status in _BAD_INPUT else 1)

    def _client(self) -> httpx.Client:
        # No proxies and no .netrc from the environment: the key goes to the gateway alone.
        return httpx.Client(timeout=_LIMIT_S, trust_env=False, headers=self._headers)


def _content(url: str, answer: httpx.Response) -> Any:
    try:
        found = answer.json()
    except ValueError:
        raise NotRead(f"{url}: {answer.status_code}, not JSON: is this a gateway?") from None
    if answer.is_success:
        return found
    error = found.get("error") if isinstance(found, dict) else None
    message = error.get("message") if isinstance(error, dict) else None
    raise NotRead(str(message or f"{url}: {answer.status_code}"), answer.status_code)


def _key(key: str | None, key_file: Path | None) -> str:
    if key is not None:
        return key
    if key_file is None:
        return os.environ.get(KEY_VARIABLE, "")
    try:
        return key_file.read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        stop(f"{key_file}: {error}", 2)
