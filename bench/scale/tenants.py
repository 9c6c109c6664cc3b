"""`bench scale`, tenants: 10 to 100,000 of them with three keys and an entitlement each.

They start as a gateway's own do: from a SQLite file into keyring and lists. Then requests of all
keys in turn are authenticated, led to their entitlement, admitted and settled.
"""

import gc
import time
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from bench.scale.entitlements import STEP_S, USED, EntitlementSet, kept
from bench.scale.measure import Cpu, calm, clock_ns, finished, resident_bytes, watched
from bench.scale.traffic import Size
from gateway.adapters.store.sqlite.directory import SqliteDirectory
from gateway.adapters.tenants.entries import KeyEntry, TenantEntry, TenantFile
from gateway.adapters.tenants.sync import TenantSync
from gateway.stages import authenticate

KEYS_EACH: Final = 3
STEP: Final = 7_919
"""Visits keys in no order of memory."""
_PUT_BATCH: Final = 500
Figures = dict[str, float]


def digest_of(tenant: int, key: int) -> bytes:
    """SHA-256 of a key."""
    return sha256(b"sk-scale-%d-%d" % (tenant, key)).digest()


def tenant_entries(count: int) -> Iterator[TenantEntry]:
    """So many tenants, as an administrator made them."""
    for number in range(count):
        keys = tuple(
            KeyEntry(name=f"key-{key}", sha256=digest_of(number, key).hex(), changed=1)
            for key in range(KEYS_EACH)
        )
        yield TenantEntry(tenant=f"tenant-{number}", id=f"{number:016x}", keys=keys)


async def _written(path: Path, count: int) -> None:
    directory = SqliteDirectory(path, TenantEntry, of="tenants")
    waiting: list[TenantEntry] = []
    for entry in tenant_entries(count):
        waiting.append(entry)
        if len(waiting) == _PUT_BATCH:
            await directory.put(*waiting)
            waiting = []
    if waiting:
        await directory.put(*waiting)
    await directory.close()


def tenant_point(size: Size) -> Figures:
    """Start, memory, a request's share, a poll."""
    count = size.entitlements
    rights = EntitlementSet(size)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "sluice.db"
        watched(lambda: _written(path, count))
        directory = SqliteDirectory(path, TenantEntry, of="tenants")
        finished(kept(rights, size))
        began_s = time.process_time()
        watched(rights.enter)
        rights_s = time.process_time() - began_s
        gc.collect()
        resident = resident_bytes()
        began_s = time.process_time()
        sync = TenantSync(directory, rights.keyring, TenantFile(), clock=rights.clock)
        _, found_ms, hold_ms = watched(sync.poll)
        found: Figures = {
            "rights_s": rights_s,
            "enter_s": time.process_time() - began_s,
            "enter_cpu_ms": found_ms,
            "enter_hold_ms": hold_ms,
        }
        calm()
        found["bytes_each"] = (resident_bytes() - resident) / (count * KEYS_EACH)
        found |= _requests(rights, size)
        found["used_bytes_each"] = (resident_bytes() - resident) / (count * KEYS_EACH)
        _, found["poll_ms"], found["poll_hold_ms"] = watched(sync.poll)
    return found


def _requests(rights: EntitlementSet, size: Size) -> Figures:
    """Every key of the active tenants asks once; then a sample is timed."""
    cpu, keys = Cpu(), (size.active or size.entitlements) * KEYS_EACH
    for number in range(keys):
        _ask(rights, cpu, number)
    first_us = cpu.quantile_us("authenticate", 0.5)
    cpu.clear()
    for number in range(size.requests):
        _ask(rights, cpu, number * STEP % keys)
    found = {"first_us": first_us, "authenticate_p99_us": cpu.quantile_us("authenticate", 0.99)}
    for part in ("authenticate", "admit", "settle"):
        found[f"{part}_p50_us"] = cpu.quantile_us(part, 0.5)
    found["request_p50_us"] = sum(
        found[f"{part}_p50_us"] for part in ("authenticate", "admit", "settle")
    )
    return found


def _ask(rights: EntitlementSet, cpu: Cpu, number: int) -> None:
    """Authenticate, admit and settle one request."""
    digest = digest_of(number // KEYS_EACH, number % KEYS_EACH)
    rights.now_s += STEP_S
    begin_ns = clock_ns()
    principal = authenticate.authenticate(rights.keyring, digest, 1.0)
    chosen = authenticate.entitled(principal, "m", 1.0)
    known_ns = clock_ns()
    lease = rights.admitted(chosen.entitlement)
    admitted_ns = clock_ns()
    rights.store.settle(lease, USED)
    ended_ns = clock_ns()
    cpu.add("authenticate", begin_ns, known_ns)
    cpu.add("admit", known_ns, admitted_ns)
    cpu.add("settle", admitted_ns, ended_ns)
