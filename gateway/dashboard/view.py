"""One viewer's choice of rows of the long tables: by text, page and order."""

from collections.abc import Callable, Sequence
from typing import Annotated, Any, Final, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, Field

PAGE_ROWS: Final = 50
"""Rows of a table that a viewer gets at once."""

_T = TypeVar("_T")
WorkerOrder = Literal["load", "name", "state"]
EntitlementOrder = Literal["load", "refused", "debt", "priority", "name"]
Text = Annotated[str, Field(max_length=128)]
Casefolded = Annotated[Text, AfterValidator(str.casefold)]
Page = Annotated[int, Field(ge=0, le=10_000)]


class View(BaseModel, frozen=True):
    """Search, page and order of each table, as the query gives them."""

    workers: Casefolded = ""
    workers_page: Page = 0
    workers_order: WorkerOrder = "load"
    entitlements: Casefolded = ""
    entitlements_page: Page = 0
    entitlements_order: EntitlementOrder = "load"
    tenants: Text = ""
    tenants_page: Page = 0
    decisions: Casefolded = ""


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
