"""Rights are what the file, a cluster and the directory grant, less what was denied."""

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.records.request import TenantKey
from gateway.records.tenancy import (
    NO_FILE,
    ClusterEntitlement,
    ClusterState,
    Denial,
    KnownCluster,
    Row,
    TenancyFile,
    fingerprint,
)
from gateway.tenancy.known import Known, joined
from gateway.tenancy.rights import entitlement_of, tenant_of
from tests.tenancy_fakes import SHAPES, file_key, file_of, section

DIGESTS = tuple(digit * 64 for digit in "1234")
MODEL_OF = {"chat": "m", "code": "n"}
ENDS = st.sampled_from([None, 1.0, 2.0])
TIMES = (0, 1, 2)
LISTED = st.sampled_from([None, ("chat",), ("code", "chat")])
MODELS = st.sampled_from([None, frozenset("m"), frozenset("n")])
PAIRS = st.permutations(DIGESTS).map(lambda drawn: drawn[:2])
SUBJECTS = ("tenant acme", "entitlement chat", *(f"key {digest}" for digest in DIGESTS))


def listed_key(
    digest: str,
    name: str,
    models: frozenset[str] | None,
    listed: tuple[str, ...] | None,
    ends: float | None,
) -> TenantKey:
    return TenantKey(
        tenant="acme",
        name=name,
        sha256=bytes.fromhex(digest),
        models=models,
        entitlements=listed or (),
        only_listed=listed is not None,
        expires_unix_s=ends,
    )


@st.composite
def files(draw: st.DrawFn) -> TenancyFile:
    """It may have the tenant, with keys, and entitlements, with keys of their own."""
    own = st.sets(st.sampled_from(DIGESTS), max_size=1)
    entitlements = [
        section(name, *draw(own), model=MODEL_OF[name], digest=draw(st.sampled_from(["s1", "s2"])))
        for name in draw(st.sets(st.sampled_from(["chat", "code"])))
    ]
    keys: dict[str, Any] = {
        name: listed_key(digest, name, draw(MODELS), draw(LISTED), draw(ENDS))
        for name, digest in zip("kl", draw(PAIRS), strict=True)
        if draw(st.booleans())
    }
    tenants = ["acme"] if draw(st.booleans()) or keys else []
    return file_of(*tenants, entitlements=entitlements, **keys)


def tenant_row(uid: str, listed: tuple[str, ...] | None) -> Row:
    return Row(kind="tenant", name="acme", uid=uid, fields={"entitlements": listed})


def entitlement_row(name: str, uid: str, of: str) -> Row:
    fields = {"name": name, "tenant": "acme", "model": MODEL_OF[name]}
    return Row(kind="entitlement", name=name, uid=uid, fields=fields, of=of)


def key_row(
    name: str,
    of: str,
    digests: list[str],
    models: frozenset[str] | None,
    listed: tuple[str, ...] | None,
    until: float | None,
) -> Row:
    """A tenant's key, perhaps rotated, or an entitlement's own."""
    own = name.endswith(":")
    fields: dict[str, object] = {"sha256": digests[0]}
    if not own:
        fields |= {"name": name[-1], "models": models, "entitlements": listed}
    rotated = until is not None and not own
    return Row(
        kind="key",
        name=name + fingerprint(digests[0]) if own else name,
        uid=name,
        fields=fields,
        of=of,
        former_sha256=digests[1] if rotated else "",
        former_until_unix_s=until or 0.0 if rotated else 0.0,
    )


UIDS = st.sampled_from(["u1", "u2"])
NAMES = st.sampled_from(["acme/k", "acme/l", "chat:", "code:"])
ROWS = st.lists(
    st.builds(tenant_row, UIDS, LISTED)
    | st.builds(
        entitlement_row, st.sampled_from(["chat", "code"]), UIDS, st.sampled_from(["", "s1"])
    )
    | st.builds(key_row, NAMES, UIDS | st.just(""), PAIRS, MODELS, LISTED, ENDS),
    max_size=6,
    unique_by=lambda row: row.id,
)
RESTRICTIONS = st.builds(
    Denial,
    what=st.sampled_from(["suspended", "ends"]),
    subject=st.sampled_from(SUBJECTS),
    value=st.sampled_from([1.0, 2.0]),
    changed=st.integers(1, 3),
).filter(lambda denial: denial.id != "ends tenant acme")
REVOKED = st.builds(Denial, what=st.just("gone"), subject=st.sampled_from(DIGESTS))
DENIALS = st.lists(RESTRICTIONS | REVOKED, max_size=4)


def grant(
    name: str,
    digest: str = DIGESTS[0],
    verdict: Any = "",
    suspended: bool = False,
    service_class: str = "elastic",
) -> ClusterEntitlement:
    fields = {"tenant": "acme", "model": MODEL_OF[name], "service_class": service_class}
    return ClusterEntitlement(
        name=name,
        fields=fields,
        digests=(digest,),
        created=7,
        verdict=verdict,
        suspended=suspended,
        source=f"TokenEntitlement team/{name}",
        uid="u1",
    )


GRANTS = st.lists(
    st.builds(
        grant,
        st.sampled_from(["chat", "code"]),
        st.sampled_from(DIGESTS),
        st.sampled_from(["", "", "pending", "degraded"]),
        st.booleans(),
        st.sampled_from(["elastic", "spot"]),
    ),
    max_size=2,
    unique_by=lambda granted: granted.name,
)
STALE = st.sampled_from([frozenset[str](), frozenset({"spot"}), frozenset({"spot", "elastic"})])


def granting(grants: list[ClusterEntitlement], stale: frozenset[str] = frozenset()) -> KnownCluster:
    return KnownCluster(entitlements={each.name: each for each in grants}, stale=stale)


def known_of(rows: list[Row], denials: list[Denial], cluster: KnownCluster | None = None) -> Known:
    known = Known()
    known.take(rows, denials)
    known.cluster = cluster or KnownCluster()
    return known


def in_force(file: TenancyFile, known: Known) -> Iterator[tuple[str, str, int]]:
    """(digest, entitlement, time) of whatever a key opens."""
    tenant = tenant_of("acme", file, known)
    named = ((name, entitlement_of(name, file, known, SHAPES)) for name in ("chat", "code"))
    for name, entry in named:
        if entry is None or entry.terms.suspended or tenant.suspended:
            continue
        for at in TIMES:
            if 0 < entry.terms.expires_unix_s <= at:
                continue
            for digest in entry.digests:
                yield digest, name, at
            for found in tenant.keys:
                key = found.key
                lives = not key.suspended and (key.expires_unix_s or 9.0) > at
                opens = name in key.entitlements if key.only_listed else True
                if lives and opens and (key.models is None or entry.terms.model in key.models):
                    yield found.sha256, name, at


CLUSTERS = st.builds(granting, GRANTS, STALE)


@given(files(), ROWS, DENIALS, CLUSTERS)
def test_nothing_that_was_denied_is_in_force(
    file: TenancyFile, rows: list[Row], denials: list[Denial], cluster: KnownCluster
) -> None:
    known = known_of(rows, denials, cluster)
    for digest, entitlement, at in in_force(file, known):
        assert not known.gone(digest)
        for subject in ("tenant acme", f"entitlement {entitlement}", f"key {digest}"):
            assert not known.suspended(subject)
            assert not 0 < known.ends_unix_s(subject) <= at


@given(files(), ROWS, DENIALS, CLUSTERS, st.data())
def test_a_denial_adds_no_right(
    file: TenancyFile,
    rows: list[Row],
    denials: list[Denial],
    cluster: KnownCluster,
    data: st.DataObject,
) -> None:
    """Of a row made here, all that it has is denied together, and all that its keys have."""
    before = set(in_force(file, known_of(rows, denials, cluster)))
    deleted = [
        tuple(
            subject
            for each in (row, *(key for key in rows if row.kind != "key" and key.of == row.uid))
            for subject in (each.uid, *each.digests)
        )
        for row in rows
        if row.kind != "entitlement" or not row.of
    ]
    revoked = data.draw(st.sampled_from([*((digest,) for digest in DIGESTS), *deleted]))
    gone = [Denial(what="gone", subject=each) for each in revoked]
    last = msgspec.structs.replace(data.draw(RESTRICTIONS), value=1.0, changed=4)
    more = data.draw(st.sampled_from([gone, [last]]))
    assert set(in_force(file, known_of(rows, [*denials, *more], cluster))) <= before


def stated(file: TenancyFile, known: Known, name: str) -> tuple[str, str] | None:
    """Who states an entitlement, and its verdict."""
    entry = entitlement_of(name, file, known, SHAPES)
    return None if entry is None else (entry.origin, entry.granted.verdict)


@given(files(), ROWS, DENIALS, CLUSTERS)
def test_of_one_name_the_file_counts_then_the_cluster_then_what_was_made_here(
    file: TenancyFile, rows: list[Row], denials: list[Denial], cluster: KnownCluster
) -> None:
    known, granted = known_of(rows, denials, cluster), cluster.entitlements
    for name in ("chat", "code"):
        found = entitlement_of(name, file, known, SHAPES)
        if name in file.entitlements:
            assert found is not None
            assert (found.origin, found.granted.source) == ("file", "")
        elif name in granted:
            assert found is not None
            assert (found.origin, found.granted.source) == (
                "kubernetes",
                f"TokenEntitlement team/{name}",
            )
            assert set(found.digests) <= set(granted[name].digests)
            stale = found.terms.service_class in cluster.stale
            withheld = not found.suspended and (granted[name].verdict or stale)
            assert bool(found.granted.verdict) == bool(withheld)
            assert found.terms.suspended or not withheld
        else:
            without = entitlement_of(name, file, known_of(rows, denials), SHAPES)
            assert found == without


@given(files(), ROWS, DENIALS, CLUSTERS)
def test_what_left_every_source_opens_nothing(
    file: TenancyFile, rows: list[Row], denials: list[Denial], cluster: KnownCluster
) -> None:
    """What a cluster withdrew leaves what the others grant, as if it had never been there."""
    nothing = ClusterState(version=(9, 9), whole=True)
    left, _ = joined(cluster, nothing, frozenset())
    known = known_of(rows, denials, left)
    assert list(in_force(file, known)) == list(in_force(file, known_of(rows, denials)))
    assert list(in_force(NO_FILE, known_of([], denials, left))) == []


STATES = st.lists(
    st.builds(
        ClusterState,
        version=st.tuples(st.integers(0, 2), st.integers(1, 3)),
        whole=st.just(value=True),
        entitlements=GRANTS.map(tuple),
    ),
    min_size=1,
    max_size=4,
    unique_by=lambda state: state.version,
)


@given(files(), ROWS, DENIALS, STATES, st.data())
def test_in_which_order_anything_is_heard_never_matters(
    file: TenancyFile,
    rows: list[Row],
    denials: list[Denial],
    states: list[ClusterState],
    data: st.DataObject,
) -> None:
    """Of what a cluster published, the newest of the greatest epoch counts."""
    rights = []
    for _ in range(2):
        known = Known()
        heard: list[Any] = [*rows, *denials, *states]
        for each in data.draw(st.permutations(heard)):
            if isinstance(each, ClusterState):
                known.cluster, _ = joined(known.cluster, each, frozenset())
            elif isinstance(each, Row):
                known.take([each], ())
            else:
                known.take((), [each])
        newest = max(states, key=lambda state: state.version)
        assert known.cluster == KnownCluster(
            version=newest.version, entitlements={e.name: e for e in newest.entitlements}
        )
        rights.append(sorted(in_force(file, known)))
    assert rights[0] == rights[1]


@given(GRANTS, GRANTS, STALE, STALE)
def test_what_news_of_a_cluster_changes_is_told(
    before: list[ClusterEntitlement],
    after: list[ClusterEntitlement],
    stale: frozenset[str],
    then: frozenset[str],
) -> None:
    """In parts as in whole; nothing is told of a heartbeat."""
    known = granting(before, stale)
    ahead = {each.name: each for each in after}
    gone = tuple(known.entitlements.keys() - ahead.keys())
    whole = ClusterState(version=(1, 1), whole=True, entitlements=tuple(after))
    part = ClusterState(
        version=(1, 1),
        entitlements=tuple(e for e in after if known.entitlements.get(e.name) != e),
        removed=gone,
    )
    names = known.entitlements.keys() | ahead.keys()
    for state in (whole, part):
        later, changed = joined(known, state, then)
        assert later == KnownCluster(version=(1, 1), entitlements=ahead, stale=then)
        differ = {n for n in names if known.entitlements.get(n) != ahead.get(n)}
        assert differ <= changed <= names
        assert changed == differ or stale != then
    heartbeat = ClusterState(version=(1, 1))
    assert joined(later, heartbeat, then) == (later, set())


@pytest.mark.parametrize(("denied", "expected"), [(40.0, 40.0), (60.0, 50.0), (0.0, 50.0)])
def test_a_key_of_the_file_only_ever_loses(denied: float, expected: float) -> None:
    listed = file_key("web", expires_unix_s=50.0)
    ends = Denial(what="ends", subject=f"key {listed.sha256.hex()}", value=denied)
    (found,) = tenant_of("acme", file_of("acme", web=listed), known_of([], [ends])).keys
    assert found.key.expires_unix_s == expected


def test_keys_of_a_tenant_that_left_the_file_do_not_open_for_a_new_one_of_its_name() -> None:
    of_file = Row(kind="key", name="acme/a", uid="k1", fields={"name": "a", "sha256": DIGESTS[0]})
    made = Row(kind="tenant", name="acme", uid="t1", fields={"name": "acme"})
    own = msgspec.structs.replace(
        of_file, name="acme/b", uid="k2", of="t1", fields={"name": "b", "sha256": DIGESTS[1]}
    )
    for file, rows, expected in (
        (file_of("acme"), [of_file], ["a"]),
        (file_of(), [of_file], []),
        (file_of(), [of_file, made, own], ["b"]),
        (file_of("acme"), [of_file, made, own], ["a", "b"]),
    ):
        keys = tenant_of("acme", file, known_of(rows, [])).keys
        assert [found.key.name for found in keys] == expected


def test_a_key_is_denied_by_its_digest_not_by_its_name() -> None:
    """Or revoking the file's key would lift what another value had of its suspension."""
    file = file_of("acme", k=listed_key(DIGESTS[0], "k", frozenset("m"), None, None))
    made = key_row("acme/k", "", [DIGESTS[1]], None, None, None)
    suspended = Denial(what="suspended", subject=f"key {DIGESTS[0]}", value=1.0)
    revoked = Denial(what="gone", subject=DIGESTS[0])
    for denials, expected in (
        ([suspended], [(DIGESTS[0], True), (DIGESTS[1], False)]),
        ([suspended, revoked], [(DIGESTS[1], False)]),
    ):
        keys = tenant_of("acme", file, known_of([made], denials)).keys
        assert [(each.sha256, each.key.suspended) for each in keys] == expected
        assert keys[-1].key.models == frozenset("m"), "the section still narrows its name"
