"""Who has a place in a pool: what holds for every capacity, and whoever held what before."""

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from controller.allocation import Seat, allocate, fit_held, total
from controller.quantity import NOTHING, Amounts, add, subtract, within

AMOUNTS = st.tuples(st.integers(0, 6), st.integers(0, 6), st.integers(0, 6))


@st.composite
def seats_of(draw: st.DrawFn) -> list[Seat]:
    return [
        Seat(
            name=f"e{number}",
            created=draw(st.integers(0, 4)),
            reserving=draw(st.booleans()),
            wanted=draw(AMOUNTS),
            held=draw(st.none() | AMOUNTS),
        )
        for number in range(draw(st.integers(0, 8)))
    ]


CAPACITY = st.tuples(*[st.integers(0, 20)] * 3)


def elastic(name: str, age: int, wanted: int, held: int | None = None) -> Seat:
    has = None if held is None else (0, 0, held)
    return Seat(name=name, created=age, reserving=False, wanted=(0, 0, wanted), held=has)


def guaranteed(name: str, age: int, wanted: int, held: int | None = None) -> Seat:
    return replace(elastic(name, age, wanted, held), reserving=True)


@given(CAPACITY, seats_of())
def test_nothing_is_allocated_beyond_the_capacity(capacity: Amounts, seats: list[Seat]) -> None:
    assert within(total(allocate(capacity, seats).granted.values()), capacity)
    assert within(total(fit_held(capacity, seats).values()), capacity)


@given(CAPACITY, seats_of())
def test_what_was_allocated_is_allocated_again(capacity: Amounts, seats: list[Seat]) -> None:
    granted = allocate(capacity, seats).granted
    again = allocate(capacity, [replace(seat, held=granted.get(seat.name)) for seat in seats])
    assert again.granted == granted
    assert not again.preempted
    assert not again.outgrown


@given(CAPACITY, seats_of())
def test_the_order_of_the_list_does_not_count(capacity: Amounts, seats: list[Seat]) -> None:
    assert allocate(capacity, seats) == allocate(capacity, seats[::-1])


@given(CAPACITY, seats_of())
def test_whoever_fits_has_a_place(capacity: Amounts, seats: list[Seat]) -> None:
    result = allocate(capacity, seats)
    used = {
        False: total(result.granted.values()),
        True: total(
            result.granted[s.name] for s in seats if s.reserving and s.name in result.granted
        ),
    }
    for seat in seats:
        if (has := result.granted.get(seat.name)) != seat.wanted:
            more = subtract(seat.wanted, has or NOTHING)
            assert not within(add(used[seat.reserving], more), capacity)
            assert result.lacking[seat.name]
        else:
            assert seat.name not in result.lacking


@given(CAPACITY, seats_of())
def test_none_that_reserves_loses_for_an_elastic_one(capacity: Amounts, seats: list[Seat]) -> None:
    result = allocate(capacity, seats)
    reserved = total(
        result.granted[s.name] for s in seats if s.reserving and s.name in result.granted
    )
    for seat in seats:
        if seat.reserving and seat.name in result.outgrown:
            assert not within(add(reserved, seat.retained), capacity)
        assert not (seat.reserving and seat.name in result.preempted)


@given(CAPACITY, seats_of())
def test_no_place_is_taken_that_was_not_needed(capacity: Amounts, seats: list[Seat]) -> None:
    result = allocate(capacity, seats)
    used = total(result.granted.values())
    for seat in seats:
        if seat.name in result.preempted | result.outgrown:
            assert not within(add(used, seat.retained), capacity)


@given(CAPACITY, seats_of())
def test_elastic_ones_take_no_places(capacity: Amounts, seats: list[Seat]) -> None:
    seats = [replace(seat, reserving=False) for seat in seats]
    assert not allocate(capacity, seats).preempted


@given(seats_of(), st.integers(0, 5))
def test_what_is_held_stays_while_it_fits(seats: list[Seat], spare: int) -> None:
    held = total(seat.held or NOTHING for seat in seats)
    capacity = add(held, (spare, spare, spare))
    result = allocate(capacity, seats)
    assert fit_held(capacity, seats) == {s.name: s.retained for s in seats if s.held is not None}
    for seat in seats:
        if seat.reserving and seat.held is not None:
            assert within(seat.retained, result.granted[seat.name])


def test_the_newest_elastic_ones_give_way_and_no_more_than_needed() -> None:
    seats = [elastic("old", 1, 4, 4), elastic("new", 2, 4, 4), guaranteed("g", 3, 3)]
    assert allocate((0, 0, 10), seats).preempted == {"new"}
    assert not allocate((0, 0, 11), seats).preempted


def test_a_small_one_that_gave_way_first_keeps_its_place_if_a_larger_one_had_to_go_too() -> None:
    seats = [elastic("large", 1, 6, 6), elastic("small", 2, 1, 1), guaranteed("g", 3, 5)]
    assert allocate((0, 0, 8), seats).granted == {"g": (0, 0, 5), "small": (0, 0, 1)}


def test_what_is_left_over_goes_back_before_an_older_one_that_waits_gets_it() -> None:
    seats = [
        elastic("waits", 0, 3),
        elastic("large", 1, 6, 6),
        elastic("small", 2, 3, 3),
        guaranteed("g", 3, 5),
    ]
    assert set(allocate((0, 0, 9), seats).granted) == {"g", "small"}


def test_one_that_does_not_fit_holds_up_none_after_it() -> None:
    seats = [guaranteed("huge", 1, 99), guaranteed("g", 2, 4), elastic("e", 3, 4)]
    assert set(allocate((0, 0, 10), seats).granted) == {"g", "e"}


def test_a_shrinking_pool_takes_elastic_places_first_and_then_the_newest() -> None:
    seats = [
        elastic("e", 1, 2, 2),
        guaranteed("first", 2, 4, 4),
        guaranteed("second", 3, 4, 4),
    ]
    assert allocate((0, 0, 8), seats).outgrown == {"e"}
    assert allocate((0, 0, 6), seats).granted == {"first": (0, 0, 4), "e": (0, 0, 2)}


def test_less_counts_at_once_and_more_only_as_a_whole() -> None:
    seat = Seat(name="e", created=1, reserving=False, wanted=(1, 9, 0), held=(5, 5, 0))
    assert allocate((10, 9, 0), [seat]).granted == {"e": (1, 9, 0)}
    assert allocate((10, 8, 0), [seat]).granted == {"e": (1, 5, 0)}


def test_one_on_the_move_loses_its_place_first() -> None:
    moving = replace(guaranteed("moving", 1, 4, 4), moving=True)
    assert fit_held((0, 0, 4), [moving, elastic("e", 2, 4, 4)]) == {"e": (0, 0, 4)}
