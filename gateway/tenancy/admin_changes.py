"""What every admin operation on tenancy shares: numbers of changes, denials, new keys, answers."""

import hashlib
import secrets
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, Final, TypeVar

import msgspec

from gateway.errors import PreconditionFailed
from gateway.records.tenancy import Denial, Row, RowKind
from gateway.tenancy.tenancy import Tenancy
from gateway.usage.audit import Audit

ReadFields = Callable[[RowKind, Mapping[str, object]], dict[str, Any]]
"""Checks fields as those of the file's section; returns them as JSON. Raises BadRequest."""
NOT_REPLICATED: Final = (
    "No replica of Redis has taken the change yet: if the server fails over now, it lasts only "
    "because the gateways that run give it back."
)
_T = TypeVar("_T")


class AdminChanges:
    """Base of the admin operations. Each is checked, stored, applied and audited."""

    def __init__(
        self,
        tenancy: Tenancy,
        trail: Audit,
        *,
        wall_clock: Callable[[], float],
        read_fields: ReadFields,
        new_key: Callable[[], str] | None = None,
    ) -> None:
        """`trail` is the audit; `wall_clock` in Unix seconds."""
        self._tenancy = tenancy
        self._known = tenancy.known
        self._trail = trail
        self._wall_clock = wall_clock
        self._read = read_fields
        self._new_key = new_key or fresh_key

    @property
    def up(self) -> bool:
        """Whether the directory answers."""
        return self._tenancy.sync.up

    def _later(self, before: int) -> int:
        """A time of change in Unix ms, above the one before."""
        return max(before + 1, int(self._wall_clock() * 1000))

    def _denial(self, what: Any, subject: str, value: float, *, of: str) -> Denial:
        """A denial that replaces what is known of its subject."""
        known = self._known.denials.get(f"{what} {subject}")
        changed = self._later(0 if known is None else known.changed)
        return Denial(what=what, subject=subject, value=value, of=of, changed=changed)

    def _gone(self, subjects: Iterable[str], *, of: str) -> tuple[Denial, ...]:
        """Denials for good of digests and uids; empty ones, and those denied, are left out."""
        return tuple(
            Denial(what="gone", subject=each, of=of, changed=self._later(0))
            for each in dict.fromkeys(filter(None, subjects))
            if not self._known.gone(each)
        )

    def _row(self, row: Row, **fields: Any) -> Row:
        """A row that replaces another one, or the one that is kept under its name."""
        known = self._known.rows.get(row.id)
        revision, before = (0, 0) if known is None else (known.revision, known.changed)
        return msgspec.structs.replace(
            row, **fields, revision=revision, changed=self._later(max(before, row.changed))
        )

    def _make_key(self) -> tuple[str, str]:
        """(a new key, its digest)."""
        key = self._new_key()
        return key, hashlib.sha256(key.encode()).hexdigest()

    async def _changing(
        self, work: Callable[[], Awaitable[_T]], *, reason: str
    ) -> tuple[_T, dict[str, object]]:
        """(what `work` returns, what the answer has to say of it)."""
        found, replicated = await self._tenancy.sync.change(work, reason=reason)
        return found, {} if replicated else {"warning": NOT_REPLICATED}


def fresh_key() -> str:
    """A new random key."""
    return f"sk-sluice-{secrets.token_urlsafe(32)}"


def new_uid() -> str:
    """A uid for a new row."""
    return secrets.token_hex(8)


def check_revision(name: str, revision: int, asked: int | None, *, reason: str) -> None:
    """Raises PreconditionFailed if it is at another revision than the one asked for."""
    if asked is not None and revision != asked:
        raise PreconditionFailed(
            f"'{name}' was changed since: it is at revision {revision}. Read it again.",
            reason=reason,
            code=reason,
            param="if-match",
        )
