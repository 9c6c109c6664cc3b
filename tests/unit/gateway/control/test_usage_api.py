"""Usage reports: the reports of one tenant take turns, and hold up nobody else's."""

import asyncio
import threading

import httpx
from fastapi import FastAPI, Request, Response

from gateway.control.tenant_api import MAX_WAITING, usage_router
from gateway.errors import Refusal
from gateway.records.request import Principal, RequestHead
from gateway.records.usage import UsageQuery, UsageReport
from tests.control import control_of


class Bench:
    """The routes over a ledger that takes long for the tenant `slow`."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.reads: list[str | None] = []
        app = FastAPI()

        @app.exception_handler(Refusal)
        async def refused(_request: Request, refusal: Refusal) -> Response:
            return Response(refusal.reason, status_code=refusal.status)

        app.include_router(usage_router(control_of(authenticate=self._tenant), self._read))
        self._transport = httpx.ASGITransport(app=app)

    def _read(self, query: UsageQuery, _most: int) -> UsageReport:
        self.reads.append(query.tenant)
        if query.tenant == "slow":
            self.go.wait()
        return UsageReport(query=query, rows={})

    @staticmethod
    async def _tenant(head: RequestHead) -> Principal:
        tenant = head.request_id or ""
        return Principal(entitlement="e", tenant=tenant)

    async def asks(self, tenant: str) -> int:
        """The status of a tenant's request; its name goes as the id of the request."""
        async with httpx.AsyncClient(transport=self._transport, base_url="http://g") as client:
            answer = await client.get("/v1/sluice/usage", headers={"x-request-id": tenant})
        return answer.status_code


async def test_reports_of_one_tenant_take_turns_and_few_of_them_wait() -> None:
    bench = Bench()
    asked = [asyncio.create_task(bench.asks("slow")) for _ in range(MAX_WAITING + 3)]
    done, pending = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
    while len(done) < 2:
        more, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        done |= more
    assert [task.result() for task in done] == [429, 429]
    assert await bench.asks("other") == 200, "not held up by the slow one's"
    assert bench.reads == ["slow", "other"]
    bench.go.set()
    assert [await task for task in pending] == [200] * (MAX_WAITING + 1)
    assert await bench.asks("slow") == 200
