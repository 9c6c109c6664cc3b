"""Several gateways over one directory: in step, at once, and where it comes back older."""

import asyncio

import msgspec
import pytest

from gateway.errors import Conflict, NotFound, Refusal
from gateway.records.tenancy import DirectoryChange, DirectoryState, fingerprint
from tests.tenancy_fakes import (
    SHAPE,
    WHO,
    FlakyDirectory,
    TenancyRig,
    acme,
    digest,
    entitling,
    file_of,
    section,
)


class Meeting(FlakyDirectory):
    """A directory that both gateways have read before either writes."""

    meets: asyncio.Barrier | None = None

    async def read(self, since: int, mark: str) -> DirectoryState | None:
        """See Directory."""
        found = await super().read(since, mark)
        if self.meets is not None:
            await self.meets.wait()
            self.meets = None
        return found


async def pair(directory: FlakyDirectory | None = None) -> tuple[TenancyRig, TenancyRig, str]:
    """Two gateways that know of an entitlement `a`, and its key."""
    one = await TenancyRig(directory).start()
    other = await TenancyRig(one.directory).start()
    key = await one.entitle("a")
    await other.sync.poll()
    return one, other, key


async def meeting() -> tuple[TenancyRig, TenancyRig, str]:
    """The same; their next changes are at once."""
    directory = Meeting()
    found = await pair(directory)
    directory.meets = asyncio.Barrier(2)
    return found


async def polled(*rigs: TenancyRig) -> None:
    for _ in range(3):
        for rig in rigs:
            await rig.sync.poll()


async def denied(rig: TenancyRig, what: str, key: str) -> None:
    """Take away the entitlement `a`, or what its key may do."""
    admin = rig.entitlements
    if what == "revoke":
        await admin.revoke_key("a", fingerprint(digest(key).hex()), WHO)
    elif what == "suspend":
        await admin.suspend("a", WHO)
    elif what == "expire":
        await admin.expire("a", None, WHO)
    else:
        await admin.delete("a", WHO)


async def changed(rig: TenancyRig, *slo_ms: int) -> None:
    for each in slo_ms:
        await rig.entitlements.change("a", {"slo_target_ms": each}, WHO)


async def test_a_change_is_made_on_what_another_gateway_changed_last() -> None:
    one = await TenancyRig().start(entitling(section("a")))
    other = await TenancyRig(one.directory).start(entitling(section("a")))
    await changed(one, 5)
    await other.entitlements.change("a", {"tokens_per_second": 7}, WHO)
    await one.sync.poll()
    terms = one.store.defined["m", "a"]
    assert (terms.slo_ms, terms.tokens_per_s) == (5, 7)


async def test_a_key_revoked_while_another_gateway_changes_the_terms_stays_revoked() -> None:
    one, other, key = await meeting()
    await asyncio.gather(denied(one, "revoke", key), changed(other, 5))
    await polled(one, other)
    for rig in (one, other):
        assert not rig.opens(key)
        assert rig.store.defined["m", "a"].slo_ms == 5


async def test_what_two_gateways_create_at_once_is_created_once() -> None:
    directory = Meeting()
    one, other = await TenancyRig(directory).start(), await TenancyRig(directory).start()
    directory.meets = asyncio.Barrier(2)
    found = await asyncio.gather(one.entitle("a"), other.entitle("a"), return_exceptions=True)
    made = [answer for answer in found if isinstance(answer, str)]
    assert [type(answer) for answer in found if not isinstance(answer, str)] == [Conflict]
    await polled(one, other)
    assert one.opens(made[0])
    assert other.opens(made[0])


async def test_a_change_does_not_bring_back_what_another_gateway_deletes_at_once() -> None:
    one, other, key = await meeting()
    found = await asyncio.gather(
        denied(one, "delete", key), changed(other, 5), return_exceptions=True
    )
    assert found[0] is None
    assert found[1] is None or isinstance(found[1], NotFound)
    await polled(one, other)
    for rig in (one, other):
        assert not rig.opens(key)
        assert rig.tenancy.index.entries == {}


@pytest.mark.parametrize("then", ["heard", "unheard", "written"])
@pytest.mark.parametrize("what", ["revoke", "suspend", "expire", "delete"])
async def test_a_directory_that_lost_its_last_writes_revives_nothing(what: str, then: str) -> None:
    one, other, key = await pair()
    older = one.directory.copy()
    await denied(one, what, key)
    if then == "heard":
        await polled(other, one)
    one.directory.restore(older)
    if then == "written":  # as often, so that the revision tells nothing
        await changed(other, 5, 6, 7)
    await polled(other, one)
    for rig in (one, other, await TenancyRig(one.directory).start()):
        with pytest.raises(Refusal):
            rig.asks(key)
        assert set(rig.tenancy.index.entries) == (set() if what == "delete" else {"a"})


async def test_nothing_that_was_made_is_lost_with_the_last_writes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    one, other, key = await pair()
    older = one.directory.copy()
    mine = await one.entitle("b")
    await changed(one, 5)
    one.directory.restore(older)
    theirs = await other.entitle("c")
    await polled(one, other)
    one.directory.restore(b"")
    await polled(one, other)
    for rig in (one, other, await TenancyRig(one.directory).start()):
        assert all(map(rig.opens, (key, mine, theirs)))
        assert rig.store.defined["m", "a"].slo_ms == 5
    assert "lost writes: giving back what is known" in caplog.text


async def test_an_older_resumption_of_a_higher_revision_does_not_undo_a_suspension() -> None:
    one, other, _ = await pair()
    older = one.directory.copy()
    one.clock.advance(1.0)
    await one.entitlements.suspend("a", WHO)
    one.directory.restore(older)
    await changed(other, 5, 6)
    await other.entitlements.suspend("a", WHO, undo=True)  # on a clock that is behind
    await polled(one, other)
    for rig in (one, other):
        assert rig.store.defined["m", "a"].suspended


async def test_what_a_namesake_replaced_is_gone_with_that() -> None:
    directory = FlakyDirectory()
    one, other = await TenancyRig(directory).start(), await TenancyRig(directory).start()
    other.clock.advance(1.0)
    newer = await other.entitle("a")
    directory.restore(b"")
    replaced = await one.entitle("a")
    await denied(other, "delete", newer)
    await polled(one, other)
    for rig in (one, other):
        assert not rig.opens(replaced)
        assert rig.tenancy.index.entries == {}


async def test_after_a_long_absence_what_was_resumed_is_not_suspended_nor_what_was_deleted_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gateway.store.sqlite_directory.MARKS", 1)
    one, other, _ = await pair()
    deleted = await one.entitle("b")
    await one.entitlements.suspend("a", WHO)
    await other.sync.poll()
    await one.entitlements.suspend("a", WHO, undo=True)
    await one.entitlements.delete("b", WHO)
    await changed(one, 5, 6)  # the directory forgets the write that the other one knows
    await polled(other, one)
    for rig in (one, other):
        assert not rig.store.defined["m", "a"].suspended
        assert (rig.names(), rig.opens(deleted)) == (["a"], False)


async def test_a_tenant_in_use_for_a_model_of_another_gateway_alone_is_not_deleted() -> None:
    there = TenancyRig()
    there.shapes["other"] = msgspec.structs.replace(SHAPE, name="other")
    await there.start()
    await there.tenants.create({"name": "acme"}, WHO)
    await there.entitle("x", model="other")
    here = await TenancyRig(there.directory).start()
    with pytest.raises(Conflict, match="1 entitlements name 'acme'"):
        await here.tenants.delete("acme", WHO)


@pytest.mark.parametrize("model", ["m", None, ["m"]])
async def test_what_makes_no_sense_here_opens_nothing_and_holds_nobody_up(model: object) -> None:
    """As a row of another version may."""
    one = await acme()
    keys = {name: await one.add(name) for name in ("web", "late")}
    own = await one.entitle("mine")
    for row in list(one.tenancy.known.rows.values()):
        odd_fields = {"expires_at": 7, "service_class": "gold", "models": 5, "model": model}
        fields = {**row.fields, **odd_fields, "tenant": None}
        odd = msgspec.structs.replace(row, fields=fields, changed=row.changed + 1)
        if row.name in {"acme/late", "mine"}:
            await one.directory.write(DirectoryChange(puts=(odd,)), floor=0, after="")
    other = await TenancyRig(one.directory).start(file_of())
    for rig in (one, other):
        await rig.sync.poll()
        assert not any(map(rig.opens, (*keys.values(), own)))
    await one.tenants.create({"name": "beta"}, WHO)
    await other.sync.poll()
    assert other.opens(await other.add("fine", tenant="beta"))


@pytest.mark.parametrize("ahead", [0, 1])
async def test_a_suspension_and_a_resumption_at_once_end_alike_everywhere(ahead: int) -> None:
    one, other, _ = await meeting()
    (one, other)[ahead].clock.advance(1.0)
    await asyncio.gather(
        one.entitlements.suspend("a", WHO), other.entitlements.suspend("a", WHO, undo=True)
    )
    await polled(one, other)
    found = {rig.store.defined["m", "a"].suspended for rig in (one, other)}
    assert found == {(await TenancyRig(one.directory).start()).store.defined["m", "a"].suspended}
