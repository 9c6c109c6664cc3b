"""Admin routes of budgets and limits of keys: what is used of them, and more for one's window."""

from fastapi import APIRouter, Request, Response

from gateway.errors import BadRequest
from gateway.web.control.admin_entitlements import PAGE, Limit, read_object
from gateway.web.control.roles import who
from gateway.web.control.surface import BudgetService
from gateway.web.problems import json_response


def budget_routes(app: APIRouter, service: BudgetService) -> None:
    """Add the routes."""

    @app.get("/admin/budgets")
    async def budgets(after: str | None = None, limit: Limit = PAGE) -> Response:
        """Budgets and limits of keys with their counters; `next` is `after` for the next page."""
        return json_response(await service.page(after, limit))

    @app.post("/admin/budgets/{budget:path}/raise")
    async def raise_(budget: str, request: Request) -> Response:
        """Add `{"by": 1000000}` to a budget until its window ends."""
        fields = await read_object(request)
        if set(fields) != {"by"}:
            raise BadRequest('Send {"by": 1000000}.', reason="bad_request", param="by")
        return json_response(await service.add(budget, fields["by"], who(request)))
