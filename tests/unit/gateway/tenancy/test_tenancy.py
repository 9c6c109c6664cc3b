"""What the file, the directory and its denials give together, and what survives what."""

import asyncio
import hashlib
import time

import msgspec
import pytest

from gateway.errors import Conflict, Forbidden, StateFailure, Unavailable
from gateway.records.request import OPEN
from gateway.records.tenancy import NO_FILE, DirectoryState, FileTenant, TenancyFile
from gateway.tenancy.keyring import authenticate
from tests.tenancy_fakes import (
    SHAPE,
    WHO,
    FlakyDirectory,
    TenancyRig,
    entitling,
    file_key,
    file_of,
    section,
)

D1, D2, D3, D4 = (digits * 32 for digits in ("11", "22", "33", "44"))


def order(rig: TenancyRig) -> list[str]:
    return [terms.name for terms in rig.entitlements.terms("m")]


def opened(rig: TenancyRig, *digests: str) -> list[bool]:
    return [rig.keyring.find(bytes.fromhex(each)) is not None for each in digests]


async def back(rig: TenancyRig) -> None:
    """The directory answers again."""
    rig.directory.fail_with = None
    rig.clock.advance(10.0)
    await rig.sync.poll()


async def test_the_file_s_entitlements_are_defined_in_its_order_and_an_admin_s_come_last() -> None:
    rig = await TenancyRig().start(entitling(section("b", D1), section("a", D2)))
    assert [(t.name, t.created) for t in rig.entitlements.terms("m")] == [("b", 1), ("a", 2)]
    assert (rig.names(), rig.changed) == (["a", "b"], ["m"])
    assert not rig.keyring.open
    await rig.entitle("a-mine")
    again = await TenancyRig(rig.directory).start(entitling(*map(section, ("c", "b", "a"))))
    assert order(again) == ["c", "b", "a", "a-mine"]
    assert order(await TenancyRig(rig.directory).start()) == ["a-mine"]


async def test_a_section_of_the_file_is_never_written_to_the_directory() -> None:
    rig = await TenancyRig().start(file_of("acme"))
    await rig.entitlements.suspend("chat", WHO)
    await rig.tenants.change("acme", {"suspended": True}, WHO)
    await rig.sync.poll()
    assert (await rig.directory.read(0, "")).rows == ()


async def test_an_admin_s_change_stays_until_the_file_s_section_changes() -> None:
    first = await TenancyRig().start(entitling(section("a", D1, slo_target_ms=100)))
    await first.entitlements.change("a", {"slo_target_ms": 5}, WHO)
    same = await TenancyRig(first.directory).start(entitling(section("a", D1, slo_target_ms=100)))
    assert same.store.defined["m", "a"].slo_ms == 5
    later = entitling(section("a", D2, digest="2", slo_target_ms=70))
    changed = await TenancyRig(first.directory).start(later)
    entry = changed.tenancy.index.entries["a"]
    assert (entry.terms.slo_ms, entry.terms.created, entry.digests) == (70, 1, (D2,))


async def test_a_section_of_an_older_file_does_not_replace_an_admin_s_change(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rig = await TenancyRig().start(entitling(section("a")))
    await rig.entitlements.change("a", {"slo_target_ms": 5}, WHO)
    other = section("a", digest="2", slo_target_ms=100)
    for unix_s, slo_ms in ((rig.clock() - 1, 5), (rig.clock() + 1, 100)):
        await rig.tenancy.adopt(entitling(other, unix_s=unix_s))
        assert rig.store.defined["m", "a"].slo_ms == slo_ms
    assert caplog.text.count("older than what administrators changed of 1 entitlements (a)") == 1


async def test_what_was_denied_outlives_a_section_that_changes_or_leaves_and_returns() -> None:
    rig = await TenancyRig().start(entitling(section("a", D1, D2), section("b", D3)))
    await rig.entitlements.suspend("a", WHO)
    await rig.entitlements.revoke_key("a", D1[:8], WHO)
    await rig.entitlements.expire("b", None, WHO)
    back_again = entitling(section("a", D1, D2, digest="2"), section("b", D3, digest="2"))
    await rig.tenancy.adopt(entitling(section("c")))
    assert order(rig) == ["c"]
    await rig.tenancy.adopt(back_again)
    for each in (rig, await TenancyRig(rig.directory).start(back_again)):
        assert each.store.defined["m", "a"].suspended
        assert each.store.defined["m", "b"].expires_unix_s == rig.clock()
        assert opened(each, D1, D2, D3) == [False, True, True]


async def test_a_key_of_the_file_that_was_revoked_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rig = await TenancyRig().start(entitling(section("a", D1)))
    await rig.entitlements.revoke_key("a", D1[:8], WHO)
    await rig.tenancy.adopt(entitling(section("a", D1, D2, digest="2")))
    assert opened(rig, D1, D2) == [False, True]
    assert "lists keys of 1 entitlements (a) that an administrator revoked" in caplog.text


async def test_where_the_file_has_a_section_it_counts_before_an_admin_s_namesake() -> None:
    rig = await TenancyRig().start()
    key = await rig.entitle("a", tenant="corp")
    await rig.tenancy.adopt(entitling(section("a", D1)))
    entry = rig.tenancy.index.entries["a"]
    assert (entry.origin, entry.digests, entry.terms.tenant) == ("file", (D1,), "acme")
    assert not rig.opens(key)
    await rig.tenancy.adopt(NO_FILE)
    assert (rig.asks(key), opened(rig, D1)) == ("a", [False])


async def test_what_moves_to_another_model_leaves_the_first(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rig = await TenancyRig().start(entitling(section("a", D1)))
    await rig.tenancy.adopt(entitling(section("a", D1, model="plain")))
    assert (rig.names(), order(rig)) == ([], [])
    assert [terms.name for terms in rig.entitlements.terms("plain")] == ["a"]
    await rig.tenancy.adopt(entitling(section("a", D1, model="other")))
    assert (rig.tenancy.index.entries, opened(rig, D1)) == ({}, [False])
    assert caplog.text.count("entitlement a is for model other, which is not configured") == 1


async def test_an_entitlement_of_a_model_that_is_not_served_here_is_left_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    there = TenancyRig()
    there.shapes["other"] = msgspec.structs.replace(SHAPE, name="other")
    await there.start()
    await there.entitle("x", model="other")
    rig = await TenancyRig(there.directory).start(entitling(section("a")))
    await rig.sync.poll()
    assert order(rig) == ["a"]
    assert caplog.text.count("entitlement x is for model other, which is not configured") == 1
    with pytest.raises(Conflict):
        await rig.entitle("x")
    await there.entitlements.delete("x", WHO)
    await rig.entitle("x")


async def test_hearing_of_one_s_own_change_tells_the_store_nothing_new() -> None:
    rig = await TenancyRig().start(entitling(section("a")))
    await rig.entitlements.suspend("a", WHO)
    calls = rig.store.calls
    for _ in range(3):
        await rig.sync.poll()
    assert rig.store.calls == calls
    assert rig.changed == ["m", "m"]


async def test_with_the_directory_away_the_file_serves_alone_until_it_is_back() -> None:
    before = await TenancyRig().start(entitling(section("b")))
    await before.entitle("mine")
    before.directory.fail_with = StateFailure("away")
    rig = await TenancyRig(before.directory).start(entitling(section("a", D1), section("b")))
    assert rig.names() == ["a", "b"]
    assert not rig.keyring.open
    await back(rig)
    assert order(rig) == ["a", "b", "mine"]


async def test_no_key_opens_before_the_directory_was_read_once() -> None:
    file = entitling(section("a", D1))
    rig = TenancyRig()
    rig.directory.fail_with = StateFailure("away")
    rig.keyring.unread = {"tenants"}
    await rig.start(file)
    for asked in (bytes.fromhex(D1), None):
        with pytest.raises(Unavailable, match="does not know yet"):
            authenticate(rig.keyring, asked, rig.clock())
    await back(rig)
    rig.directory.fail_with = StateFailure("away")
    await rig.tenancy.adopt(file)
    open_to_all = TenancyRig()
    open_to_all.keyring.unread = {"tenants"}
    await open_to_all.start()
    assert authenticate(open_to_all.keyring, None, 1.0) is OPEN
    assert authenticate(rig.keyring, bytes.fromhex(D1), rig.clock()).entitlement == "a"


async def test_a_reload_with_the_directory_away_closes_what_left_the_file() -> None:
    rig = await TenancyRig().start(
        entitling(section("a", D1, D2), section("b", D3), section("c", model="plain"))
    )
    mine = await rig.entitle("mine", model="plain")
    rig.directory.fail_with = StateFailure("away")
    del rig.shapes["plain"]
    await rig.tenancy.adopt(entitling(section("a", D2, digest="2"), section("d", D4)))
    assert opened(rig, D1, D2, D3, D4) == [False, True, False, True]
    assert not rig.opens(mine)
    await back(rig)
    assert (order(rig), rig.opens(mine)) == (["a", "d"], False)
    kept = {row.name for row in (await rig.directory.read(0, "")).rows}
    assert "mine" in kept, "an admin's, of a model that others may serve"


async def test_a_suspension_of_a_tenant_holds_where_no_section_names_it() -> None:
    own = hashlib.sha256(b"sk-own").hexdigest()

    def file(*tenants: str) -> TenancyFile:
        return file_of(*tenants, entitlements=[section("chat", own)])

    here = await TenancyRig().start(file("acme"))
    await here.tenants.change("acme", {"suspended": True}, WHO)
    there = await TenancyRig(here.directory).start(file("beta"))
    await here.tenancy.adopt(file("beta"))
    for rig in (here, there):
        with pytest.raises(Forbidden, match="tenant 'acme' is suspended"):
            rig.asks("sk-own")
    await there.tenants.create({"name": "acme", "suspended": False}, WHO)
    await here.sync.poll()
    assert (here.asks("sk-own"), there.asks("sk-own")) == ("chat", "chat")


async def test_the_directory_s_absence_is_logged_once_and_its_return_and_spares_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rig = await TenancyRig().start()
    caplog.set_level("INFO", "sluice")
    rig.directory.fail_with = StateFailure("no route")
    before = rig.directory.calls
    for _ in range(50):
        await rig.sync.poll()
    assert rig.directory.calls - before <= 3, "the breaker is open"
    for _ in range(20):
        await rig.sync.poll()
        rig.clock.advance(1.0)
    await back(rig)
    assert [r.message for r in caplog.records] == [
        "the directory of tenants is away: no route",
        "the directory of tenants is back",
    ]
    assert rig.sync.up


async def test_a_directory_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.tenancy.directory_sync.LOAD_LIMIT_S", 0.01)

    class Hanging(FlakyDirectory):
        async def read(self, since: int, mark: str) -> DirectoryState | None:
            await asyncio.Event().wait()
            raise AssertionError

    rig = await TenancyRig(Hanging()).start(entitling(section("a")))
    for _ in range(2):
        await rig.sync.poll()
    assert not rig.sync.up
    assert rig.names() == ["a"]


async def test_a_hundred_thousand_entitlements_leave_the_loop_free() -> None:
    file = entitling(
        *(section(f"e{n}", hashlib.sha256(b"%d" % n).hexdigest()) for n in range(100_000))
    )
    rig = TenancyRig()
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.get_running_loop().create_task(others())
    await rig.start(file)
    task.cancel()
    assert len(rig.store.defined) == 100_000
    assert turns >= 1_500  # a turn for others after every slice, entered and told
    started = time.process_time()
    await rig.entitlements.suspend("e99999", WHO)
    await rig.entitlements.page(model=None, tenant=None, after="50000:e49999", limit=100)
    assert time.process_time() - started < 1.0  # far from looking at all of them


async def test_a_key_that_the_file_took_for_an_entitlement_is_the_tenant_s_again_after_it() -> None:
    hashed = hashlib.sha256(b"sk-mine").hexdigest()
    rig = await TenancyRig().start(file_of("acme"))
    await rig.tenants.add_key("acme", {"name": "mine", "sha256": hashed}, WHO)
    own = section("own", hashed, tenant="beta")
    taken = file_of("acme", entitlements=[section("chat"), section("code", model="n"), own])
    for file, expected in ((taken, "own"), (file_of("acme"), "chat")):
        await rig.tenancy.adopt(file)
        assert rig.asks("sk-mine") == expected
        assert (await TenancyRig(rig.directory).start(file)).asks("sk-mine") == expected


async def test_an_admin_s_key_of_a_file_s_entitlement_is_not_its_namesake_s() -> None:
    rig = await TenancyRig().start(entitling(section("a")))
    old = str((await rig.entitlements.add_key("a", WHO))["key"])
    await rig.tenancy.adopt(entitling())
    new = await rig.entitle("a")
    assert (rig.opens(old), rig.opens(new)) == (False, True)
    await rig.tenancy.adopt(entitling(section("a")))
    assert (rig.opens(old), rig.opens(new)) == (True, False)


@pytest.mark.parametrize("defect", [RuntimeError, asyncio.CancelledError])
async def test_a_denial_that_was_not_applied_is_with_the_next_poll(
    defect: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = await TenancyRig().start()
    key = await rig.entitle("a")

    async def fails(*_: object) -> None:
        raise defect

    with monkeypatch.context() as patched:
        patched.setattr(rig.tenancy, "_compute", fails)
        with pytest.raises(defect):
            await rig.entitlements.revoke_key(
                "a", hashlib.sha256(key.encode()).hexdigest()[:8], WHO
            )
    assert rig.opens(key)
    await rig.sync.poll()
    assert not rig.opens(key)


async def test_a_read_that_was_cut_off_is_made_again() -> None:
    one = await TenancyRig().start()
    other = await TenancyRig(one.directory).start()
    keys = [await one.entitle(f"a{n}") for n in range(60)]  # more than one slice
    reading = asyncio.create_task(other.sync.poll())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    await other.sync.poll()
    assert all(map(other.opens, keys))


async def test_no_key_opens_before_all_that_was_read_late_is_applied() -> None:
    digests = [f"{n:08x}" * 8 for n in range(1, 121)]
    file = entitling(*(section(f"e{n}", each) for n, each in enumerate(digests)))
    one = await TenancyRig().start(file)
    for n, each in enumerate(digests):
        await one.entitlements.revoke_key(f"e{n}", each[:8], WHO)
    late = TenancyRig(one.directory)
    late.keyring.unread = {"tenants"}
    one.directory.fail_with = StateFailure("away")
    await late.start(file)
    one.directory.fail_with = None
    late.clock.advance(10.0)
    reading = asyncio.create_task(late.sync.poll())
    while not reading.done():
        assert late.keyring.unread or not any(opened(late, *digests))
        await asyncio.sleep(0)
    assert not late.keyring.unread


async def test_keys_open_all_the_while_a_reload_changes_their_tenants() -> None:
    def file(label: str) -> TenancyFile:
        keys = {f"t{n}": file_key(f"k{n}", f"t{n}") for n in range(120)}
        listed = {t: FileTenant(labels={"l": label}, keys=(key,)) for t, key in keys.items()}
        return msgspec.structs.replace(file_of(entitlements=[section("chat")]), tenants=listed)

    rig = await TenancyRig().start(file("one"))
    reloading = asyncio.create_task(rig.tenancy.adopt(file("other")))
    while not reloading.done():
        assert all(rig.opens(f"sk-k{n}") for n in range(120))
        await asyncio.sleep(0)


async def test_a_key_of_the_file_that_was_rotated_ends_also_where_its_tenant_is_renamed() -> None:
    rig = await TenancyRig().start(file_of("acme", web=file_key("web")))
    await rig.tenants.rotate_key("acme", "web", {"grace_s": 60}, WHO)
    moved = file_key("web", "corp", entitlements=("chat",))
    await rig.tenancy.adopt(
        file_of("corp", entitlements=[section("chat", tenant="corp")], web=moved)
    )
    assert rig.asks("sk-web") == "chat"
    rig.clock.advance(61)
    with pytest.raises(Forbidden):
        rig.asks("sk-web")
