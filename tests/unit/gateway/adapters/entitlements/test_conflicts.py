"""Changes on several gateways at once, and a directory that comes back older than it was."""

import asyncio
import copy
from typing import Any

import pytest

from gateway.errors import Conflict, NotFound
from gateway.policy.request.head import digest_of
from tests.entitlement_fakes import EntitlementRig, FlakyDirectory, from_file

WHO = "adm1n000"
D1, D2 = "11" * 32, "22" * 32
NEW = {"name": "a", "tenant": "t", "model": "m"}


class Meeting(FlakyDirectory):
    """Directory in which both gateways have heard of all before either writes."""

    async def changes(self, *since: Any) -> Any:
        """See Directory."""
        found = await super().changes(*since)
        await asyncio.sleep(0)
        return found


def lets_in(rig: EntitlementRig, key: object) -> bool:
    found = rig.keyring.find(digest_of(str(key).encode()))
    return found is not None


def snapshot(directory: FlakyDirectory) -> dict[str, Any]:
    return copy.deepcopy(directory.__dict__)


def fail_over(directory: FlakyDirectory, older: dict[str, Any]) -> None:
    """The server is replaced by one that has not heard of the last writes."""
    directory.__dict__.clear()
    directory.__dict__.update(copy.deepcopy(older))


async def pair(
    directory: FlakyDirectory | None = None,
) -> tuple[EntitlementRig, EntitlementRig, Any]:
    """Two gateways that know of an entitlement `a`, and what creating it answered."""
    one = await EntitlementRig(directory).start()
    other = await EntitlementRig(one.directory).start()
    made = await one.registry.create(NEW, WHO)
    await other.sync.poll()
    return one, other, made


async def stopped(rig: EntitlementRig, what: str) -> None:
    if what == "suspend":
        await rig.registry.suspend("a", WHO)
    else:
        await rig.registry.expire("a", None, WHO)


async def polled(*rigs: EntitlementRig) -> None:
    for _ in range(3):
        for rig in rigs:
            await rig.sync.poll()


async def test_a_key_revoked_while_another_gateway_changes_the_terms_stays_revoked() -> None:
    for _ in range(50):
        one, other, made = await pair(Meeting())
        await asyncio.gather(
            one.registry.revoke_key("a", made["keys"][0], WHO),
            other.registry.change("a", {"slo_target_ms": 5}, WHO),
        )
        await polled(one, other)
        for rig in (one, other):
            assert not lets_in(rig, made["key"])
            assert rig.store.defined["m", "a"].slo_ms == 5


async def test_what_two_gateways_create_at_once_is_created_once() -> None:
    directory = Meeting()
    one, other = await EntitlementRig(directory).start(), await EntitlementRig(directory).start()
    found = await asyncio.gather(
        one.registry.create(NEW, WHO), other.registry.create(NEW, WHO), return_exceptions=True
    )
    made = [answer for answer in found if isinstance(answer, dict)]
    assert [type(answer) for answer in found if not isinstance(answer, dict)] == [Conflict]
    await polled(one, other)
    for rig in (one, other):
        assert lets_in(rig, made[0]["key"])


async def test_a_change_does_not_bring_back_what_another_gateway_deletes_at_once() -> None:
    one, other, made = await pair(Meeting())
    found = await asyncio.gather(
        one.registry.delete("a", WHO),
        other.registry.change("a", {"slo_target_ms": 5}, WHO),
        return_exceptions=True,
    )
    assert found[0] is None
    assert isinstance(found[1], dict | NotFound)
    await polled(one, other)
    for rig in (one, other):
        assert not lets_in(rig, made["key"])
        assert rig.sync.index.entries == {}


@pytest.mark.parametrize("heard", [True, False])
@pytest.mark.parametrize("what", ["revoke", "suspend", "expire", "delete"])
async def test_a_directory_that_lost_its_last_writes_revives_nothing(
    what: str, *, heard: bool
) -> None:
    one, other, made = await pair()
    older = snapshot(one.directory)
    if what == "revoke":
        await one.registry.revoke_key("a", made["keys"][0], WHO)
    elif what == "suspend":
        await one.registry.suspend("a", WHO)
    elif what == "expire":
        await one.registry.expire("a", None, WHO)
    else:
        await one.registry.delete("a", WHO)
    if heard:
        await polled(other, one)
    fail_over(one.directory, older)
    await polled(other, one)
    for rig in (one, other, await EntitlementRig(one.directory).start()):
        principal = rig.keyring.find(digest_of(str(made["key"]).encode()))
        if what in {"revoke", "delete"}:
            assert principal is None
        else:
            assert principal is not None
            assert principal.suspended or principal.expires_unix_s == rig.clock()
    known = {e.terms.name for e in one.sync.index.entries.values()}
    assert known == (set() if what == "delete" else {"a"})


@pytest.mark.parametrize("what", ["revoke", "suspend", "expire", "delete"])
async def test_a_revocation_holds_where_others_wrote_after_the_loss(what: str) -> None:
    one, other, made = await pair()
    older = snapshot(one.directory)
    if what == "revoke":
        await one.registry.revoke_key("a", made["keys"][0], WHO)
    elif what == "suspend":
        await one.registry.suspend("a", WHO)
    elif what == "expire":
        await one.registry.expire("a", None, WHO)
    else:
        await one.registry.delete("a", WHO)
    fail_over(one.directory, older)
    # The other one had not heard; it writes as often, so that the revision tells nothing.
    for slo_ms in (5, 6, 7):
        await other.registry.change("a", {"slo_target_ms": slo_ms}, WHO)
    await polled(one, other)
    for rig in (one, other):
        principal = rig.keyring.find(digest_of(str(made["key"]).encode()))
        if what in {"revoke", "delete"}:
            assert principal is None
        else:
            assert principal is not None
            assert principal.suspended or principal.expires_unix_s == rig.clock()


async def test_nothing_that_was_made_is_lost_with_the_last_writes() -> None:
    one, other, _ = await pair()
    older = snapshot(one.directory)
    mine = await one.registry.create({**NEW, "name": "b"}, WHO)
    await one.registry.change("a", {"slo_target_ms": 5}, WHO)
    fail_over(one.directory, older)
    theirs = await other.registry.create({**NEW, "name": "c"}, WHO)
    await polled(one, other)
    for rig in (one, other):
        assert lets_in(rig, mine["key"])
        assert lets_in(rig, theirs["key"])
        assert rig.store.defined["m", "a"].slo_ms == 5


@pytest.mark.parametrize(("first", "then"), [("suspend", "expire"), ("expire", "suspend")])
async def test_a_suspension_and_an_expiry_outlive_each_other(first: str, then: str) -> None:
    one, other, _ = await pair()
    older = snapshot(one.directory)
    await stopped(one, first)
    fail_over(one.directory, older)
    await other.registry.change("a", {"slo_target_ms": 5}, WHO)
    await stopped(other, then)
    await polled(one, other)
    for rig in (one, other):
        terms = rig.store.defined["m", "a"]
        assert (terms.suspended, terms.expires_unix_s) == (True, rig.clock())


async def test_who_suspends_last_is_heeded_whatever_was_lost_before() -> None:
    one, other, _ = await pair()
    await one.registry.suspend("a", WHO)
    await other.sync.poll()
    older = snapshot(one.directory)
    for slo_ms in (5, 6):  # which leaves the later one with fewer writes
        await one.registry.change("a", {"slo_target_ms": slo_ms}, WHO)
    await one.registry.suspend("a", WHO, undo=True)
    fail_over(one.directory, older)
    other.clock.advance(1.0)
    await other.registry.suspend("a", WHO)
    await polled(one, other)
    for rig in (one, other):
        assert rig.store.defined["m", "a"].suspended


async def test_what_was_deleted_does_not_come_back_in_the_place_of_its_namesake() -> None:
    directory = FlakyDirectory()
    empty = snapshot(directory)
    one, other, made = await pair(directory)
    older = snapshot(directory)
    await other.registry.change("a", {"slo_target_ms": 5}, WHO)
    fail_over(directory, older)
    await one.registry.delete("a", WHO)
    fail_over(directory, empty)
    one.clock.advance(1.0)
    later = await one.registry.create(NEW, WHO)
    await polled(other, one)
    for rig in (one, other):
        assert not lets_in(rig, made["key"])
        assert lets_in(rig, later["key"])


async def test_what_a_namesake_replaced_is_gone_with_that() -> None:
    directory = FlakyDirectory()
    one, other = await EntitlementRig(directory).start(), await EntitlementRig(directory).start()
    empty = snapshot(directory)
    other.clock.advance(1.0)
    await other.registry.create(NEW, WHO)
    await other.registry.change("a", {"slo_target_ms": 5}, WHO)
    fail_over(directory, empty)
    replaced = await one.registry.create(NEW, WHO)
    await other.registry.delete("a", WHO)  # its own, which is the newer one
    await polled(one, other)
    for rig in (one, other):
        assert not lets_in(rig, replaced["key"])
        assert rig.sync.index.entries == {}


async def test_a_revoked_key_of_the_file_stays_so_where_a_gateway_starts_on_nothing() -> None:
    one = await EntitlementRig().start(from_file("a", D1))
    await one.registry.revoke_key("a", D1[:8], WHO)
    one.directory.wipe()
    late = await EntitlementRig(one.directory).start(from_file("a", D1))
    assert late.sync.index.entries["a"].key_sha256 == (D1,), "nobody has told it yet"
    late.clock.advance(1.0)
    for slo_ms in (5, 6, 7):
        await late.registry.change("a", {"slo_target_ms": slo_ms}, WHO)
    await polled(one, late)
    for rig in (one, late):
        assert rig.sync.index.entries["a"].key_sha256 == ()


async def test_what_was_resumed_after_a_long_absence_is_not_suspended_again() -> None:
    one, other, _ = await pair()
    await one.registry.suspend("a", WHO)
    await other.sync.poll()
    await one.registry.suspend("a", WHO, undo=True)
    one.directory._marks.clear()  # what a directory forgets in time
    await polled(other, one)
    assert not other.store.defined["m", "a"].suspended
    assert not one.store.defined["m", "a"].suspended


async def test_a_replica_with_an_older_file_changes_nothing_newer(
    caplog: pytest.LogCaptureFixture,
) -> None:
    old = [from_file("gone", D1), from_file("changed", D1, slo_target_ms=100)]
    new = [from_file("changed", D2, digest="2", slo_target_ms=50), from_file("added")]
    first = await EntitlementRig().start(*old, file_unix_s=100.0)
    newer = await EntitlementRig(first.directory).start(*new, file_unix_s=200.0)
    late = await EntitlementRig(first.directory).start(*old, file_unix_s=100.0)
    await polled(first, newer, late)
    for rig in (first, newer, late):
        assert rig.names() == ["added", "changed"]
        entry = rig.sync.index.entries["changed"]
        assert (entry.terms.slo_ms, entry.key_sha256) == (50, (D2,))
    assert "older" in caplog.text
    again = await EntitlementRig(first.directory).start(*old, file_unix_s=300.0)
    assert again.names() == ["changed", "gone"]


async def test_a_file_does_not_bring_back_a_key_that_an_admin_revoked(
    caplog: pytest.LogCaptureFixture,
) -> None:
    first = await EntitlementRig().start(from_file("a", D1))
    await first.registry.revoke_key("a", D1[:8], WHO)
    again = await EntitlementRig(first.directory).start(from_file("a", D1, D2, digest="2"))
    assert again.sync.index.entries["a"].key_sha256 == (D2,)
    assert "revoked" in caplog.text
