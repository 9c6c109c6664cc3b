"""Who has a place in a pool: a pure function of its capacity and of who held one before.

Rules:

- What is held stays while it fits. Less of it, in any dimension, counts at once; more only as a
  whole, when it fits with the old part counted as free.
- Those that reserve (dedicated, guaranteed) come before elastic ones, and in each the older one
  first. One that does not fit holds up nobody after it.
- One that reserves may take the places of elastic ones: whole, newest first, no more than needed.
- When the capacity holds no longer what is held, elastic ones lose it first, then those that
  reserve, the newest first; whoever still fits stays.

A result that is given as what is held gives the same result, so that the plan settles.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import reduce

from controller.quantity import NOTHING, Amounts, add, smaller, subtract, within
from gateway.records.record import Record


class Seat(Record, frozen=True, kw_only=True):
    """A request for a place in a pool. Amounts are of the dimensions that the pool enforces."""

    name: str
    created: int
    """Unix ms; equal ones go by name."""
    reserving: bool
    """Whether it comes before elastic ones, and may take their places."""
    wanted: Amounts
    held: Amounts | None = None
    """What it had before; None: no place."""
    moving: bool = False
    """It gave its place up for another one, which it does not have yet: it loses it first."""

    @property
    def retained(self) -> Amounts:
        """What counts of what it holds: no more than it still wants."""
        return smaller(self.held or NOTHING, self.wanted)


class Allocation(Record, frozen=True, kw_only=True):
    """Who has what."""

    granted: Mapping[str, Amounts]
    preempted: frozenset[str]
    """Lost their places to those that reserve."""
    outgrown: frozenset[str]
    """Lost them because the capacity shrank."""
    lacking: Mapping[str, tuple[int, ...]]
    """Who does not have what it wants -> the dimensions in which there is too little left."""


def _age(seat: Seat) -> tuple[int, str]:
    return seat.created, seat.name


def fit_held(capacity: Amounts, seats: Iterable[Seat]) -> dict[str, Amounts]:
    """What of the held places a capacity still holds."""
    held = [seat for seat in seats if seat.held is not None]
    held.sort(key=lambda seat: (seat.moving, not seat.reserving, *_age(seat)))
    used = total(seat.retained for seat in held)
    count = len(held)
    while count and not within(used, capacity):
        count -= 1
        used = subtract(used, held[count].retained)
    fit = {seat.name: seat.retained for seat in held[:count]}
    for seat in held[count:]:  # those that fit beside what stayed keep theirs
        if within(more := add(used, seat.retained), capacity):
            used = more
            fit[seat.name] = seat.retained
    return fit


def allocate(capacity: Amounts, seats: Sequence[Seat]) -> Allocation:
    """Fit what is held, then give places to those that wait, by the rules above."""
    fit = fit_held(capacity, seats)
    granted = dict(fit)
    seats = sorted(seats, key=_age)
    reserving = [seat for seat in seats if seat.reserving]
    elastic = [seat for seat in seats if not seat.reserving]
    reserved = total(granted[seat.name] for seat in reserving if seat.name in granted)
    used = total(granted.values())
    victims = [seat for seat in elastic if seat.name in granted]
    for seat in reserving:
        more = subtract(seat.wanted, granted.get(seat.name, NOTHING))
        if granted.get(seat.name) == seat.wanted or not within(add(reserved, more), capacity):
            continue
        while not within(add(used, more), capacity):
            used = subtract(used, granted.pop(victims.pop().name))
        reserved, used = add(reserved, more), add(used, more)
        granted[seat.name] = seat.wanted
    lost = [seat for seat in elastic if seat.held is not None and seat.name not in granted]
    for seat in lost:  # more may be free than was needed
        if within(add(used, seat.retained), capacity):
            granted[seat.name] = seat.retained
            used = add(used, seat.retained)
    for seat in elastic:
        more = subtract(seat.wanted, granted.get(seat.name, NOTHING))
        if granted.get(seat.name) != seat.wanted and within(add(used, more), capacity):
            granted[seat.name] = seat.wanted
            used = add(used, more)
    gone = frozenset(seat.name for seat in seats if seat.held is not None) - granted.keys()
    lacking = {}
    for seat in seats:
        if granted.get(seat.name) != seat.wanted:
            more = subtract(seat.wanted, granted.get(seat.name, NOTHING))
            lacking[seat.name] = _missing(more, reserved if seat.reserving else used, capacity)
    return Allocation(
        granted=granted, preempted=gone & fit.keys(), outgrown=gone - fit.keys(), lacking=lacking
    )


def total(amounts: Iterable[Amounts]) -> Amounts:
    """Their sum."""
    return reduce(add, amounts, NOTHING)


def _missing(more: Amounts, used: Amounts, capacity: Amounts) -> tuple[int, ...]:
    triples = enumerate(zip(more, used, capacity, strict=True))
    return tuple(at for at, (asked, taken, most) in triples if asked and taken + asked > most)
