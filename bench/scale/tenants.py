"""`bench scale`, tenants: 10 to 100,000 of them with three keys and an entitlement each.

They start as a gateway's own do: from a SQLite file into keyring and lists. What tenants and keys
add is the difference to a start with their entitlements alone. Then requests of all keys in turn
are authenticated, led to their entitlement, admitted and settled.
"""

import gc
from collections.abc import Iterator
from hashlib import sha256
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from bench.scale.entitlements import EntitlementSet, kept, parts
from bench.scale.measure import calm, resident_bytes, watched
from bench.scale.traffic import Size, entitlement_rows
from gateway.records.tenancy import Row
from gateway.store.sqlite_directory import SqliteDirectory

KEYS_EACH: Final = 3
STEP: Final = 7_919
"""Visits keys in no order of memory."""
Figures = dict[str, float]


def digest_of(tenant: int, key: int) -> bytes:
    """SHA-256 of a key."""
    return sha256(b"sk-scale-%d-%d" % (tenant, key)).digest()


def tenant_rows(count: int) -> Iterator[Row]:
    """So many tenants and their keys, as an administrator made them."""
    for number in range(count):
        tenant, uid = f"tenant-{number}", f"t{number:015x}"
        yield Row(kind="tenant", name=tenant, uid=uid, fields={"name": tenant}, changed=1)
        for key in range(KEYS_EACH):
            name, digest = f"key-{key}", digest_of(number, key).hex()
            yield Row(
                kind="key",
                name=f"{tenant}/{name}",
                uid=f"{number:013x}{key:03x}",
                of=uid,
                fields={"name": name, "sha256": digest},
                changed=1,
            )


def tenant_point(size: Size) -> Figures:
    """Start, memory, a request's share, a poll."""
    count = size.entitlements
    keys = count * KEYS_EACH
    with TemporaryDirectory() as folder:
        alone = EntitlementSet(size, SqliteDirectory(Path(folder) / "entitlements.db"))
        watched(lambda: kept(alone.directory, entitlement_rows(count)))
        rights_ms, rights_bytes, _ = _entered(alone)
        tenants = EntitlementSet(size, SqliteDirectory(Path(folder) / "sluice.db"))
        rows = chain(entitlement_rows(count), tenant_rows(count))
        watched(lambda: kept(tenants.directory, rows))
        resident = resident_bytes() + rights_bytes
        all_ms, all_bytes, hold_ms = _entered(tenants)
        found: Figures = {
            "start_s": all_ms / 1e3,
            "enter_s": (all_ms - rights_ms) / 1e3,
            "enter_hold_ms": hold_ms,
            "bytes_each": (all_bytes - rights_bytes) / keys,
        }
        calm()
        found |= _requests(tenants, size)
        found["used_bytes_each"] = (resident_bytes() - resident) / keys
        _, found["poll_ms"], found["poll_hold_ms"] = watched(tenants.tenancy.sync.poll)
        for each in (alone, tenants):
            watched(each.directory.close)
    return found


def _entered(rights: EntitlementSet) -> tuple[float, int, float]:
    """A start: CPU ms, bytes, ms in the longest turn."""
    gc.collect()
    resident = resident_bytes()
    _, spent_ms, hold_ms = watched(rights.enter)
    gc.collect()
    return spent_ms, resident_bytes() - resident, hold_ms


def _requests(rights: EntitlementSet, size: Size) -> Figures:
    """Every key of the active tenants asks once; then a sample is timed."""
    keys = (size.active or size.entitlements) * KEYS_EACH
    for number in range(keys):
        rights.end(rights.take(digest_of(*divmod(number, KEYS_EACH))))
    rights.cpu.clear()
    for number in range(size.requests):
        rights.end(rights.take(digest_of(*divmod(number * STEP % keys, KEYS_EACH))))
    return parts(rights.cpu)
