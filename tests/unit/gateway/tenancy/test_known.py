"""What is known of a directory: a join of states, whoever joins first, whatever was lost."""

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.records.tenancy import Denial, Row
from gateway.tenancy.known import Known

NAMES = ("acme/k", "acme/l")
DIGESTS = ("d1" * 32, "d2" * 32)


def key(name: str, uid: str, changed: int, revision: int = 0, sha256: str = "") -> Row:
    fields = {"sha256": sha256 or DIGESTS[changed % 2]}
    return Row(
        kind="key",
        name=name,
        uid=f"{name}-{uid}",
        fields=fields,
        changed=changed,
        revision=revision,
    )


ROWS = st.builds(
    key,
    st.sampled_from(NAMES),
    st.just("a"),
    st.integers(1, 3),
    st.integers(0, 3),
)
GONE = st.builds(
    Denial,
    what=st.just("gone"),
    subject=st.sampled_from([*DIGESTS, *(f"{name}-{uid}" for name in NAMES for uid in "ab")]),
    of=st.just("tenant acme"),
    changed=st.integers(1, 2),
    revision=st.integers(0, 3),
)
RESTRICTED = st.builds(
    Denial,
    what=st.sampled_from(["suspended", "ends"]),
    subject=st.just("tenant acme"),
    value=st.sampled_from([0.0, 1.0]),
    changed=st.integers(1, 3),
    revision=st.integers(0, 3),
)
DENIALS = GONE | RESTRICTED
State = tuple[list[Row], list[Denial]]
STATES: st.SearchStrategy[State] = st.tuples(
    st.lists(ROWS, max_size=3), st.lists(DENIALS, max_size=3)
)


def joined(*states: State) -> Known:
    known = Known()
    for rows, denials in states:
        known.take(rows, denials)
    return known


def content(known: Known) -> object:
    """All of it, by every look-up."""
    keys = known.keys_of("acme")
    assert keys == {row.name: row for row in known.rows.values()}
    return known.rows, known.denials, known.revisions


def state_of(known: Known) -> State:
    return list(known.rows.values()), list(known.denials.values())


@given(STATES, STATES)
def test_a_join_is_the_same_in_either_order_and_again(one: State, other: State) -> None:
    mine, theirs = state_of(joined(one)), state_of(joined(other))
    known = joined(mine, theirs)
    assert content(known) == content(joined(theirs, mine))
    for again in (mine, theirs, state_of(known)):
        assert known.take(*again) == (set(), set())


@given(st.lists(STATES, max_size=4), st.randoms(use_true_random=False))
def test_a_join_of_several_is_the_same_in_any_order(states: list[State], chance: object) -> None:
    shuffled = list(states)
    chance.shuffle(shuffled)  # type: ignore[attr-defined]
    assert content(joined(*states)) == content(joined(*shuffled))


@given(STATES, st.lists(STATES, max_size=3))
def test_what_is_gone_never_comes_back(first: State, later: list[State]) -> None:
    known = joined(first)
    gone = {d.subject for d in known.denials.values() if d.what == "gone"}
    for rows, denials in later:
        known.take(rows, denials)
        assert all(map(known.gone, gone))
        assert gone.isdisjoint(row.uid for row in known.rows.values())


def ends(value: float, changed: int = 1) -> Denial:
    return Denial(what="ends", subject="tenant acme", value=value, changed=changed)


def suspended(value: float, changed: int = 1) -> Denial:
    return Denial(what="suspended", subject="tenant acme", value=value, changed=changed)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (suspended(1.0), suspended(0.0)),
        (suspended(0.0, 2), suspended(1.0)),
        (ends(10.0), ends(20.0)),
        (ends(10.0), ends(0.0)),
        (ends(0.0, 2), ends(10.0)),
    ],
)
def test_the_last_restriction_counts_and_at_the_same_time_the_stricter(
    one: Denial, other: Denial
) -> None:
    for order in ((one, other), (other, one)):
        known = Known()
        known.take((), order)
        assert list(known.denials.values()) == [one]
        assert known.suspended("tenant acme") == (one.what == "suspended" and one.value > 0)
        assert known.ends_unix_s("tenant acme") == (one.value if one.what == "ends" else 0.0)


def test_only_what_changed_is_told() -> None:
    known = Known()
    first, gone = key(NAMES[0], "a", 1), Denial(what="gone", subject=f"{NAMES[0]}-a", changed=1)

    def told(rows: Iterable[Row] = (), denials: Iterable[Denial] = ()) -> object:
        return known.take(rows, denials)

    assert told([first]) == ({first.id}, set())
    assert told([first, key(NAMES[0], "a", 0)]) == (set(), set())
    assert told((), [gone]) == ({first.id}, {gone.id})
    assert told([first], [gone]) == (set(), set())
    assert known.keys_of("acme") == {}
