"""Budgets and limits of keys at run time: what is used of them, and more of one for its window."""

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from gateway.admission.denials import resets_at
from gateway.errors import BadRequest, NotFound, StateFailure, Unavailable
from gateway.metrics import Metrics
from gateway.ports import Budgets
from gateway.records.limit import Limit, LimitUse, LimitView
from gateway.records.usage import NANO, in_units

Note = Callable[[str, str, str, Mapping[str, object], Mapping[str, object]], None]
"""Writes to the audit: who, what, of whom, before, after."""
_LIMIT: Final = 1 << 53


class BudgetService:
    """All limits over all models. Methods raise Refusal."""

    def __init__(self, store: Budgets, metrics: Metrics, note: Note) -> None:
        self._store = store
        self._metrics = metrics
        self._note = note
        self._limits: dict[str, Limit] = {}
        store.know(self._limits)
        self._of: dict[str, tuple[str, ...]] = {}
        """Ids of limits by whose keys' they are; under "" those of no key."""
        self._ids: list[str] | None = []
        """In order; None after a change, until somebody asks."""

    def replace(self, tenant: str, limits: Sequence[Limit]) -> None:
        """Know these limits of a tenant's keys, and no others of them; "" for those of no key."""
        for limit_id in self._of.pop(tenant, ()):
            del self._limits[limit_id]
        if limits:
            self._of[tenant] = tuple(limit.id for limit in limits)
            self._limits.update((limit.id, limit) for limit in limits)
        self._ids = None

    async def page(self, after: str | None, limit: int) -> dict[str, object]:
        """Limits by id with their counters: "data", and in "next" the `after` of the next page."""
        if self._ids is None:
            self._ids = sorted(self._limits)
        start = 0 if after is None else bisect_right(self._ids, after)
        ids = self._ids[start : start + limit]
        more = start + limit < len(self._ids)
        data = await self.shown([self._limits[limit_id] for limit_id in ids])
        return {"data": data, "next": ids[-1] if more else None}

    async def shown(self, limits: Sequence[Limit]) -> list[dict[str, object]]:
        """Limits with their counters."""
        try:
            views = await self._store.levels(limits) if limits else []
        except StateFailure as error:
            raise _away() from error
        return [_described(limit, view) for limit, view in zip(limits, views, strict=True)]

    async def add(self, limit_id: str, by: Any, who: str) -> dict[str, object]:
        """Add to a budget until its window ends; `by` in tokens, or units of the currency."""
        limit = self._limits.get(limit_id)
        if limit is None or not limit.budget:
            raise NotFound(
                f"No budget '{limit_id[:200]}'. GET /admin/budgets lists them.",
                reason="budget_not_found",
            )
        scale = NANO if limit.unit == "money" else 1
        number = isinstance(by, int | float) and not isinstance(by, bool)
        if not number or not 0 < abs(by) * scale < _LIMIT:
            raise BadRequest(
                'Send {"by": 1000000}, in tokens or in units of the currency; below 0 takes away.',
                reason="bad_request",
                param="by",
            )
        amount = round(by * scale)
        try:
            view = await self._store.add(limit, amount)
        except StateFailure as error:
            if not error.sent:
                raise _away() from error
            self._note(who, "raise_budget", limit.id, {}, {"by": by, "outcome": "uncertain"})
            raise Unavailable(
                "The shared state did not answer in time, so the budget may have been changed. "
                f"Look at '{limit.id}' in GET /admin/budgets before you try again.",
                reason="state_unavailable",
                should_retry=False,
            ) from error
        shown = _described(limit, view)
        before = {"added": _figure(limit, view.added - amount)}
        self._note(who, "raise_budget", limit.id, before, {"added": shown["added"]})
        return shown

    async def sweep(self) -> None:
        """Drop the counters of limits that left the configuration, once their window is over."""
        await self._store.sweep(lambda limit_id: limit_id in self._limits)

    def warned(self, limit: Limit, use: LimitUse) -> None:
        """Count and audit the first request in a window to reach the level that warns."""
        self._metrics.budget_warnings.add(limit.scope)
        after = {"used": _figure(limit, use.level), "amount": _figure(limit, use.amount)}
        self._note("", "budget_warning", limit.id, {}, after)


def _described(limit: Limit, view: LimitView) -> dict[str, object]:
    amount = limit.amount + view.added
    return {
        "id": limit.id,
        "scope": limit.scope,
        "name": limit.name,
        "unit": limit.currency if limit.unit == "money" else limit.unit,
        "amount": _figure(limit, limit.amount),
        "added": _figure(limit, view.added),
        "used": _figure(limit, view.used),
        "reserved": _figure(limit, view.reserved),
        "left": _figure(limit, max(0, amount - view.used)),
        "window": limit.window or None,
        "timezone": limit.zone if limit.window else None,
        "resets_at": resets_at(limit, view.resets_unix_s) if limit.window else None,
        "on_exceed": "spot" if limit.spot else "refuse",
        "total": _figure(limit, view.total),
    }


def _figure(limit: Limit, amount: int) -> object:
    """Whole numbers; money as text, because it is exact."""
    return in_units(amount) if limit.unit == "money" else amount


def _away() -> Unavailable:
    return Unavailable(
        "The shared state does not answer, so nothing is known of budgets at the moment.",
        reason="state_unavailable",
        retry_after_s=1.0,
        should_retry=True,
    )
