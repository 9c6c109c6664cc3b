"""What every admin operation on tenancy shares, and the audit of what they changed.

An operation is either written to the directory and then applied here, or refused without any
change. If another gateway's change came first, it is made again on the new state. Other gateways
read it with their next poll. Keys are generated here, shown once and stored as SHA-256; admins
refer to them by fingerprint, the digest's first 8 hex digits.
"""

import hashlib
import logging
import secrets
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, Final, Generic, TypeVar

import msgspec

from gateway.errors import Conflict, NotFound, Refusal
from gateway.records.tenancy import Denial, DirectoryChange, Row, RowKind
from gateway.tenancy.rights import EntitlementInForce, TenantInForce
from gateway.tenancy.tenancy import Tenancy

RETAINED: Final = 1_000
"""Records for GET /admin/audit."""
NOT_REPLICATED: Final = (
    "No replica of Redis has taken the change yet: if the server fails over now, it lasts only "
    "because the gateways that run give it back."
)

Planned = tuple[DirectoryChange, str]
"""What an operation writes, and its name for the audit."""
_InForce = TypeVar("_InForce", EntitlementInForce, TenantInForce)
_log = logging.getLogger("sluice.audit")
_encode: Final = msgspec.json.Encoder().encode


class Audit:
    """Logs each change, one line each, and keeps the newest. None holds a key or a digest."""

    def __init__(self, wall_clock: Callable[[], float]) -> None:
        """`wall_clock` in Unix seconds."""
        self._wall_clock = wall_clock
        self._records: deque[dict[str, object]] = deque(maxlen=RETAINED)

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
        """Record a change; keeps the fields of `before` and `after` that differ.

        `who`: the admin key's name; its fingerprint if it has none; a token's `jwt:` and subject.
        `what`: create, change, suspend, resume, expire, delete, add_key, change_key, rotate_key,
        revoke_key, raise_budget, or budget_warning (by the gateway itself, so `who` is empty).
        `entitlement`: its name, or the id of a budget; empty for a change of a tenant, which is in
        `tenant`, where it or one of its keys was changed.
        """
        names = [n for n in {**before, **after} if before.get(n) != after.get(n)]
        record: dict[str, object] = {
            "time_unix_s": self._wall_clock(),
            "who": who,
            "what": what,
            "entitlement": entitlement,
            "tenant": tenant,
            "before": {n: before[n] for n in names if n in before},
            "after": {n: after[n] for n in names if n in after},
        }
        self._records.append(record)
        _log.info("%s", _encode(record).decode())

    def latest(self, count: int) -> list[dict[str, object]]:
        """Up to `count` changes, newest first."""
        return list(self._records)[: -count - 1 : -1]


class AdminChanges(Generic[_InForce]):
    """Base of the admin operations. Each is checked, stored, applied and audited."""

    kind: RowKind

    def __init__(
        self,
        tenancy: Tenancy,
        trail: Audit,
        *,
        wall_clock: Callable[[], float],
        read_fields: Callable[[RowKind, Mapping[str, object]], dict[str, Any]],
        new_key: Callable[[], str] = lambda: f"sk-sluice-{secrets.token_urlsafe(32)}",
    ) -> None:
        """`trail` is the audit; `wall_clock` in Unix seconds.

        `read_fields` checks fields as those of the file's section, and returns them as JSON; it
        raises BadRequest.
        """
        self._tenancy = tenancy
        self._known = tenancy.known
        self._trail = trail
        self._wall_clock = wall_clock
        self._read = read_fields
        self._new_key = new_key

    @property
    def up(self) -> bool:
        """Whether the directory answers."""
        return self._tenancy.up

    def _in_force(self, name: str) -> _InForce | None:
        """What has this name, if anything does."""
        raise NotImplementedError

    def _fields(self, entry: _InForce) -> Mapping[str, object]:
        """The fields that changes can differ in, for the audit."""
        raise NotImplementedError

    def _current(self, name: str, version: int | None = None) -> _InForce:
        """What has this name, at revision `version` if given. Raises NotFound, Refusal."""
        entry, reason = self._in_force(name), f"{self.kind}_not_found"
        if entry is None:
            raise NotFound(
                f"There is no {self.kind} '{name[:64]}'. GET /admin/{self.kind}s lists them.",
                reason=reason,
            )
        if version is not None and entry.revision != version:
            reason = f"{self.kind}_changed"
            raise Refusal(
                f"'{name}' was changed since: it is at revision {entry.revision}. Read it again.",
                reason=reason,
                param="if-match",
            )
        return entry

    def _taken(self, name: str) -> Conflict:
        """The refusal of a new one whose name is taken."""
        article, reason = "an" if self.kind == "entitlement" else "a", f"{self.kind}_exists"
        return Conflict(
            f"There is {article} {self.kind} '{name}'. Change it with PATCH, or take another name.",
            reason=reason,
            param="name",
        )

    async def _change(
        self, name: str, who: str, work: Callable[[], Awaitable[Planned]]
    ) -> dict[str, object]:
        """Store the change that `work` finds on the newest state; returns what to say of it.

        `work` raises Refusal.
        """

        def audited() -> Mapping[str, object]:
            entry = self._in_force(name)
            return {} if entry is None else self._fields(entry)

        async def attempt() -> None:
            change, what = await work()
            before = audited()
            await self._tenancy.write(change)
            of = (name, "") if self.kind == "entitlement" else ("", name)
            self._trail.note(who, what, of[0], before, audited(), tenant=of[1])

        replicated = await self._tenancy.change(attempt, reason=f"{self.kind}_changed")
        return {} if replicated else {"warning": NOT_REPLICATED}

    def _checked(self, kind: RowKind, fields: Mapping[str, object]) -> dict[str, Any]:
        """The fields that are set as JSON, checked as a section of the file. Raises BadRequest."""
        return self._read(kind, {k: v for k, v in fields.items() if v is not None})

    def _later(self, before: int) -> int:
        """A time of change in Unix ms, above the one before."""
        return max(before + 1, int(self._wall_clock() * 1000))

    def _denial(self, what: Any, name: str, value: float, *, key: str = "") -> Denial:
        """A denial that replaces what is known of its subject: `name`, or its key by digest."""
        of = f"{self.kind} {name}"
        subject = f"key {key}" if key else of
        earlier = self._known.denials.get(f"{what} {subject}")
        changed = self._later(0 if earlier is None else earlier.changed)
        return Denial(what=what, subject=subject, value=value, of=of, changed=changed)

    def _gone(self, name: str, subjects: Iterable[str], rows: Iterable[Row] = ()) -> list[Denial]:
        """Denials for good of digests and uids, and of all that these rows have.

        Empty ones, and those denied, are left out.
        """
        parts = [*subjects, *(part for row in rows for part in (row.uid, *row.digests))]
        return [
            Denial(what="gone", subject=subject, of=f"{self.kind} {name}", changed=self._later(0))
            for subject in dict.fromkeys(filter(None, parts))
            if not self._known.gone(subject)
        ]

    def _row(self, row: Row, **fields: Any) -> Row:
        """A row that replaces another one, or the one that is kept under its name."""
        earlier = self._known.rows.get(row.id)
        revision, before = (0, 0) if earlier is None else (earlier.revision, earlier.changed)
        return msgspec.structs.replace(
            row, **fields, revision=revision, changed=self._later(max(before, row.changed))
        )

    def _make_key(self) -> tuple[str, str]:
        """(a new key, its digest)."""
        key = self._new_key()
        return key, hashlib.sha256(key.encode()).hexdigest()


def new_uid() -> str:
    """A uid for a new row."""
    return secrets.token_hex(8)
