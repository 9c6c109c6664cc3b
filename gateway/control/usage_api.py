"""Usage from the ledger: GET /admin/usage for all tenants, GET /v1/sluice/usage for a key's own.

A tenant's report has that tenant's rows alone: the presented key selects the tenant, and no part
of the query can.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Annotated, Final

from fastapi import APIRouter, Depends, Query, Request, Response

from gateway.control.roles import admin_guard
from gateway.control.surface import Control
from gateway.errors import BadRequest, NotFound, RateLimited, Unavailable
from gateway.http.problems import json_response
from gateway.records.usage import UsageQuery, UsageReport
from gateway.usage.report import figures, lines_of, query_of, total

MAX_ROWS: Final = 10_000
"""Of one answer; `sluice usage` has no such limit."""
MAX_AT_ONCE: Final = 4
"""Reports read at the same time; of one tenant, or of all, only one."""
MAX_WAITING: Final = 4
"""Reports of one tenant that wait for one another."""
ReadReport = Callable[[UsageQuery, int], UsageReport]
"""Reads the ledger: a query, and the most rows. Blocks; raises OSError."""
Day = Annotated[str | None, Query(max_length=32)]
By = Annotated[str, Query(max_length=128)]

_log = logging.getLogger("sluice.usage")


def usage_router(control: Control, read: ReadReport | None) -> APIRouter:
    """The routes; `read` is None where there is no ledger."""
    app = APIRouter()
    turns = _Turns()

    async def answer(by: str, first: str | None, last: str | None, tenant: str | None) -> Response:
        """The rows, or where there are too many, the first of them and no total."""
        try:
            query = query_of(by, first, last, tenant)
        except ValueError as error:
            raise BadRequest(f"{error}.", reason="bad_request") from None
        if read is None:
            raise NotFound(
                "This gateway keeps no ledger: its operator can set `ledger.path`.",
                reason="no_ledger",
            )
        async with turns.of(query.tenant):  # a report may read much
            try:
                found = await asyncio.to_thread(read, query, MAX_ROWS + 1)
            except OSError as error:
                _log.error("the ledger cannot be read: %s", error)
                raise Unavailable(
                    "The ledger cannot be read now.", reason="ledger_unavailable"
                ) from None
        more, rows = len(found.rows) > MAX_ROWS, lines_of(found)
        return json_response(
            {
                "by": query.by,
                "from": query.first_day,
                "to": query.last_day,
                "currency": found.currency,
                "rows": rows[:MAX_ROWS],
                "more": more,
                "total": None if more else figures(total(found)),
            }
        )

    @app.get("/admin/usage", dependencies=[Depends(admin_guard(control.keys))])
    async def usage(
        by: By = "tenant,model",
        first: Annotated[Day, Query(alias="from")] = None,
        last: Annotated[Day, Query(alias="to")] = None,
    ) -> Response:
        """Usage and cost of all tenants."""
        return await answer(by, first, last, None)

    @app.get("/v1/sluice/usage")
    async def own_usage(
        request: Request,
        by: By = "day,model",
        first: Annotated[Day, Query(alias="from")] = None,
        last: Annotated[Day, Query(alias="to")] = None,
    ) -> Response:
        """Usage and cost of this key's tenant."""
        principal = await control.principal(request)
        return await answer(by, first, last, principal.tenant)

    return app


class _Turns:
    """Has the reports of one tenant wait for one another, not for other tenants'."""

    def __init__(self) -> None:
        self._at_once = asyncio.Semaphore(MAX_AT_ONCE)
        self._locks: dict[str | None, asyncio.Lock] = {}
        self._asked: dict[str | None, int] = {}

    @asynccontextmanager
    async def of(self, tenant: str | None) -> AsyncIterator[None]:
        """The tenant's turn; None for the report of all. Raises RateLimited."""
        asked = self._asked.get(tenant, 0)
        if asked > MAX_WAITING:
            raise RateLimited(
                "Too many usage reports are waiting. Ask for one at a time.",
                reason="too_many_reports",
                retry_after_s=1.0,
            )
        self._asked[tenant] = asked + 1
        try:
            async with self._locks.setdefault(tenant, asyncio.Lock()), self._at_once:
                yield
        finally:
            self._asked[tenant] -= 1
            if not self._asked[tenant]:
                del self._asked[tenant], self._locks[tenant]
