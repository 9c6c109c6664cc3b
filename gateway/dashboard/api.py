"""Routes of the dashboard: the page for everybody, its figures for keys that may read."""

import asyncio
import hashlib
from base64 import b64encode
from collections.abc import AsyncIterator
from importlib.resources import files
from typing import Annotated, Final

import msgspec
from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.responses import StreamingResponse

from gateway.control.admin import any_decision
from gateway.control.peers import newest
from gateway.control.roles import dashboard_guard
from gateway.control.surface import Control
from gateway.dashboard.figures import Brief, row
from gateway.dashboard.snapshot import PAGE_ROWS, PERIOD_S, Snapshots, View
from gateway.errors import RateLimited
from gateway.http.problems import json_response
from gateway.records.decision import DecisionRecord
from gateway.records.story import steps_of

PATH: Final = "/dashboard"
MAX_VIEWERS: Final = 32
MAX_SEARCHED: Final = 10_000
MAX_FROM_PEERS: Final = 1000
_SLICE: Final = 200
"""Records searched between two pauses."""
_PRIVATE: Final = {"cache-control": "no-store", "x-content-type-options": "nosniff"}

_record: Final = msgspec.json.Decoder(DecisionRecord).decode
_brief: Final = msgspec.json.Decoder(Brief).decode
_FOLDER: Final = files("gateway.dashboard") / "static"
_SCRIPTS: Final = {
    "dashboard": ("dom.js", "charts.js", "tables.js", "story.js", "live.js"),
    "docs": ("dom.js", "docs.js"),
}


def dashboard_router(control: Control, snapshots: Snapshots) -> APIRouter:
    """The page, its live figures, and the look-up and search of decisions."""
    page = Page("dashboard", is_open=control.keys.open_dashboard)
    docs = Page("docs")
    app = APIRouter()

    @app.get(PATH, include_in_schema=False)
    async def dashboard(request: Request) -> Response:
        """The page, which asks for a key by itself."""
        return page.answer(request)

    @app.get("/docs", include_in_schema=False)
    async def api_description(request: Request) -> Response:
        """The API as a page, from the OpenAPI document."""
        return docs.answer(request)

    figures = APIRouter(dependencies=[Depends(dashboard_guard(control.keys))])
    _live_routes(figures, control, snapshots)
    _decision_routes(figures, control)
    app.include_router(figures)
    return app


def _live_routes(app: APIRouter, control: Control, snapshots: Snapshots) -> None:
    viewers = 0

    async def frames(view: View) -> AsyncIterator[bytes]:
        nonlocal viewers
        viewers += 1
        revision = control.keys.revision
        try:
            while not control.draining() and control.keys.revision == revision:
                yield b"data: " + await snapshots.of(view) + b"\n\n"
                await asyncio.sleep(PERIOD_S)
        finally:
            viewers -= 1

    @app.get(PATH + "/snapshot")
    async def snapshot(view: Annotated[View, Query()]) -> Response:
        """The figures once."""
        content = await snapshots.of(view)
        return Response(content, media_type="application/json", headers=_PRIVATE)

    @app.get(PATH + "/history")
    async def history() -> Response:
        """The figures of the last minutes."""
        return Response(snapshots.history(), media_type="application/json", headers=_PRIVATE)

    @app.get(PATH + "/events")
    async def events(view: Annotated[View, Query()]) -> Response:
        """The figures once a second, as server-sent events."""
        if viewers >= MAX_VIEWERS:
            raise RateLimited(
                f"{MAX_VIEWERS} viewers look at this dashboard already; close one.",
                reason="too_many_viewers",
                retry_after_s=10.0,
            )
        return StreamingResponse(frames(view), media_type="text/event-stream", headers=_PRIVATE)


def _decision_routes(app: APIRouter, control: Control) -> None:
    @app.get(PATH + "/decisions")
    async def search(text: Annotated[str, Query(max_length=128)] = "") -> Response:
        """The newest of all kept decisions that contain a text."""
        text = text.casefold()
        needle = text.encode()
        briefs: list[Brief] = []
        records = control.ring.latest(MAX_SEARCHED)
        for begin in range(0, len(records), _SLICE):
            lines = (
                line for line in records[begin : begin + _SLICE] if needle in bytes(line).lower()
            )
            briefs += [brief for brief in map(_brief, lines) if brief.matches(text)]
            if len(briefs) >= PAGE_ROWS:
                break
            await asyncio.sleep(0)
        others = await newest(control.peers, "decisions", [], MAX_FROM_PEERS)
        own = {(brief.request_id, brief.time_unix_s) for brief in briefs}
        briefs += [
            brief
            for brief in msgspec.convert(others, list[Brief])
            if brief.matches(text) and (brief.request_id, brief.time_unix_s) not in own
        ]
        briefs.sort(key=lambda brief: -brief.time_unix_s)
        return json_response([row(brief) for brief in briefs[:PAGE_ROWS]])

    @app.get(PATH + "/decisions/{request_id:path}")
    async def decision(request_id: str) -> Response:
        """One decision, its story by step, and its record."""
        record = await any_decision(control, request_id)
        steps = [msgspec.to_builtins(step) for step in steps_of(_record(record))]
        body = msgspec.json.encode({"steps": steps, "record": msgspec.Raw(record)})
        return Response(body, media_type="application/json", headers=_PRIVATE)


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
            "content-security-policy": "; ".join(
                (
                    "default-src 'none'",
                    f"script-src '{_hash(script)}'",
                    f"style-src '{_hash(style)}'",
                    "connect-src 'self'",
                    "img-src data:",
                    "base-uri 'none'",
                    "form-action 'none'",
                    "frame-ancestors 'none'",
                )
            ),
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


def _hash(text: str) -> str:
    return "sha256-" + b64encode(hashlib.sha256(text.encode()).digest()).decode()
