"""`bench scale`, entitlements: 1 to 100,000 of one model, loaded, used and maintained.

They are loaded like an admin's: from a directory into index, keyring and token pool. Then
requests of active entitlements are authenticated, admitted and settled, and each of the store's
chores is run once in an event loop that is watched.
"""

import gc
from collections.abc import Iterable, Iterator
from hashlib import sha256
from itertools import chain, count, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from bench.scale.traffic import (
    SLOTS,
    Cpu,
    Size,
    calm,
    clock_ns,
    collection_ms,
    digest_of,
    entitlement_rows,
    finished,
    fleet_of,
    resident_bytes,
    token_pool_of,
    watched,
)
from gateway.admission.capacity import WorkerShare
from gateway.admission.entitlement_terms import ModelShape
from gateway.admission.terms import AdmissionRequest
from gateway.control.metrics_page import ACCOUNTS_SHOWN, MetricsPage, PoolSnapshot, write
from gateway.metrics import Metrics
from gateway.ports import Settlement
from gateway.records.attempt import Usage
from gateway.records.lease import Lease
from gateway.records.tenancy import NO_FILE, DirectoryChange, Row
from gateway.store.memory_leases import MemoryLeases
from gateway.store.sqlite_directory import SqliteDirectory
from gateway.store.upkeep import ModelSpec, StoreUpkeep
from gateway.tenancy import keyring
from gateway.tenancy.tenancy import Tenancy

WORKERS: Final = 64
_PUT_BATCH: Final = 500
USED: Final = Settlement(usage=Usage(prompt_tokens=400, completion_tokens=100), dispatched=True)
STEP_S: Final = 1e-4
Figures = dict[str, float]


class EntitlementSet:
    """One model's entitlements in a process that serves them."""

    def __init__(self, size: Size, directory: SqliteDirectory | None = None) -> None:
        """`directory` in memory by default."""
        self.now_s = 1_000.0
        self.served = fleet_of("quartz", WORKERS)
        self.token_pool = token_pool_of(SLOTS * WORKERS + size.leases)
        self.keyring = keyring.Keyring()
        self.store = MemoryLeases(
            {"m": self.served}, self.clock, {"m": self.token_pool}, wall_clock=self.clock
        )
        self.directory = directory or SqliteDirectory(None)
        shape = ModelShape(
            name="m",
            pools=("main",),
            slots=(SLOTS * WORKERS,),
            max_slots=(SLOTS * WORKERS,),
            max_kv_bytes=0,
            max_tokens_per_s=0.0,
        )
        self.tenancy = Tenancy(
            directory=self.directory,
            keyring=self.keyring,
            store=self.store,
            shapes={"m": shape},
            managed={"m"},
            changed=lambda model: self.upkeep.entitlements_changed(model),  # noqa: PLW0108
            clock=self.clock,
            rates={"m": self.served.admission.rates},
        )
        spec = ModelSpec(
            base=self.token_pool.terms,
            pools=self.served.fleet.pools,
            shares=(WorkerShare(slots=2 * SLOTS, replicas=(1, WORKERS)),),
            entitlements=lambda: self.tenancy.index.terms("m"),
        )
        self.upkeep = StoreUpkeep(self.store, {"m": spec}, self.clock, self.clock)
        self.cpu = Cpu()
        self._active = size.active or size.entitlements
        self._numbers = count()
        self._leases = count()

    def clock(self) -> float:
        """The time it is there."""
        return self.now_s

    async def enter(self) -> None:
        """What the directory holds, into index, keyring and token pool."""
        await self.tenancy.begin(NO_FILE)

    def take(self, key: bytes | None = None) -> Lease:
        """Authenticate and admit one request: of a tenant's key, or the next active entitlement."""
        self.now_s += STEP_S
        digest = key or digest_of(next(self._numbers) % self._active)
        begin_ns = clock_ns()
        principal = keyring.authenticate(self.keyring, digest, self.now_s)
        if key is not None:
            principal = keyring.entitled(principal, "m", self.now_s)
        known_ns = clock_ns()
        ask = AdmissionRequest(
            lease_id=f"lease-{next(self._leases)}",
            model="m",
            entitlement=principal.entitlement,
            pool=0,
            alternates=(),
            estimate_tokens=500,
            sequences=1,
        )
        lease = finished(self.store.admit(ask))
        ended_ns = clock_ns()
        self.cpu.add("authenticate", begin_ns, known_ns)
        self.cpu.add("admit", known_ns, ended_ns)
        return lease

    def end(self, lease: Lease) -> None:
        """Settle it."""
        begin_ns = clock_ns()
        self.store.settle(lease, USED)
        self.cpu.add("settle", begin_ns, clock_ns())


async def kept(directory: SqliteDirectory, rows: Iterable[Row]) -> None:
    """Put rows into a directory."""
    waiting = iter(rows)
    while puts := tuple(islice(waiting, _PUT_BATCH)):
        await directory.write(DirectoryChange(puts=puts), floor=0, after="")


def entitlement_point(size: Size) -> Figures:
    """Entering, a request's share, chores, the page, memory."""
    tenants = EntitlementSet(size)
    watched(lambda: kept(tenants.directory, entitlement_rows(size.entitlements)))
    gc.collect()
    resident = resident_bytes()
    found: Figures = {}
    _, found["enter_ms"], found["enter_hold_ms"] = watched(tenants.enter)
    gc.collect()
    found["bytes_each"] = (resident_bytes() - resident) / size.entitlements
    calm()
    # Every active one asks at least once, so that the tick has to look at all of them.
    for _ in range(max(size.active or size.entitlements, size.requests)):
        tenants.end(tenants.take())
    tenants.cpu.clear()
    for _ in range(size.requests):
        tenants.end(tenants.take())
    found |= parts(tenants.cpu)
    found |= _chores(tenants)
    found |= _page(tenants, size)
    found["collection_ms"] = collection_ms()
    return found


def lease_point(size: Size) -> Figures:
    """The same with leases open: what admission and renewal cost, and the largest step."""
    tenants = EntitlementSet(size)
    watched(lambda: kept(tenants.directory, entitlement_rows(size.entitlements)))
    watched(tenants.enter)
    calm()
    gc.collect()
    resident = resident_bytes()
    held = [tenants.take() for _ in range(size.leases)]
    found: Figures = {"bytes_each": (resident_bytes() - resident) / size.leases}
    tenants.cpu.clear()
    # Leases end in any order; by as many turns as there are leases each structure is renewed.
    for number in range(max(size.requests, 2 * size.leases)):
        at = number * 7919 % len(held)
        tenants.end(held[at])
        held[at] = tenants.take()
    found |= parts(tenants.cpu)
    _, found["renew_ms"], found["renew_hold_ms"] = watched(tenants.store.renew)
    found |= _chores(tenants)
    tenants.now_s += 31.0
    _, found["reap_ms"], found["reap_hold_ms"] = watched(tenants.store.tick)
    return found


def parts(cpu: Cpu) -> Figures:
    """CPU of a request's parts."""
    found: Figures = {}
    for part in ("authenticate", "admit", "settle"):
        found[f"{part}_us"] = cpu.mean_us(part)
        for name, share in (("p50", 0.5), ("p99", 0.99), ("most", 1.0)):
            found[f"{part}_{name}_us"] = cpu.quantile_us(part, share)
    for name in ("us", "p50_us"):
        found[f"request_{name}"] = sum(
            found[f"{part}_{name}"] for part in ("authenticate", "admit", "settle")
        )
    return found


def _chores(tenants: EntitlementSet) -> Figures:
    """The tick, a survey after a change, a poll of the directory."""
    found: Figures = {}
    watched(tenants.store.tick)
    tenants.now_s += 6.0
    _, found["tick_ms"], found["tick_hold_ms"] = watched(tenants.store.tick)
    tenants.upkeep.entitlements_changed("m")
    _, found["survey_ms"], found["survey_hold_ms"] = watched(tenants.upkeep.step)
    _, found["step_ms"], _ = watched(tenants.upkeep.step)
    _, found["poll_ms"], found["poll_hold_ms"] = watched(tenants.tenancy.poll)
    return found


def _page(tenants: EntitlementSet, size: Size) -> Figures:
    """/metrics when every active entitlement was counted."""
    metrics = Metrics()
    for number in range(size.active or size.entitlements):
        name = f"entitlement-{number}"
        metrics.admission.add(name, "admitted", "")
        for kind in ("prompt", "completion", "cached"):
            metrics.tokens.add("m", name, kind, by=100)
    names = [f"entitlement-{number}" for number in range(min(size.entitlements, ACCOUNTS_SHOWN))]
    views = finished(tenants.store.view("m", names))
    pools = finished(tenants.store.pools("m"))
    figures = PoolSnapshot(model="m", pools=(("main", pools[0]),), accounts=tuple(views))
    page = MetricsPage(
        metrics, [tenants.served], lambda: 0, tenants.clock, token_pools=lambda: (figures,)
    )
    text, spent_ms, hold_ms = watched(lambda: write(page.collect()))
    return {"page_ms": spent_ms, "page_hold_ms": hold_ms, "page_bytes": len(text)}


# -- `bench scale`, tenants: 10 to 100,000 of them with three keys and an entitlement each


KEYS_EACH: Final = 3
STEP: Final = 7_919
"""Visits keys in no order of memory."""


def tenant_digest(tenant: int, key: int) -> bytes:
    """SHA-256 of a key."""
    return sha256(b"sk-scale-%d-%d" % (tenant, key)).digest()


def tenant_rows(count: int) -> Iterator[Row]:
    """So many tenants and their keys, as an administrator made them."""
    for number in range(count):
        tenant, uid = f"tenant-{number}", f"t{number:015x}"
        yield Row(kind="tenant", name=tenant, uid=uid, fields={"name": tenant}, changed=1)
        for key in range(KEYS_EACH):
            name, digest = f"key-{key}", tenant_digest(number, key).hex()
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
        _, found["poll_ms"], found["poll_hold_ms"] = watched(tenants.tenancy.poll)
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
        rights.end(rights.take(tenant_digest(*divmod(number, KEYS_EACH))))
    rights.cpu.clear()
    for number in range(size.requests):
        rights.end(rights.take(tenant_digest(*divmod(number * STEP % keys, KEYS_EACH))))
    return parts(rights.cpu)
