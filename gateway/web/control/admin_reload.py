"""Admin route that reloads the configuration file, or says what another file would change."""

from typing import Final

import msgspec
from fastapi import APIRouter, Request, Response

from gateway.errors import BadRequest
from gateway.web.control.surface import Control
from gateway.web.http.data_plane import too_large
from gateway.web.problems import json_response

MAX_FILE_BYTES: Final = 16 * 1024 * 1024


def reload_routes(app: APIRouter, control: Control) -> None:
    """Add the route."""
    service = control.reload
    if service is None:
        return

    @app.post("/admin/reload")
    async def reload(request: Request, *, dry_run: bool = False) -> Response:
        """Read the configuration file anew and apply what needs no restart, on every replica.

        `dry_run=true` compares the body, a file, with the configuration in force instead.
        """
        if dry_run:
            found = await service.compare(await _text(request))
        else:
            found = await service.reload()
            await control.peers.ask("reload")
        rows = [msgspec.to_builtins(change) for change in found]
        restart = [row["path"] for row in rows if row["restart"]]
        return json_response({"changes": rows, "restart_needed": restart})


async def _text(request: Request) -> str:
    content = bytearray()
    async for part in request.stream():
        content += part
        if len(content) > MAX_FILE_BYTES:
            raise too_large(MAX_FILE_BYTES)
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise BadRequest("The file is not UTF-8.", reason="bad_configuration") from None
