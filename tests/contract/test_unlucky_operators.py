"""Operators of several gateways who come at once, too late, or after the directory lost writes.

Any history of changes on gateways that share a directory, which may be away, or be replaced by
an older copy of itself; gateways start again with older files. Always: a key whose revocation was
answered with success lets nobody in at the gateway that answered, nor at any that heard of it.
Once every gateway has polled: it lets nobody in anywhere, what was deleted is gone, what was
suspended is suspended, what was made is there, and all gateways know the same.
"""

import asyncio
import copy
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from bench.common.redis_server import RedisServer
from gateway.adapters.store.backends import open_directory
from gateway.errors import Refusal
from gateway.policy.request.head import digest_of
from gateway.ports import Directory, EntitlementEntry
from tests.entitlement_fakes import EntitlementRig, FlakyDirectory, from_file
from tests.fakes import FakeClock
from tests.histories import histories

WHO = "adm1n000"
NAMES = ("a", "f")
"""The last one is the configuration file's."""
GATEWAYS = 3
SKEWS_S = (0.0, 0.45, -0.45)
"""What each gateway's clock shows beyond the true time."""
WHAT = (
    *("create", "create", "add_key", "revoke", "revoke", "delete", "suspend", "resume", "expire"),
    "change",
)
WHICH = st.integers(0, 7)
"""One of those there are: what is drawn depends on no answer."""
FILE_KEYS = ("file-key-1", "file-key-2")

_T = TypeVar("_T")


def sha(key: str) -> str:
    return digest_of(key.encode()).hex()


class Shared(Protocol):
    """A directory that gateways share."""

    loses: bool
    """Whether it can be replaced by an older copy."""

    def open(self) -> Directory[EntitlementEntry]:
        """One gateway's view."""

    def copy(self) -> Any:
        """What it holds."""

    def restore(self, older: Any) -> None:
        """Be replaced by an older copy."""

    def close(self) -> None:
        """Let go of it."""


class InMemory:
    loses = True

    def __init__(self) -> None:
        self.directory = FlakyDirectory()

    def open(self) -> Directory[EntitlementEntry]:
        return self.directory

    def copy(self) -> Any:
        return copy.deepcopy(self.directory.__dict__)

    def restore(self, older: Any) -> None:
        self.directory.__dict__.update(copy.deepcopy(older))

    def close(self) -> None:
        pass


class InSqlite:
    loses = False

    def __init__(self, path: Path) -> None:
        self.path = path
        path.unlink(missing_ok=True)

    def open(self) -> Directory[EntitlementEntry]:
        return open_directory(f"sqlite:///{self.path}", EntitlementEntry, "entitlements")

    def copy(self) -> Any:
        raise AssertionError

    def restore(self, older: Any) -> None:
        raise AssertionError

    def close(self) -> None:
        pass


class InRedis:
    loses = True

    def __init__(self, server: RedisServer) -> None:
        self.url = server.url
        self.client = server.client()
        self.client.flushall()

    def open(self) -> Directory[EntitlementEntry]:
        return open_directory(self.url, EntitlementEntry, "entitlements")

    def copy(self) -> Any:
        return {key: self.client.dump(key) for key in self.client.scan_iter()}

    def restore(self, older: Any) -> None:
        self.client.flushall()
        for key, held in older.items():
            self.client.restore(key, 0, held)

    def close(self) -> None:
        self.client.close()


class Key:
    """A key that was given to a tenant."""

    def __init__(self, name: str, secret: str) -> None:
        self.name = name
        self.secret = secret
        self.fingerprint = sha(secret)[:8]
        self.ended = False
        """Its revocation, or its entitlement's deletion, was answered with success."""


class OperatorsMachine(RuleBasedStateMachine):
    """Any history of changes by several operators."""

    opener: Callable[[], Shared]

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.clocks = [FakeClock(1_900_000_000.0 + skew_s) for skew_s in SKEWS_S]
        self.shared = type(self).opener()
        self.keys = [Key("f", secret) for secret in FILE_KEYS]
        self.suspended: dict[str, bool] = {}
        """Where the last that was said of it is certain."""
        self.expires: dict[str, bool] = {}
        self.present: dict[str, bool] = {"f": True}
        self.twins: set[str] = set()
        """Names under which two were made, one of which the directory lost: either may stay."""
        self.empty = self.shared.copy() if self.shared.loses else None
        self.older: list[Any] = [self.empty] if self.shared.loses else []
        self.refusing: list[set[str]] = []
        """By gateway: keys that it ended, or heard of as revoked."""
        self.rigs: list[EntitlementRig] = []
        for at in range(GATEWAYS):
            self.rigs.append(self.started(at, 0))
            self.refusing.append(set())
        self.settle()

    def run(self, call: Coroutine[Any, Any, _T]) -> _T:
        return self.loop.run_until_complete(call)

    def started(self, at: int, number: int) -> EntitlementRig:
        """A gateway with the file's first edition, or a later one."""
        keys = [sha(key) for key in FILE_KEYS[: number + 1]]
        entry = from_file("f", *keys, digest=str(number))
        rig = EntitlementRig(cast("FlakyDirectory", self.shared.open()), clock=self.clocks[at])
        return self.run(rig.start(entry, file_unix_s=100.0 * (number + 1)))

    # -- what operators do

    def doing(
        self, what: str, rig: EntitlementRig, name: str, which: int
    ) -> tuple[Awaitable[Any], list[Key]]:
        """The call, and which keys are void if it succeeds."""
        known = [key for key in self.keys if key.name == name]
        if what == "revoke":
            key = known[which % len(known)] if known else Key(name, "none")
            return rig.registry.revoke_key(name, key.fingerprint, WHO), [key]
        void = []
        if what == "delete":  # what this gateway knows by the name; another may be restored
            self.run(rig.sync.poll())
            void = [key for key in known if self.lets_in(rig, key.secret)]
        return self.asked(what, rig, name, which), void

    def asked(self, what: str, rig: EntitlementRig, name: str, which: int) -> Awaitable[Any]:
        registry = rig.registry
        if what == "create":
            return registry.create({"name": name, "tenant": "t", "model": "m"}, WHO)
        if what == "add_key":
            return registry.add_key(name, WHO)
        if what == "delete":
            return registry.delete(name, WHO)
        if what == "suspend":
            return registry.suspend(name, WHO)
        if what == "resume":
            return registry.suspend(name, WHO, undo=True)
        if what == "expire":
            return registry.expire(name, None, WHO)
        return registry.change(name, {"slo_target_ms": 1 + which}, WHO)

    def heard(
        self,
        what: str,
        at: int,
        name: str,
        answer: Any,
        void: list[Key],
        *,
        alone: bool,
        unheard: bool = False,
    ) -> None:
        """What an operator was told. `unheard`: by a gateway that knew of no suspension."""
        if isinstance(answer, Refusal):
            return
        for key in void:
            key.ended = True
            self.refusing[at].add(key.secret)
        if what in {"create", "add_key"}:
            self.keys.append(Key(name, answer["key"]))
        if what == "create" and self.present.get(name, True):
            self.twins.add(name)
        if not alone or name in self.twins:
            self.suspended.pop(name, None)
            self.expires.pop(name, None)
            self.present.pop(name, None)
        elif what in {"create", "delete"}:
            self.present[name] = what == "create"
            self.suspended[name] = self.expires[name] = False
        elif what == "suspend":
            self.suspended[name] = True
        elif what == "resume" and self.suspended.get(name) and not unheard:
            self.suspended[name] = False
        elif what == "resume":  # of a suspension that it has not heard of, if there is any
            self.suspended.pop(name, None)
        elif what == "expire":
            self.expires[name] = True

    @rule(
        which=WHICH,
        at=st.integers(0, GATEWAYS - 1),
        name=st.sampled_from(NAMES),
        what=st.sampled_from(WHAT),
    )
    def change(self, which: int, at: int, name: str, what: str) -> None:
        rig = self.rigs[at]
        self.pass_time()
        self.run(rig.sync.poll())
        known = rig.sync.index.entries.get(name)
        call, void = self.doing(what, rig, name, which)
        answer, unheard = self.run(tried(call)), known is not None and not known.terms.suspended
        self.heard(what, at, name, answer, void, alone=True, unheard=unheard)

    @rule(
        which=WHICH,
        at=st.permutations(range(GATEWAYS)),
        name=st.sampled_from(NAMES),
        one=st.sampled_from(WHAT),
        other=st.sampled_from(WHAT),
    )
    def change_at_once(self, which: int, at: list[int], name: str, one: str, other: str) -> None:
        self.pass_time()
        one_call, one_void = self.doing(one, self.rigs[at[0]], name, which)
        other_call, other_void = self.doing(other, self.rigs[at[1]], name, which)
        first, second = self.run(both(tried(one_call), tried(other_call)))
        self.heard(one, at[0], name, first, one_void, alone=False)
        self.heard(other, at[1], name, second, other_void, alone=False)

    def pass_time(self) -> None:
        """Gateways agree on the time better than operators are quick."""
        self.advance(1.0)

    def advance(self, seconds: float) -> None:
        for clock in self.clocks:
            clock.advance(seconds)

    @rule(at=st.integers(0, GATEWAYS - 1))
    def poll(self, at: int) -> None:
        self.run(self.rigs[at].sync.poll())

    # -- what befalls them

    @precondition(lambda self: self.shared.loses)
    @rule()
    def copy_is_taken(self) -> None:
        self.older = [*self.older[-2:], self.shared.copy()]

    @precondition(lambda self: self.shared.loses)
    @rule()
    def directory_comes_back_empty(self) -> None:
        self.shared.restore(self.empty)

    @precondition(lambda self: self.older)
    @rule(which=st.integers(-3, -1))
    def last_writes_are_lost(self, which: int) -> None:
        self.shared.restore(self.older[max(which, -len(self.older))])

    @precondition(lambda self: self.shared.loses)
    @rule(
        which=WHICH,
        at=st.permutations(range(GATEWAYS)),
        name=st.sampled_from(NAMES),
        one=st.sampled_from(WHAT),
        other=st.sampled_from(WHAT),
    )
    def change_is_lost(self, which: int, at: list[int], name: str, one: str, other: str) -> None:
        """The next who changes something has not heard of it."""
        older = self.shared.copy()
        self.change(which, at[0], name, one)
        self.shared.restore(older)
        self.change(which, at[1], name, other)

    @rule(at=st.integers(0, GATEWAYS - 1), edition=st.sampled_from([0, 0, 1]))
    def gateway_starts_again(self, at: int, edition: int) -> None:
        """What only one knows dies with it, so it goes when all have heard of all."""
        self.settle()
        if edition:  # where it is new it says all anew, but for a suspension
            self.expires.pop("f", None)
        self.run(self.rigs[at].sync.close())
        self.rigs[at] = self.started(at, edition)
        self.refusing[at] = {key.secret for key in self.keys if key.ended}

    @precondition(lambda self: self.older)
    @rule(
        at=st.integers(0, GATEWAYS - 1),
        which=st.integers(-3, -1),
        edition=st.sampled_from([0, 0, 1]),
        changed=st.booleans(),
    )
    def gateway_starts_on_older(self, at: int, which: int, edition: int, *, changed: bool) -> None:
        """It reads what the others know better, and may write before they say so."""
        self.settle()
        self.run(self.rigs[at].sync.close())
        self.last_writes_are_lost(which)
        self.expires.pop("f", None)
        self.rigs[at] = self.started(at, edition)
        self.refusing[at] = set()
        if changed:
            self.pass_time()
            self.run(tried(self.rigs[at].registry.change("f", {"slo_target_ms": 7}, WHO)))
        self.settle()

    # -- what must hold

    def lets_in(self, rig: EntitlementRig, secret: str) -> bool:
        return rig.keyring.find(digest_of(secret.encode())) is not None

    @invariant()
    def what_was_refused_for_good_is_refused(self) -> None:
        for rig, refusing in zip(self.rigs, self.refusing, strict=True):
            for key in self.keys:
                entry = rig.sync.index.entries.get(key.name)
                if entry is not None and sha(key.secret) in entry.revoked_sha256:
                    refusing.add(key.secret)
                assert not (key.secret in refusing and self.lets_in(rig, key.secret)), key.name

    @rule()
    def settle(self) -> None:
        for _ in range(3):
            self.advance(10.0)  # beyond any pause after a directory that was slow
            for rig in self.rigs:
                self.run(rig.sync.poll())
        known = [rig.sync.index.entries for rig in self.rigs]
        assert all(entries == known[0] for entries in known[1:])
        for rig in self.rigs:
            for key in self.keys:
                assert not (key.ended and self.lets_in(rig, key.secret)), key.name
            for name, present in self.present.items():
                assert (name in rig.sync.index.entries) == present, name
            for name, suspended in self.suspended.items():
                entry = rig.sync.index.entries.get(name)
                assert entry is None or entry.terms.suspended == suspended, name
            for name, expires in self.expires.items():
                entry = rig.sync.index.entries.get(name)
                assert entry is None or (entry.terms.expires_unix_s > 0) == expires, name

        self.twins.clear()
        for name in NAMES:  # what was not certain has become so
            entry = known[0].get(name)
            self.present[name] = entry is not None
            self.suspended[name] = entry is not None and entry.terms.suspended
            self.expires[name] = entry is not None and entry.terms.expires_unix_s > 0

    def teardown(self) -> None:
        try:
            self.settle()
        finally:
            for rig in self.rigs:
                self.run(rig.sync.close())
            self.shared.close()
            self.loop.close()


async def tried(call: Awaitable[_T]) -> _T | Refusal:
    try:
        return await call
    except Refusal as error:
        return error


async def both(one: Awaitable[Any], other: Awaitable[Any]) -> tuple[Any, Any]:
    return await asyncio.gather(one, other)


LIMITS = {"memory": 40, "sqlite": 10, "redis": 15}
"""A step is some files' or round trips' worth."""


@pytest.mark.parametrize(
    "name", ["memory", "sqlite", pytest.param("redis", marks=pytest.mark.redis)]
)
def test_any_history_keeps_what_operators_were_told(
    name: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    openers: dict[str, Callable[[], Shared]] = {
        "memory": InMemory,
        "sqlite": lambda: InSqlite(tmp_path / "sluice.db"),
        "redis": lambda: InRedis(request.getfixturevalue("redis_server")),
    }

    class Machine(OperatorsMachine):
        opener = staticmethod(openers[name])

    run_state_machine_as_test(Machine, settings=histories(LIMITS[name]))
