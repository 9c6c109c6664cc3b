"""Two states of a tenant after its directory lost writes, and bounds of what is remembered."""

import msgspec

from gateway.adapters.tenants import entries
from gateway.adapters.tenants.entries import (
    FileKeyState,
    KeyEntry,
    TenantEntry,
    TenantFile,
    changed,
    keys_of,
    reconciled,
    with_key,
    with_revoked,
)
from gateway.records.limit import UNLIMITED, KeyLimits, Limit
from tests.tenant_fakes import WHO, TenantRig, file_key, file_of

D = ["11" * 32, "22" * 32, "33" * 32]


def acme(*keys: KeyEntry) -> TenantEntry:
    return TenantEntry(tenant="acme", id="a", version=3, keys=keys)


def test_of_two_states_of_a_key_the_later_change_counts_and_revoked_stays_revoked() -> None:
    start = acme()
    for at, digest in enumerate(D):
        start = with_key(start, KeyEntry(name=f"k{at}", sha256=digest), 10.0)
    mine = with_key(start, KeyEntry(name="k0", sha256=D[0], suspended=True), 20.0)
    mine = with_revoked(mine, [D[1]], 20.0, ())
    theirs = with_key(start, KeyEntry(name="k0", sha256=D[0], models=("m",)), 30.0)
    theirs = with_key(theirs, KeyEntry(name="new", sha256="44" * 32), 30.0)
    for one, other in ((mine, theirs), (theirs, mine)):
        merged = reconciled(one, other)
        assert {key.name: key.models for key in merged.keys} == {
            "k0": ("m",),
            "k2": None,
            "new": None,
        }
        assert merged.revoked_sha256 == (D[1],)
        assert merged.version == other.version


def test_a_key_before_a_rotation_that_was_revoked_stays_so_beside_a_later_change() -> None:
    rotated = KeyEntry(name="k", sha256=D[0], former_sha256=D[1], former_until_unix_s=99.0)
    start = with_key(acme(), rotated, 10.0)
    revoked = with_revoked(start, [D[1]], 20.0, ())
    later = with_key(start, msgspec.structs.replace(rotated, models=("m",)), 30.0)
    for one, other in ((revoked, later), (later, revoked)):
        merged = reconciled(one, other)
        assert [(key.models, key.former_sha256) for key in merged.keys] == [(("m",), "")]
    assert [key.sha256.hex() for key in keys_of("acme", TenantFile(), revoked)] == [D[0]]


def test_the_last_suspension_counts_and_at_the_same_time_the_stricter() -> None:
    on = changed(acme(), 5.0, suspended=True, standing=5_000)
    off = changed(on, 9.0, suspended=False, standing=9_000)
    assert not reconciled(on, off).suspended
    assert not reconciled(off, on).suspended
    same = changed(off, 9.0, suspended=True)
    assert reconciled(off, same).suspended


def test_what_was_taken_from_a_key_of_the_file_takes_the_later_state() -> None:
    early = changed(acme(), 5.0, in_file={D[0]: FileKeyState(suspended=True, changed=1)})
    late = changed(acme(), 4.0, in_file={D[0]: FileKeyState(changed=2)})
    assert not reconciled(early, late).in_file[D[0]].suspended
    assert not reconciled(late, early).in_file[D[0]].suspended


def test_a_key_of_the_file_only_ever_loses() -> None:
    listed = file_key("web", expires_unix_s=50.0)
    digest = listed.sha256.hex()
    for ends_s, expected in ((40.0, 40.0), (60.0, 50.0), (0.0, 50.0)):
        state = FileKeyState(expires_unix_s=ends_s)
        entry = TenantEntry(tenant="acme", made=False, in_file={digest: state})
        (key,) = keys_of("acme", file_of("acme", web=listed), entry)
        assert key.expires_unix_s == expected


def test_revoked_keys_of_the_file_outlive_the_bound() -> None:
    listed = file_key("web")
    entry = with_revoked(acme(), [listed.sha256.hex()], 1.0, (listed,))
    for number in range(entries.RETAINED_REVOKED + 5):
        entry = with_revoked(entry, [f"{number:064x}"], 1.0, (listed,))
    assert listed.sha256.hex() in entry.revoked_sha256
    assert len(entry.revoked_sha256) == entries.RETAINED_REVOKED + 1


async def test_a_directory_that_lost_its_memory_gets_it_back() -> None:
    rig = await TenantRig().start()
    await rig.registry.create({"name": "acme"}, WHO)
    key, gone = await rig.add("web"), await rig.add("gone")
    await rig.registry.revoke_key("acme", "gone", WHO)
    rig.directory.__init__()  # type: ignore[misc]
    await rig.sync.poll()
    other = await TenantRig(rig.directory).start()
    assert (other.opens(key), other.opens(gone)) == (True, False)


def test_an_entry_from_before_keys_had_limits_is_read_and_one_with_them_comes_back() -> None:
    old = f'{{"tenant":"acme","id":"a","keys":[{{"name":"web","sha256":"{D[0]}"}}]}}'
    entry = msgspec.json.decode(old, type=TenantEntry)
    assert entry.keys[0].limits == UNLIMITED
    limited = msgspec.structs.replace(entry.keys[0], limits=KeyLimits(requests_per_minute=7))
    entry = with_key(entry, limited, 1.0)
    assert msgspec.json.decode(msgspec.json.encode(entry), type=TenantEntry) == entry


def test_the_later_change_of_a_key_has_its_limits() -> None:
    start = with_key(acme(), KeyEntry(name="k", sha256=D[0]), 10.0)
    early, late = (
        with_key(start, msgspec.structs.replace(start.keys[0], limits=limits), at_s)
        for at_s, limits in ((20.0, KeyLimits(max_concurrency=2)), (30.0, UNLIMITED))
    )
    assert reconciled(early, late).keys[0].limits == UNLIMITED
    assert reconciled(late, early).keys[0].limits == UNLIMITED
    assert reconciled(early, start).keys[0].limits.max_concurrency == 2


async def test_reading_the_directory_opens_the_keys() -> None:
    rig = TenantRig()
    rig.keyring.unread = {"tenants"}
    await rig.start()
    assert not rig.keyring.unread


def test_rotating_a_key_of_the_file_does_not_lift_its_limits() -> None:
    limit = Limit(id="k", scope="key", name="acme/web", unit="sequences", amount=3)
    file = file_of("acme", web=file_key("web", limits=(limit,)))
    rotated = KeyEntry(name="web", sha256=D[0], former_sha256=D[1], former_until_unix_s=99.0)
    keys = keys_of("acme", file, acme(rotated, KeyEntry(name="new", sha256=D[2])))
    assert {key.sha256.hex(): key.limits for key in keys if key.sha256.hex() in D} == {
        D[0]: (limit,),
        D[1]: (limit,),
        D[2]: (),
    }
