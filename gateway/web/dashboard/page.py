"""Pages of one file each: our own HTML with its style and script inside, allowed by their hashes.

The content security policy names the digests of these two blocks, so the browser runs nothing
else: no script of another origin, no inline handler, and no page that frames this one.
"""

import hashlib
from base64 import b64encode
from collections.abc import Sequence
from importlib.resources import files
from typing import Final

from fastapi import Request, Response

_FOLDER: Final = files("gateway.web.dashboard") / "static"
_SCRIPTS: Final = {
    "dashboard": ("dom.js", "charts.js", "tables.js", "story.js", "live.js"),
    "docs": ("dom.js", "docs.js"),
}


class Page:
    """One page, joined from its files when it is made."""

    def __init__(self, name: str, *, is_open: bool = False) -> None:
        """`is_open`: the page's figures need no key."""
        style = _text("page.css")
        script = "\n".join(_text(part) for part in _SCRIPTS[name])
        html = _text(f"{name}.html")
        for mark, text in (
            ("/*STYLE*/", style),
            ("/*SCRIPT*/", script),
            ("OPEN", "yes" if is_open else "no"),
        ):
            html = html.replace(f"{{{{{mark}}}}}", text)
        self.body = html.encode()
        self._tag = f'"{hashlib.sha256(self.body).hexdigest()[:16]}"'
        self.headers = {
            "content-security-policy": _policy(style, script),
            "x-content-type-options": "nosniff",
            "x-frame-options": "DENY",
            "referrer-policy": "no-referrer",
            "cross-origin-opener-policy": "same-origin",
            "cross-origin-resource-policy": "same-origin",
            "cache-control": "no-cache",
            "etag": self._tag,
        }

    def answer(self, request: Request) -> Response:
        """The page, or 304 if the browser has it."""
        if request.headers.get("if-none-match") == self._tag:
            return Response(status_code=304, headers=self.headers)
        return Response(self.body, media_type="text/html", headers=self.headers)


def _text(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")


def _policy(style: str, script: str) -> str:
    rules: Sequence[str] = (
        "default-src 'none'",
        f"script-src '{_hash(script)}'",
        f"style-src '{_hash(style)}'",
        "connect-src 'self'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
    return "; ".join(rules)


def _hash(text: str) -> str:
    return "sha256-" + b64encode(hashlib.sha256(text.encode()).digest()).decode()
