"""Audit trail of changes to entitlements and tenants: one log line each, the newest in memory."""

import logging
from collections import deque
from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from gateway.records.record import Record

RETAINED: Final = 1_000
"""Records for GET /admin/audit."""

_log = logging.getLogger("sluice.audit")
_encode: Final = msgspec.json.Encoder().encode


class AuditRecord(Record, frozen=True, kw_only=True):
    """One change. Holds no key and no digest; `key` is a fingerprint."""

    time_unix_s: float
    who: str
    """The admin key's name; its fingerprint if it has none; a token's `jwt:` and subject."""
    what: str
    """create, change, suspend, resume, expire, delete, add_key, change_key, rotate_key,
    revoke_key, raise_budget, or budget_warning (by the gateway itself, so `who` is empty)."""
    entitlement: str
    """Its name, or the id of a budget; empty for a change of a tenant."""
    tenant: str = ""
    """The tenant, where it or one of its keys was changed; else empty."""
    before: Mapping[str, object] = {}
    """Previous values of the changed fields; `after` has the new ones."""
    after: Mapping[str, object] = {}


class Audit:
    """Logs each change and keeps the newest."""

    def __init__(self, wall_clock: Callable[[], float]) -> None:
        """`wall_clock` in Unix seconds."""
        self._wall_clock = wall_clock
        self._records: deque[AuditRecord] = deque(maxlen=RETAINED)

    def note(
        self,
        who: str,
        what: str,
        entitlement: str,
        before: Mapping[str, object],
        after: Mapping[str, object],
        *,
        tenant: str = "",
    ) -> None:
        """Record a change; keeps the fields of `before` and `after` that differ."""
        names = [n for n in {**before, **after} if before.get(n) != after.get(n)]
        record = AuditRecord(
            time_unix_s=self._wall_clock(),
            who=who,
            what=what,
            entitlement=entitlement,
            tenant=tenant,
            before={n: before[n] for n in names if n in before},
            after={n: after[n] for n in names if n in after},
        )
        self._records.append(record)
        _log.info("%s", _encode(record).decode())

    def latest(self, count: int) -> list[dict[str, object]]:
        """Up to `count` changes, newest first."""
        found = list(self._records)[: -count - 1 : -1]
        return [msgspec.structs.asdict(record) for record in found]
