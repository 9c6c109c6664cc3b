"""Operators of several gateways who come at once, too late, or after the directory lost writes.

Any history of changes on gateways that share a directory, which may be away, come back empty or be
replaced by an older copy of itself; gateways reload or start again with files that differ, whose
sections leave and return. A cluster grants an entitlement and withdraws it, of which gateways hear
late and in any order. Always: what was denied with success (a key revoked, an entitlement or a
tenant deleted) opens nothing at the gateway that answered. Once the directory answers and every
gateway has polled: it opens nothing anywhere, what was suspended is suspended, what was made is
there and opens, as does what the cluster grants, and all gateways know the same.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, Final, TypeVar

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    rule,
    run_state_machine_as_test,
)

from bench.common.fleet import RedisServer
from gateway.errors import Refusal, StateFailure
from gateway.ports import Directory
from gateway.records.tenancy import (
    ClusterEntitlement,
    ClusterState,
    DirectoryChange,
    DirectoryState,
    FileEntitlement,
    TenancyFile,
    Written,
    fingerprint,
)
from gateway.store.backends import open_directory
from gateway.store.sqlite_directory import SqliteDirectory
from tests.fakes import FakeClock
from tests.histories import histories
from tests.tenancy_fakes import WHO, FlakyDirectory, TenancyRig, digest, file_key, file_of, section

GATEWAYS: Final = 2
SKEWS_S: Final = (0.0, 0.45)
"""What each gateway's clock shows beyond the true time."""
MANY: Final = 35
"""Revocations in a row."""
OWN_KEYS: Final = ("file-key-1", "file-key-2")
"""Of the file's entitlement `f`; sections list the first, or both."""
OF_CLUSTER: Final = "cluster-key"
"""Of the cluster's entitlement `c`."""
ENTITLEMENTS: Final = ("a", "f", "c")
TENANTS: Final = ("acme", "team")
"""The file lists `acme`, with its key `sk-web`."""
WHAT: Final = (
    *("create", "delete", "suspend", "resume", "expire", "change"),
    *("add_key", "revoke", "revoke"),
)
WHAT_OF_TENANTS: Final = (
    *("create_tenant", "delete_tenant", "suspend_tenant", "resume_tenant"),
    *("add_tenant_key", "revoke_tenant_key", "suspend_key", "resume_key", "rotate_key"),
)
ENDING: Final = frozenset({"delete", "delete_tenant", "revoke", "revoke_tenant_key", "rotate_key"})
"""What ends keys."""
OPERATIONS: Final = st.one_of(
    st.tuples(st.sampled_from(WHAT), st.sampled_from(ENTITLEMENTS)),
    st.tuples(st.sampled_from(WHAT_OF_TENANTS), st.sampled_from(TENANTS)),
).filter(lambda each: each not in {("create", "f"), ("create", "c"), ("create_tenant", "acme")})
WHICH: Final = st.integers(0, 7)
"""One of those there are: what is drawn depends on no answer."""
AT: Final = st.integers(0, GATEWAYS - 1)
EDITIONS: Final = st.sampled_from([0, 0, 1, 2])

_T = TypeVar("_T")


def edition_of(number: int) -> TenancyFile:
    """The file's editions: 0, 1 with a changed section, 2 without the sections."""
    keys = [digest(key).hex() for key in OWN_KEYS[: number + 1]]
    base: list[FileEntitlement] = [section("t", tenant="other")]
    if number == 2:
        return file_of(entitlements=base, unix_s=300.0)
    f = section("f", *keys, digest=str(number), place=2, slo_target_ms=100 + number)
    web = file_key("web", entitlements=("f",))
    return file_of("acme", entitlements=[*base, f], unix_s=100.0 * (number + 1), web=web)


def granted(revision: int, *, grants: bool) -> ClusterState:
    """What the cluster's controller publishes: its entitlement, or nothing."""
    entitlement = ClusterEntitlement(
        name="c",
        fields={"tenant": "team", "model": "m", "slo_target_ms": revision},
        digests=(digest(OF_CLUSTER).hex(),),
        source="TokenEntitlement team/c",
        uid="u",
    )
    entitlements = (entitlement,) if grants else ()
    return ClusterState(version=(1, revision), whole=True, entitlements=entitlements)


class Shared:
    """A directory that gateways share, which can be away or be replaced by an older copy."""

    def __init__(self) -> None:
        self.away = False

    def open(self) -> Directory:
        return Sometimes(self, self.opened())

    def opened(self) -> Directory:
        raise NotImplementedError

    def copy(self) -> Any:
        """What it holds."""
        raise NotImplementedError

    def restore(self, older: Any) -> None:
        """Be replaced by an older copy."""
        raise NotImplementedError

    def close(self) -> None:
        """Let go of it."""


class Sometimes:
    """One gateway's view."""

    def __init__(self, shared: Shared, directory: Directory) -> None:
        self._shared = shared
        self._directory = directory

    def _there(self) -> Directory:
        if self._shared.away:
            raise StateFailure("away")
        return self._directory

    async def read(self, since: int, mark: str) -> DirectoryState | None:
        return await self._there().read(since, mark)

    async def write(self, change: DirectoryChange, *, floor: int, after: str) -> Written:
        return await self._there().write(change, floor=floor, after=after)

    async def give_back(self, state: DirectoryState, *, floor: int) -> Written:
        return await self._there().give_back(state, floor=floor)

    async def close(self) -> None:
        await self._directory.close()


class InMemory(Shared):
    def __init__(self) -> None:
        super().__init__()
        self.directory = FlakyDirectory()

    def opened(self) -> Directory:
        return self.directory

    def copy(self) -> Any:
        return self.directory.copy()

    def restore(self, older: Any) -> None:
        self.directory.restore(older)

    def close(self) -> None:
        asyncio.run(SqliteDirectory.close(self.directory))


class InRedis(Shared):
    def __init__(self, server: RedisServer) -> None:
        super().__init__()
        self.url = server.url
        self.client = server.client()
        self.client.flushall()

    def opened(self) -> Directory:
        return open_directory(self.url)

    def copy(self) -> Any:
        return {key: self.client.dump(key) for key in self.client.scan_iter()}

    def restore(self, older: Any) -> None:
        self.client.flushall()
        for key, held in (older or {}).items():
            self.client.restore(key, 0, held)

    def close(self) -> None:
        self.client.close()


class Key:
    """A key that was given out."""

    def __init__(self, kind: str, owner: str, secret: str, name: str = "") -> None:
        self.kind = kind
        """`entitlement` or `tenant`."""
        self.owner = owner
        self.secret = secret
        self.name = name or secret
        self.fingerprint = fingerprint(digest(secret).hex())
        self.ended = False
        """Its revocation, or its owner's deletion, was answered with success."""
        self.sure = True
        """What was said of it and its owner came in an order that everybody knows."""


class OperatorsMachine(RuleBasedStateMachine):
    """Any history of changes by several operators."""

    opener: Callable[[], Shared]

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.clocks = [FakeClock(1_900_000_000.0 + skew_s) for skew_s in SKEWS_S]
        self.shared = type(self).opener()
        self.keys = [Key("entitlement", "f", secret) for secret in OWN_KEYS]
        self.keys.append(Key("tenant", "acme", "sk-web", "web"))
        self.keys.append(Key("entitlement", "c", OF_CLUSTER))
        self.published = [granted(1, grants=True)]
        self.said: dict[str, bool] = {
            f"there {of}": False for of in ("entitlement a", "tenant team")
        }
        """`suspended ...` and `there ...` by what it is of, as far as it is certain."""
        self.twins: set[str] = set()
        """Names under which gateways may know another one each, until all have heard of all."""
        self.older: list[Any] = [None]
        self.editions = [0] * GATEWAYS
        self.refusing: list[set[str]] = [set() for _ in range(GATEWAYS)]
        """By gateway: keys that it ended."""
        self.rigs = [self.started(at, 0) for at in range(GATEWAYS)]
        self.settle()

    def run(self, call: Coroutine[Any, Any, _T]) -> _T:
        return self.runner.run(call)

    def started(self, at: int, edition: int) -> TenancyRig:
        self.editions[at] = edition
        rig = TenancyRig(self.shared.open(), clock=self.clocks[at])
        rig.keyring.unread = {"tenants"}
        return self.run(rig.start(edition_of(edition)))

    # -- what operators do

    def asked(self, what: str, at: int, name: str, which: int) -> tuple[Awaitable[Any], list[Key]]:
        """The call, and the keys that it is about."""
        entitlements, tenants = self.rigs[at].entitlements, self.rigs[at].tenants
        kind = "entitlement" if what in WHAT else "tenant"
        known = [key for key in self.keys if (key.kind, key.owner) == (kind, name)]
        key = known[which % len(known)] if known else Key(kind, name, "none", "none")
        calls: dict[str, Callable[[], Awaitable[Any]]] = {
            "create": lambda: entitlements.create(
                {"name": name, "tenant": "team", "model": "m"}, WHO
            ),
            "delete": lambda: entitlements.delete(name, WHO),
            "suspend": lambda: entitlements.suspend(name, WHO),
            "resume": lambda: entitlements.suspend(name, WHO, undo=True),
            "expire": lambda: entitlements.expire(name, None, WHO),
            "change": lambda: entitlements.change(name, {"slo_target_ms": 1 + which}, WHO),
            "add_key": lambda: entitlements.add_key(name, WHO),
            "revoke": lambda: entitlements.revoke_key(name, key.fingerprint, WHO),
            "create_tenant": lambda: tenants.create({"name": name}, WHO),
            "delete_tenant": lambda: tenants.delete(name, WHO, force=bool(which % 2)),
            "suspend_tenant": lambda: tenants.change(name, {"suspended": True}, WHO),
            "resume_tenant": lambda: tenants.change(name, {"suspended": False}, WHO),
            "add_tenant_key": lambda: tenants.add_key(name, {"name": f"k{len(self.keys)}"}, WHO),
            "revoke_tenant_key": lambda: tenants.revoke_key(name, key.fingerprint, WHO),
            "suspend_key": lambda: tenants.change_key(
                name, key.fingerprint, {"suspended": True}, WHO
            ),
            "resume_key": lambda: tenants.change_key(
                name, key.fingerprint, {"suspended": False}, WHO
            ),
            "rotate_key": lambda: tenants.rotate_key(name, key.fingerprint, {"grace_s": 0}, WHO),
        }
        if "delete" in what:  # what this gateway knows of it; another may be given back
            also = [k for k in self.keys if k.owner == "a" and what == "delete_tenant"]
            known = [k for k in known + also * (name == "team") if self.lets_in(at, k.secret)]
            return calls[what](), known
        return calls[what](), [key]

    def heard(
        self, what: str, at: int, name: str, answer: Any, keys: list[Key], *, alone: bool
    ) -> None:
        """What an operator was told."""
        if isinstance(answer, Refusal):
            return
        kind = "entitlement" if what in WHAT else "tenant"
        of = f"{kind} {name}"
        if what in ENDING:
            for key in keys:
                key.ended = True
                self.refusing[at].add(key.secret)
                for namesake in self.keys:  # values that this gateway may not have heard of
                    if (namesake.owner, namesake.name) == (key.owner, key.name):
                        namesake.sure = False
        if what == "delete_tenant" and name == "team":
            for key in self.keys:
                key.sure = key.sure and key.owner not in {"a", "team"}
            self.said.pop("there entitlement a", None)
        if "key" in answer and what != "revoke":
            name_of = str(answer.get("name", "")) if kind == "tenant" else ""
            made = Key(kind, name, answer["key"], name_of)
            # A gateway that has not heard of a revocation may rotate what is gone.
            made.sure = alone and of not in self.twins and what != "rotate_key"
            self.keys.append(made)
        if what.startswith("create") and self.said.get(f"there {of}", True):
            self.twins.add(of)
        if not alone or of in self.twins:
            for each in ("suspended", "there"):
                self.said.pop(f"{each} {of}", None)
            for key in self.keys:
                if (key.kind, key.owner) == (kind, name):
                    key.sure = False
                    self.said.pop(f"suspended key {key.secret}", None)
        elif what.startswith("create"):
            self.said[f"there {of}"] = True
            if kind == "entitlement":
                self.said[f"suspended {of}"] = False
        elif what in {"delete", "delete_tenant"}:
            self.said[f"there {of}"] = False
            self.twins.add(of)  # whoever has not heard of it may still add to it
        elif what.endswith("_key") and what.startswith(("suspend", "resume")):
            self.said[f"suspended key {keys[0].secret}"] = what == "suspend_key"
        elif what.startswith(("suspend", "resume")):
            self.said[f"suspended {of}"] = what.startswith("suspend")

    @rule(which=WHICH, at=AT, operation=OPERATIONS)
    def change(self, which: int, at: int, operation: tuple[str, str]) -> None:
        what, name = operation
        self.advance(1.0)
        call, keys = self.asked(what, at, name, which)
        self.heard(what, at, name, self.run(tried(call)), keys, alone=True)

    @rule(which=WHICH, at=st.permutations(range(GATEWAYS)), one=OPERATIONS, other=OPERATIONS)
    def change_at_once(
        self, which: int, at: list[int], one: tuple[str, str], other: tuple[str, str]
    ) -> None:
        self.advance(1.0)
        one_call, one_keys = self.asked(one[0], at[0], one[1], which)
        other_call, other_keys = self.asked(other[0], at[1], other[1], which)
        first, second = self.run(both(tried(one_call), tried(other_call)))
        self.heard(*one[:1], at[0], one[1], first, one_keys, alone=False)
        self.heard(*other[:1], at[1], other[1], second, other_keys, alone=False)

    @rule(at=AT)
    def many_are_revoked(self, at: int) -> None:
        """More than anything that forgets the oldest would keep."""
        for _ in range(MANY):
            self.advance(0.01)
            added = self.run(tried(self.rigs[at].tenants.add_key("acme", {"name": "x"}, WHO)))
            if isinstance(added, Refusal):
                return
            key = Key("tenant", "acme", str(added["key"]), "x")
            self.keys = [*self.keys[-12:], key]
            call = self.rigs[at].tenants.revoke_key("acme", "x", WHO)
            if not isinstance(self.run(tried(call)), Refusal):
                key.ended, key.sure = True, False
                self.refusing[at].add(key.secret)

    def advance(self, seconds: float) -> None:
        """Gateways agree on the time better than operators are quick."""
        for clock in self.clocks:
            clock.advance(seconds)

    @rule(at=AT)
    def poll(self, at: int) -> None:
        self.run(self.rigs[at].sync.poll())

    @rule(grants=st.booleans())
    def cluster_publishes(self, *, grants: bool) -> None:
        revision = self.published[-1].version[1] + 1
        self.published = [*self.published[-2:], granted(revision, grants=grants)]

    @rule(at=AT, which=st.integers(-3, -1))
    def cluster_is_heard(self, at: int, which: int) -> None:
        self.hear(at, self.published[max(which, -len(self.published))])

    def hear(self, at: int, state: ClusterState) -> None:
        self.run(self.rigs[at].tenancy.take_cluster(state, frozenset()))

    # -- what befalls them

    @rule()
    def directory_goes_away(self) -> None:
        self.shared.away = True

    @rule()
    def directory_comes_back(self) -> None:
        self.shared.away = False

    @rule()
    def copy_is_taken(self) -> None:
        self.older = [*self.older[-2:], self.shared.copy()]

    @rule()
    def directory_comes_back_empty(self) -> None:
        self.shared.restore(None)
        self.shared.away = False

    @rule(which=st.integers(-3, -1))
    def last_writes_are_lost(self, which: int) -> None:
        self.shared.restore(self.older[max(which, -len(self.older))])

    @rule(at=AT, edition=EDITIONS)
    def gateway_reloads(self, at: int, edition: int) -> None:
        self.editions[at] = edition
        self.run(self.rigs[at].tenancy.adopt(edition_of(edition)))

    @rule(which=WHICH, at=st.permutations(range(GATEWAYS)), one=OPERATIONS, other=OPERATIONS)
    def change_is_lost(
        self, which: int, at: list[int], one: tuple[str, str], other: tuple[str, str]
    ) -> None:
        """The next who changes something has not heard of it."""
        older = self.shared.copy()
        self.change(which, at[0], one)
        self.shared.restore(older)
        self.change(which, at[1], other)

    @rule(at=AT, edition=EDITIONS, away=st.booleans())
    def gateway_starts_again(self, at: int, edition: int, *, away: bool) -> None:
        """What only one knows dies with it, so it goes when all have heard of all."""
        self.settle()
        self.shared.away = away
        self.run(self.rigs[at].sync.close())
        if away:  # it knows nothing, and may read less than the others know
            self.refusing[at] = set()
        self.rigs[at] = self.started(at, edition)

    @rule(at=AT, which=st.integers(-3, -1), edition=EDITIONS, operation=OPERATIONS)
    def gateway_starts_on_older(
        self, at: int, which: int, edition: int, operation: tuple[str, str]
    ) -> None:
        """It reads what the others know better, and may write before they say so."""
        self.settle()
        self.run(self.rigs[at].sync.close())
        self.last_writes_are_lost(which)
        self.refusing[at] = set()
        self.rigs[at] = self.started(at, edition)
        # What it finds may be another one of the name than the others have.
        self.twins |= {"entitlement a", "tenant team"}
        self.change(0, at, operation)

    # -- what must hold

    def lets_in(self, at: int, secret: str) -> bool:
        """Whether a key opens anything; suspension and expiry apart."""
        keyring = self.rigs[at].keyring
        return not keyring.unread and keyring.find(digest(secret)) is not None

    def suspended(self, at: int, of: str) -> bool | None:
        """Whether it is refused as suspended; None for what is not there."""
        kind, _, name = of.partition(" ")
        tenancy = self.rigs[at].tenancy
        if kind == "tenant":
            return name in self.rigs[at].keyring.held
        if kind == "entitlement":
            entry = tenancy.index.entries.get(name)
            return None if entry is None else entry.terms.suspended
        keys = [key for name in TENANTS for key in tenancy.tenant(name).keys]
        return next((k.key.suspended for k in keys if k.key.sha256 == digest(name)), None)

    @invariant()
    def what_was_refused_for_good_is_refused(self) -> None:
        for at in range(GATEWAYS):
            assert not [k for k in self.refusing[at] if self.lets_in(at, k)]

    @rule()
    def settle(self) -> None:
        self.shared.away = False
        heard = 0
        for _ in range(20):  # a busy machine's Redis may be late
            self.advance(10.0)  # beyond any pause after a directory that was away
            for rig in self.rigs:
                self.run(rig.sync.poll())
            heard += all(rig.sync.up for rig in self.rigs)
            if heard == 3:
                break
        for at in range(GATEWAYS):
            self.hear(at, self.published[-1])
        known = [rig.tenancy.known for rig in self.rigs]
        assert all(one.rows == known[0].rows for one in known[1:])
        assert all(meant(one) == meant(known[0]) for one in known[1:])
        for at, rig in enumerate(self.rigs):
            for key in self.keys:
                opens = self.lets_in(at, key.secret)
                assert not (key.ended and opens), (key.kind, key.owner, key.secret)
                if key.sure and not key.ended:
                    assert opens == self.expected(at, key), (key.kind, key.owner, key.secret)
            for said, value in self.said.items():
                what, _, of = said.partition(" ")
                if what == "suspended":
                    assert self.suspended(at, of) in (None, value), said
                elif of == "entitlement a":
                    assert ("a" in rig.tenancy.index.entries) == value, said
                elif of == "tenant team":
                    assert rig.tenancy.tenant("team").exists == value, said
        self.twins.clear()
        self.refusing = [{key.secret for key in self.keys if key.ended} for _ in self.rigs]
        tenancy = self.rigs[0].tenancy
        self.said["there entitlement a"] = "a" in tenancy.index.entries
        self.said["there tenant team"] = tenancy.tenant("team").exists
        for key in self.keys:  # what was not certain has become so
            key.sure = key.sure or (key.owner in {"a", "team"} and self.lets_in(0, key.secret))

    def expected(self, at: int, key: Key) -> bool:
        """Whether a key that nobody ended opens, by the gateway's file and what is there."""
        edition = self.editions[at]
        if key.secret in OWN_KEYS:
            return edition != 2 and OWN_KEYS.index(key.secret) <= edition
        if key.secret == OF_CLUSTER:
            return bool(self.published[-1].entitlements)
        if key.owner in ("f", "acme"):
            return edition != 2
        return self.said.get(f"there {key.kind} {key.owner}", True)

    def teardown(self) -> None:
        try:
            self.settle()
        finally:
            for rig in self.rigs:
                self.run(rig.sync.close())
            self.shared.close()
            self.runner.close()


def meant(known: Any) -> dict[str, tuple[float, int]]:
    return {name: (each.value, each.changed) for name, each in known.denials.items()}


async def tried(call: Awaitable[_T]) -> _T | Refusal:
    try:
        return await call
    except Refusal as error:
        return error


async def both(one: Awaitable[Any], other: Awaitable[Any]) -> tuple[Any, Any]:
    return await asyncio.gather(one, other)


LIMITS = {"memory": 40, "redis": 15}
"""A step is some round trips' worth."""


@pytest.mark.parametrize("name", ["memory", pytest.param("redis", marks=pytest.mark.redis)])
def test_any_history_keeps_what_operators_were_told(
    name: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    openers: dict[str, Callable[[], Shared]] = {
        "memory": InMemory,
        "redis": lambda: InRedis(request.getfixturevalue("redis_server")),
    }

    class Machine(OperatorsMachine):
        opener = staticmethod(openers[name])

    run_state_machine_as_test(Machine, settings=histories(LIMITS[name]))
