"""Reads keys, teams and users from a running LiteLLM proxy, page by page, within bounds.

The master key comes from the environment and goes to the proxy that the URL names, nowhere else:
no redirect is followed, and no proxy of the environment is used. An argument would be visible to
every user of the machine.
"""

import json
import os
from typing import TYPE_CHECKING, Any, Final

from sluice.terminal import stop

if TYPE_CHECKING:
    import httpx

KEY_VARIABLE: Final = "LITELLM_MASTER_KEY"
PAGE: Final = 100
"""Rows that LiteLLM gives at most in one page."""
MAX_PAGES: Final = 5_000
MAX_ANSWER_BYTES: Final = 64 << 20
LIMIT_S: Final = 60.0
_MAX_PAGES_FIX: Final = "dump LiteLLM's tables instead, and give the file"
_IDS: Final = {"key": "token", "user": "user_id"}


def fetch(url: str) -> dict[str, Any]:
    """Keys, teams and users of the proxy at a URL. Ends the command if it cannot have them all."""
    import httpx

    key = os.environ.get(KEY_VARIABLE, "").strip()
    if not key or not all("!" <= char <= "~" for char in key):
        stop(f"set ${KEY_VARIABLE} to the proxy's master key, to read its keys", 2)
    base = url.rstrip("/")
    headers = {"authorization": f"Bearer {key}"}
    try:
        with httpx.Client(timeout=LIMIT_S, trust_env=False, headers=headers) as client:
            return {
                "keys": _pages(client, base, "key"),
                "teams": _teams(client, base),
                "users": _pages(client, base, "user"),
            }
    except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
        stop(f"--keys {url}: {error}", 2)
    except httpx.HTTPError as error:
        stop(f"{base}: {error}", 1)


def _pages(client: "httpx.Client", base: str, kind: str) -> list[Any]:
    """The rows of all pages, each once: rows that are made meanwhile may move the pages."""
    found: dict[str, Any] = {}
    page = pages = 1
    while page <= pages:
        asked = {"page": page, "size": PAGE, "page_size": PAGE, "return_full_object": "true"}
        asked |= {"sort_by": "created_at", "sort_order": "asc"}
        answer = _get(client, f"{base}/{kind}/list", asked)
        rows = answer.get(f"{kind}s") if isinstance(answer, dict) else None
        if not isinstance(rows, list):
            stop(f"{base}/{kind}/list: no list of {kind}s: is this a LiteLLM proxy?", 1)
        pages = answer.get("total_pages") or 0
        if not isinstance(pages, int) or pages > MAX_PAGES:
            stop(f"{base}: {pages} pages of {kind}s, over {MAX_PAGES}: {_MAX_PAGES_FIX}", 2)
        for row in rows:
            row_id = row.get(_IDS[kind]) if isinstance(row, dict) else row
            found[str(row_id)] = row
        page += 1
    return list(found.values())


def _teams(client: "httpx.Client", base: str) -> list[Any]:
    answer = _get(client, f"{base}/team/list", {})
    if isinstance(answer, dict):
        answer = answer.get("teams")
    if not isinstance(answer, list):
        stop(f"{base}/team/list: no list of teams: is this a LiteLLM proxy?", 1)
    return answer


def _get(client: "httpx.Client", url: str, params: dict[str, Any]) -> Any:
    """An answer's JSON, at most MAX_ANSWER_BYTES."""
    held = bytearray()
    with client.stream("GET", url, params=params) as answer:
        if answer.status_code in (401, 403):
            stop(f"{url}: the proxy refuses the key of ${KEY_VARIABLE}", 2)
        if not answer.is_success:
            stop(f"{url}: {answer.status_code}", 1)
        for part in answer.iter_bytes():
            held += part
            if len(held) > MAX_ANSWER_BYTES:
                stop(f"{url}: the answer is over {MAX_ANSWER_BYTES >> 20} MiB", 1)
    try:
        return json.loads(bytes(held))
    except ValueError:
        stop(f"{url}: not JSON: is this a LiteLLM proxy?", 1)
