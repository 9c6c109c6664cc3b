"""The ring of decision records: bounded, and whatever is in it is found."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from gateway.adapters.records.request_log import MAX_IN_PIECE, DecisionRing


def ids(records: list[msgspec.Raw]) -> list[bytes]:
    return [bytes(record) for record in records]


def filled(capacity: int, *names: str) -> DecisionRing:
    ring = DecisionRing(capacity)
    for name in names:
        ring.append(name, name.encode())
    return ring


def test_the_ring_keeps_the_newest() -> None:
    ring = filled(2, *"abc")
    assert ring.find("a") is None
    assert ring.find("b") == b"b"
    assert ids(ring.latest(10)) == [b"c", b"b"]
    assert len(ring) == 2


def test_the_ring_gives_as_many_as_asked_for() -> None:
    assert ids(filled(9, *"abc").latest(2)) == [b"c", b"b"]


def test_a_ring_of_none_keeps_nothing() -> None:
    ring = filled(0, "a")
    assert (len(ring), ring.find("a")) == (0, None)


def test_of_an_id_used_twice_the_newer_record_is_found_and_none_is_lost() -> None:
    ring = filled(4, *"abc")
    ring.append("b", b"again")
    assert ring.find("b") == b"again"
    assert ids(ring.latest(4)) == [b"again", b"c", b"b", b"a"]


def test_that_holds_within_a_piece_too() -> None:
    ring = DecisionRing(64 * MAX_IN_PIECE)
    for n in range(MAX_IN_PIECE):
        ring.append("same" if n % 5 == 0 else f"{n}", b"%d" % n)
    assert ring.find("same") == b"%d" % (MAX_IN_PIECE - 1 - (MAX_IN_PIECE - 1) % 5)


@given(
    st.integers(0, 40 * MAX_IN_PIECE),
    st.lists(
        st.tuples(st.integers(0, 9), st.sampled_from([None, "x", "y"]), st.binary(max_size=9)),
        max_size=900,
    ),
)
def test_it_is_the_newest_records_and_hardly_more(
    capacity: int, said: list[tuple[int, str | None, bytes]]
) -> None:
    ring = DecisionRing(capacity)
    for name, tenant, line in said:
        ring.append(f"{name}", line, tenant)
    newest = [line for _, _, line in reversed(said)]
    found = ids(ring.latest(len(said)))
    assert found == newest[: len(found)]
    assert min(capacity, len(said)) <= len(ring) == len(found)
    assert len(ring) < capacity + MAX_IN_PIECE
    kept = said[len(said) - len(ring) :]
    for name in range(10):
        of_id = [(tenant, line) for id_, tenant, line in kept if id_ == name]
        assert ring.find(f"{name}") == (of_id[-1][1] if of_id else None)
        for tenant in "xy":
            of_tenant = [line for owner, line in of_id if owner == tenant]
            assert ring.find(f"{name}", tenant) == (of_tenant[-1] if of_tenant else None)


def test_what_the_ring_dropped_leaves_nothing_in_its_index() -> None:
    ring = DecisionRing(100)
    for n in range(10_000):
        ring.append(f"{n}", b"", "x")
    assert len(ring._newest) == 2 * len(ring)
