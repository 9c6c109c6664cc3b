"""How the file, the directory and other replicas join in, and what survives what."""

import asyncio
import hashlib
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import msgspec
import pytest

from gateway.adapters.entitlements.index import EntitlementIndex, File
from gateway.adapters.store.sqlite.directory import SqliteDirectory
from gateway.errors import Conflict, StateFailure, Unavailable
from gateway.policy.entitlements.entitlement import Entitlement
from gateway.policy.request.head import digest_of
from gateway.ports import DirectoryState, EntitlementEntry
from gateway.stages.authenticate import authenticate
from tests.entitlement_fakes import EntitlementRig, FlakyDirectory, from_file

WHO = "adm1n000"
D1, D2, D3, D4 = (digits * 32 for digits in ("11", "22", "33", "44"))


def created(rig: EntitlementRig) -> list[tuple[str, int]]:
    return [(t.name, t.created) for t in rig.registry.terms("m")]


async def test_without_any_entitlement_the_gateway_stays_open() -> None:
    rig = await EntitlementRig().start()
    assert rig.keyring.open


async def test_the_file_s_entitlements_are_numbered_in_its_order_and_defined() -> None:
    rig = await EntitlementRig().start(from_file("b", D1), from_file("a", D2))
    assert created(rig) == [("b", 1), ("a", 2)]
    assert rig.names() == ["a", "b"]
    assert rig.changed == ["m"]
    assert not rig.keyring.open


async def test_numbers_survive_a_restart_and_new_ones_come_last() -> None:
    first = await EntitlementRig().start(from_file("b"), from_file("c"))
    await first.registry.create({"name": "mine", "tenant": "t", "model": "m"}, WHO)
    again = await EntitlementRig(first.directory).start(
        from_file("a"), from_file("b"), from_file("c")
    )
    assert created(again) == [("b", 1), ("c", 2), ("mine", 3), ("a", 4)]


async def test_an_admin_s_change_stays_until_the_file_s_section_changes() -> None:
    first = await EntitlementRig().start(from_file("a", D1, slo_target_ms=100))
    await first.registry.change("a", {"slo_target_ms": 5}, WHO)
    same = await EntitlementRig(first.directory).start(from_file("a", D1, slo_target_ms=100))
    assert same.store.defined["m", "a"].slo_ms == 5
    changed = await EntitlementRig(first.directory).start(
        from_file("a", D2, digest="2", slo_target_ms=70)
    )
    entry = changed.sync.index.entries["a"]
    assert (entry.terms.slo_ms, entry.terms.created, entry.key_sha256) == (70, 1, (D2,))


async def test_a_changed_section_does_not_end_a_suspension() -> None:
    first = await EntitlementRig().start(from_file("a"))
    await first.registry.suspend("a", WHO)
    again = await EntitlementRig(first.directory).start(from_file("a", digest="2"))
    assert again.store.defined["m", "a"].suspended


async def test_what_left_the_file_goes_and_an_admin_s_own_stays() -> None:
    first = await EntitlementRig().start(from_file("a", D1))
    await first.registry.create({"name": "mine", "tenant": "t", "model": "m"}, WHO)
    again = await EntitlementRig(first.directory).start()
    assert again.names() == ["mine"]
    assert [e.terms.name for e in (await first.directory.load()).entries] == ["mine"]


async def test_the_file_takes_over_an_admin_s_namesake() -> None:
    first = await EntitlementRig().start()
    await first.registry.create({"name": "a", "tenant": "t", "model": "m"}, WHO)
    again = await EntitlementRig(first.directory).start(from_file("a", D1))
    entry = again.sync.index.entries["a"]
    assert (entry.origin, entry.key_sha256, entry.terms.tenant) == ("file", (D1,), "acme")
    assert (await EntitlementRig(first.directory).start()).names() == []


async def test_what_moves_to_another_model_leaves_the_first() -> None:
    rig = await EntitlementRig().start(from_file("a", D1))
    async with rig.sync.lock:
        known = rig.sync.index.entries["a"]
        await rig.sync.put(
            msgspec.structs.replace(from_file("a", D1, model="plain"), version=known.version)
        )
    assert rig.names() == []
    assert list(rig.registry.terms("m")) == []
    assert [t.name for t in rig.registry.terms("plain")] == ["a"]


@pytest.mark.parametrize("origin", ["admin", "file"])
async def test_an_entitlement_of_a_model_that_is_not_served_here_is_left_alone(
    caplog: pytest.LogCaptureFixture, origin: Literal["admin", "file"]
) -> None:
    directory = FlakyDirectory()
    other = EntitlementEntry(
        terms=Entitlement(name="x", model="other", created=4), key_sha256=(D1,), origin=origin
    )
    await directory.put(other)
    rig = await EntitlementRig(directory).start(from_file("a"))
    await rig.sync.poll()
    assert created(rig) == [("a", 5)]
    assert caplog.text.count("entitlement x is for model other, which is not configured") == 1
    state = {e.terms.name: e for e in (await directory.load()).entries}["x"]
    assert state == msgspec.structs.replace(other, version=1)
    with pytest.raises(Conflict):
        await rig.registry.create({"name": "x", "tenant": "t", "model": "m"}, WHO)
    await directory.delete(state)
    await rig.registry.create({"name": "x", "tenant": "t", "model": "m"}, WHO)


async def test_what_moves_to_a_model_that_is_not_served_here_goes() -> None:
    rig = await EntitlementRig().start()
    await rig.registry.create({"name": "a", "tenant": "t", "model": "m"}, WHO)
    moved = Entitlement(name="a", model="other")
    await rig.directory.put(EntitlementEntry(terms=moved, version=1))
    await rig.sync.poll()
    assert (rig.names(), rig.sync.index.entries) == ([], {})


async def test_replicas_hear_of_each_other_s_changes_with_a_poll() -> None:
    one = await EntitlementRig().start()
    other = await EntitlementRig(one.directory).start()
    key = str((await one.registry.create({"name": "a", "tenant": "t", "model": "m"}, WHO))["key"])
    assert other.keyring.find(digest_of(key.encode())) is None
    await other.sync.poll()
    assert other.keyring.find(digest_of(key.encode())) is not None
    assert other.names() == ["a"]
    await other.registry.suspend("a", WHO)
    await one.sync.poll()
    assert one.store.defined["m", "a"].suspended
    await one.registry.delete("a", WHO)
    await other.sync.poll()
    assert other.names() == []
    assert other.keyring.find(digest_of(key.encode())) is None
    assert not other.keyring.open


async def test_a_change_is_made_on_what_another_replica_changed_last() -> None:
    one = await EntitlementRig().start(from_file("a"))
    other = await EntitlementRig(one.directory).start(from_file("a"))
    await one.registry.change("a", {"slo_target_ms": 5}, WHO)
    await other.registry.change("a", {"tokens_per_second": 7}, WHO)
    await one.sync.poll()
    terms = one.store.defined["m", "a"]
    assert (terms.slo_ms, terms.tokens_per_s) == (5, 7)


async def test_hearing_of_one_s_own_change_tells_the_store_nothing_new() -> None:
    rig = await EntitlementRig().start(from_file("a"))
    await rig.registry.suspend("a", WHO)
    calls = rig.store.calls
    for _ in range(3):
        await rig.sync.poll()
    assert rig.store.calls == calls
    assert rig.changed == ["m", "m"]


async def test_with_the_directory_away_the_file_serves_alone_until_it_is_back() -> None:
    directory = FlakyDirectory()
    before = await EntitlementRig(directory).start(from_file("b"))
    await before.registry.create({"name": "mine", "tenant": "t", "model": "m"}, WHO)
    directory.fail_with = StateFailure("away")
    rig = await EntitlementRig(directory).start(from_file("a", D1), from_file("b"))
    assert rig.names() == ["a", "b"]
    assert not rig.keyring.open
    directory.fail_with = None
    rig.clock.advance(10.0)
    await rig.sync.poll()
    assert created(rig) == [("b", 1), ("mine", 2), ("a", 3)]


async def test_no_key_opens_before_the_directory_was_read_once() -> None:
    directory = FlakyDirectory()
    directory.fail_with = StateFailure("away")
    rig = EntitlementRig(directory)
    rig.keyring.unread = {"entitlements"}
    await rig.start(from_file("a", D1))
    for asked in (bytes.fromhex(D1), None):
        with pytest.raises(Unavailable, match="does not know yet"):
            authenticate(rig.keyring, asked, rig.clock())
    directory.fail_with = None
    rig.clock.advance(10.0)
    await rig.sync.poll()
    assert authenticate(rig.keyring, bytes.fromhex(D1), rig.clock()).entitlement == "a"
    directory.fail_with = StateFailure("away")
    await rig.sync.adopt(File((from_file("a", D1),), 0.0))
    assert authenticate(rig.keyring, bytes.fromhex(D1), rig.clock()).entitlement == "a"


async def test_a_reload_with_the_directory_away_closes_what_left_the_file() -> None:
    rig = await EntitlementRig().start(
        from_file("a", D1, D2), from_file("b", D3), from_file("c", model="plain")
    )
    made = await rig.registry.create({"name": "mine", "tenant": "t", "model": "plain"}, WHO)
    rig.directory.fail_with = StateFailure("away")
    del rig.models["plain"]
    await rig.sync.adopt(File((from_file("a", D2, digest="2"), from_file("d", D4)), 0.0))
    opened = [rig.keyring.find(bytes.fromhex(d)) is not None for d in (D1, D2, D3, D4)]
    assert opened == [False, True, False, True]
    assert rig.keyring.find(digest_of(str(made["key"]).encode())) is None
    assert sorted(rig.sync.index.entries) == ["a", "d"]
    rig.directory.fail_with = None
    rig.clock.advance(10.0)
    await rig.sync.poll()
    assert created(rig) == [("a", 1), ("d", 5)]
    kept = {entry.terms.name for entry in (await rig.directory.load()).entries}
    assert "b" not in kept
    assert {"a", "d", "mine"} <= kept, "an admin's, of a model that others may serve"


@pytest.mark.parametrize(("guarded", "is_open"), [(True, False), (False, True)])
async def test_nobody_comes_in_keyless_before_the_directory_was_read(
    *, guarded: bool, is_open: bool
) -> None:
    directory = FlakyDirectory()
    directory.fail_with = StateFailure("away")
    rig = await EntitlementRig(directory).start(guarded=guarded)
    assert rig.keyring.open == is_open
    directory.fail_with = None
    rig.clock.advance(10.0)
    await rig.sync.poll()
    assert bool(rig.keyring.open)


async def test_a_directory_that_lost_its_memory_is_given_back_what_is_known(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rig = await EntitlementRig().start(from_file("a", D1), from_file("b"))
    await rig.registry.suspend("a", WHO)
    known = unversioned(rig.sync.index.entries.values())
    rig.directory.wipe()
    await rig.sync.poll()
    for _ in range(2):
        assert unversioned(rig.sync.index.entries.values()) == known
        assert unversioned((await rig.directory.load()).entries) == known
        await rig.sync.poll()
    assert caplog.text.count("lost its memory") == 1


def unversioned(entries: Iterable[EntitlementEntry]) -> list[EntitlementEntry]:
    found = [msgspec.structs.replace(entry, version=0) for entry in entries]
    return sorted(found, key=lambda entry: entry.terms.name)


async def test_what_was_deleted_so_long_ago_that_nobody_remembers_stays_deleted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gateway.adapters.store.directory.TOMBSTONES", 2)
    rig = await EntitlementRig().start(from_file("a"))
    await rig.registry.create({"name": "mine", "tenant": "t", "model": "m"}, WHO)
    rig.directory.fail_with = StateFailure("away")
    await rig.sync.poll()
    rig.clock.advance(2 * 86_400.0)
    rig.directory.fail_with = None
    other = await EntitlementRig(rig.directory).start(from_file("a"))
    await other.registry.delete("mine", WHO)
    for n in range(3):
        await other.registry.create({"name": f"e{n}", "tenant": "t", "model": "m"}, WHO)
        await other.registry.delete(f"e{n}", WHO)
    await rig.sync.poll()
    assert rig.names() == ["a"]


async def test_a_directory_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.adapters.entitlements.guarded_directory.LIMIT_S", 0.01)

    class Hanging(FlakyDirectory):
        async def changes(self, since: int, mark: str) -> DirectoryState[EntitlementEntry] | None:
            await asyncio.Event().wait()
            raise AssertionError

    rig = await EntitlementRig(Hanging()).start(from_file("a"))
    await rig.sync.poll()
    await rig.sync.poll()
    assert not rig.registry.up


async def test_the_task_polls_and_ends() -> None:
    rig = EntitlementRig()
    await rig.registry.start(File(), guarded=True)
    assert rig.keyring.open
    await rig.registry.close()


async def test_everything_survives_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "sluice.db"
    key = ""
    for turn in range(3):
        rig = EntitlementRig(SqliteDirectory(path, EntitlementEntry))  # type: ignore[arg-type]
        await rig.start(from_file("a", D1))
        if turn == 0:
            made = await rig.registry.create({"name": "b", "tenant": "t", "model": "m"}, WHO)
            key = str(made["key"])
        assert created(rig) == [("a", 1), ("b", 2)]
        assert rig.keyring.find(digest_of(key.encode())) is not None
        await rig.registry.close()


async def test_a_hundred_thousand_entitlements_leave_the_loop_free() -> None:
    file = [
        msgspec.structs.replace(
            from_file("x"),
            terms=Entitlement(name=f"e{n}", model="m", tenant="t"),
            key_sha256=(hashlib.sha256(b"%d" % n).hexdigest(),),
        )
        for n in range(100_000)
    ]
    rig = EntitlementRig()
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.get_running_loop().create_task(others())
    await rig.start(*file)
    task.cancel()
    assert len(rig.store.defined) == 100_000
    assert turns >= 1_500  # a turn for others after every slice, entered and told
    started = time.process_time()
    await rig.registry.suspend("e99999", WHO)
    await rig.registry.page(model=None, tenant=None, after="50000:e49999", limit=100)
    assert time.process_time() - started < 1.0  # far from looking at all of them


def test_a_roster_keeps_order_when_numbers_come_late() -> None:
    index = EntitlementIndex()

    def put(name: str, number: int) -> None:
        terms = Entitlement(name=name, model="m", created=number)
        index.put(EntitlementEntry(terms=terms))

    for name, number in (("c", 3), ("a", 1), ("b", 3), ("d", 9)):
        put(name, number)
    assert [t.name for t in index.terms("m")] == ["a", "b", "c", "d"]
    assert [e.terms.name for e in index.after((1, "a"), 2)] == ["b", "c"]
    put("a", 12)
    assert [t.name for t in index.terms("m")] == ["b", "c", "d", "a"]
    assert index.next_created == 13
    index.remove("a")
    index.remove("nobody")
    assert (index.next_created, [t.name for t in index.terms("m")]) == (10, ["b", "c", "d"])
