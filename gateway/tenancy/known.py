"""What one process knows of the directory: rows and denials, joined in any order; and of a cluster.

A join of two states, each of which may have lost writes, is the same whoever joins first:

- a row whose uid is gone is dropped, and never comes back;
- of two changes of one row the later counts;
- of two denials of one id the later counts, and the stricter of two at the same time.

Of two rows of one name with two uids (a directory lost the first, and a second one was made) the
later stays, and the directory denies the other one.

What a cluster's controller grants replaces what an earlier controller, or an earlier revision of
its own, granted; never the other way round. Rights that nobody confirms degrade in the end.
"""

from collections.abc import Iterable, Mapping
from typing import Final

import msgspec

from gateway.records.tenancy import ClusterState, Denial, KnownCluster, Row, RowId, RowKind

_encode: Final = msgspec.json.Encoder().encode
_NONE: Final[Mapping[str, Row]] = {}
STALE_AFTER: Final = {"preemptible": 1, "spot": 1, "elastic": 2, "guaranteed": 3, "dedicated": 3}
"""Service class -> how many times `stale_after_s` without news of the cluster it is served."""


def later_row(first: Row, second: Row) -> Row:
    """The row that stays of two with one name."""
    return max(first, second, key=lambda row: (row.changed, row.uid, content(row), row.revision))


def content(row: Row) -> bytes:
    """A row as JSON, whatever its revision."""
    return _encode(msgspec.structs.replace(row, revision=0))


def later_denial(first: Denial, second: Denial) -> Denial:
    """The denial that counts of two of one id."""
    return max(first, second, key=lambda denial: (denial.changed, strictness(denial)))


def strictness(denial: Denial) -> float:
    """A suspension before none, an earlier end before a later one, any end before none."""
    if denial.what == "ends":
        return -denial.value if denial.value else float("-inf")
    return denial.value


def stale_classes(age_s: float, stale_after_s: float) -> frozenset[str]:
    """The service classes that are degraded when news of the cluster is that old."""
    return frozenset(c for c, times in STALE_AFTER.items() if age_s > times * stale_after_s)


def joined(
    known: KnownCluster, state: ClusterState | None, stale: frozenset[str]
) -> tuple[KnownCluster, set[str]]:
    """What is known after news, and the entitlements that it changes. An older set is no news."""
    before, changed = known.entitlements, set(known.entitlements if stale != known.stale else ())
    known = msgspec.structs.replace(known, stale=stale)
    if state is None or state.version < known.version:
        return known, changed
    news, gone = {each.name: each for each in state.entitlements}, set(state.removed)
    names = news.keys() | (before.keys() if state.whole else gone)
    changed |= {name for name in names if before.get(name) != news.get(name)}
    if names:  # not for each heartbeat, because 100,000 are many
        unchanged = {} if state.whole else {n: each for n, each in before.items() if n not in gone}
        before = {**unchanged, **news}
    return KnownCluster(version=state.version, entitlements=before, stale=stale), changed


class Known:
    """What one process knows. Look-ups take constant time."""

    def __init__(self) -> None:
        self.cluster = KnownCluster()
        self.rows: dict[RowId, Row] = {}
        self.denials: dict[str, Denial] = {}
        self.revisions: dict[str, int] = {}
        """Newest revision of a row, a key or a denial of `tenant NAME` or `entitlement NAME`."""
        self._ids: dict[str, RowId] = {}
        """By uid."""
        self._keys: dict[str, dict[str, Row]] = {}
        """Rows of keys by whose they are: `TENANT/` or `ENTITLEMENT:`."""

    def take(self, rows: Iterable[Row], denials: Iterable[Denial]) -> tuple[set[RowId], set[str]]:
        """Join with these; returns which rows, and which denials by id, are others now."""
        touched: set[RowId] = set()
        denied: set[str] = set()
        for denial in denials:
            self._note(denial.of or denial.subject, denial.revision)
            earlier = self.denials.get(denial.id)
            newer = denial if earlier is None else later_denial(earlier, denial)
            if earlier is not None and newer is earlier:
                same = denial.changed == earlier.changed and denial.value == earlier.value
                if same and denial.revision > earlier.revision:
                    self.denials[denial.id] = denial
                continue
            self.denials[denial.id] = newer
            denied.add(denial.id)
            if denial.what == "gone" and (dead := self._ids.get(denial.subject)) is not None:
                self._drop(dead)
                touched.add(dead)
        for row in rows:
            kind, owner = owner_of_key(row.name) if row.kind == "key" else row.id
            self._note(f"{kind} {owner}", row.revision)
            mine = self.rows.get(row.id)
            if mine == row or self.gone(row.uid):
                continue
            if mine is not None:
                if later_row(mine, row) is mine:
                    continue
                self._drop(row.id)
            self.rows[row.id] = row
            self._ids[row.uid] = row.id
            if row.kind == "key":
                self._keys.setdefault(_owner(row.name), {})[row.name] = row
            touched.add(row.id)
        return touched, denied

    def _note(self, subject: str, revision: int) -> None:
        self.revisions[subject] = max(revision, self.revisions.get(subject, 0))

    def _drop(self, row_id: RowId) -> None:
        row = self.rows.pop(row_id)
        self._ids.pop(row.uid, None)
        if row.kind == "key":
            owner = _owner(row.name)
            self._keys[owner].pop(row.name)
            if not self._keys[owner]:
                del self._keys[owner]

    def row(self, kind: RowKind, name: str) -> Row | None:
        """A row by its name."""
        return self.rows.get((kind, name))

    def keys_of(self, tenant: str) -> Mapping[str, Row]:
        """Rows of a tenant's keys, by name."""
        return self._keys.get(f"{tenant}/", _NONE)

    def own_keys_of(self, entitlement: str) -> Mapping[str, Row]:
        """Rows of an entitlement's own keys, by name."""
        return self._keys.get(f"{entitlement}:", _NONE)

    def gone(self, subject: str) -> bool:
        """Whether a digest was revoked, or a uid deleted."""
        return f"gone {subject}" in self.denials

    def suspended(self, subject: str) -> bool:
        """Whether administrators suspended it."""
        denial = self.denials.get(f"suspended {subject}")
        return denial is not None and denial.value > 0

    def ends_unix_s(self, subject: str) -> float:
        """The end that administrators set; 0 for none."""
        denial = self.denials.get(f"ends {subject}")
        return 0.0 if denial is None else denial.value


def _owner(name: str) -> str:
    """TENANT/ or ENTITLEMENT: of a key's name."""
    tenant, slash, _ = name.partition("/")
    return tenant + slash if slash else name.rpartition(":")[0] + ":"


def owner_of_key(name: str) -> tuple[RowKind, str]:
    """The tenant, or the entitlement, that a row of a key belongs to."""
    owner = _owner(name)
    return ("tenant" if owner.endswith("/") else "entitlement"), owner[:-1]
