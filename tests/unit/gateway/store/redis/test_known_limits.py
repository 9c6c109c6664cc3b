"""What a process knows of limits in Redis goes with the limits."""

import msgspec

from gateway.admission.admission import Grant
from gateway.records.limit import Holding, Limit, LimitUse
from gateway.store.redis.fallback import KnownLimits
from gateway.store.redis.lease_codec import NOTHING
from tests.token_pools import NOW_S, entitled, granted, pool

DAY_S = 86_400
LIMITS = [
    Limit(
        id=f"tenant:{name}:tokens:day",
        scope="tenant",
        name=name,
        unit="tokens",
        amount=1_000,
        window="day",
    )
    for name in ("stays", "goes")
]


def grant() -> Grant:
    """A request that holds 10 tokens of each limit, of which 70 are used."""
    found = granted(pool(entitled()))
    held = tuple(Holding(limit.id, "tokens", NOW_S, 10) for limit in LIMITS)
    return msgspec.structs.replace(
        found, held=held, uses=tuple(LimitUse(70, 1_000, False) for _ in LIMITS)
    )


def known(known_limits: KnownLimits) -> set[str]:
    """The limits of which a share knows a level."""
    book = known_limits.begin(1, (), 1)
    found = set(book.counters)
    known_limits.end(1)
    return found


def test_a_limit_that_nobody_defines_is_forgotten_once_its_window_is_over() -> None:
    found = KnownLimits()
    encoder = found.encoder
    encoder.asked(LIMITS, NOTHING, NOW_S, "hash")
    stays, goes = (limit.id for limit in LIMITS)
    found.note(LIMITS, grant(), NOW_S)
    found.sweep(stays.__eq__, NOW_S + DAY_S)
    assert known(found) == {stays, goes}
    found.sweep(stays.__eq__, NOW_S + 3 * DAY_S)  # of what a share left
    assert known(found) == {stays}
    found.note(LIMITS, grant(), NOW_S)
    found.sweep(stays.__eq__, NOW_S + 3 * DAY_S)  # of what Redis told
    assert known(found) == {stays}
    assert set(encoder._known) == {stays}
