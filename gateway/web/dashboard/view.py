"""One viewer's choice of rows of the long tables: by text, page and order."""

from collections.abc import Callable, Sequence
from typing import Annotated, Any, Final, Literal, TypeVar

from fastapi import Query

from gateway.records.record import Record

PAGE_ROWS: Final = 50
"""Rows of a table that a viewer gets at once."""

_T = TypeVar("_T")
WorkerOrder = Literal["load", "name", "state"]
EntitlementOrder = Literal["load", "refused", "debt", "priority", "name"]
Text = Annotated[str, Query(max_length=128)]
Page = Annotated[int, Query(ge=0, le=10_000)]


class View(Record, frozen=True, kw_only=True):
    """Search, page and order of each table."""

    workers: str = ""
    workers_page: int = 0
    workers_order: WorkerOrder = "load"
    entitlements: str = ""
    entitlements_page: int = 0
    entitlements_order: EntitlementOrder = "load"
    tenants: str = ""
    tenants_page: int = 0
    decisions: str = ""


def view_of(
    workers: Text = "",
    workers_page: Page = 0,
    workers_order: WorkerOrder = "load",
    entitlements: Text = "",
    entitlements_page: Page = 0,
    entitlements_order: EntitlementOrder = "load",
    tenants: Text = "",
    tenants_page: Page = 0,
    decisions: Text = "",
) -> View:
    """The view that a request's query describes."""
    return View(
        workers=workers.casefold(),
        workers_page=workers_page,
        workers_order=workers_order,
        entitlements=entitlements.casefold(),
        entitlements_page=entitlements_page,
        entitlements_order=entitlements_order,
        tenants=tenants,
        tenants_page=tenants_page,
        decisions=decisions.casefold(),
    )


def page_of(
    found: Sequence[_T], total: int, page: int, row: Callable[[_T], dict[str, Any]]
) -> dict[str, Any]:
    """One page of sorted rows; a page past the end is the last one."""
    pages = max(1, -(-len(found) // PAGE_ROWS))
    page = min(page, pages - 1)
    shown = found[page * PAGE_ROWS : (page + 1) * PAGE_ROWS]
    return {
        "rows": [row(each) for each in shown],
        "found": len(found),
        "total": total,
        "page": page,
        "pages": pages,
    }
