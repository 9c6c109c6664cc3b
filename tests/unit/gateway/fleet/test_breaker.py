"""The breaker: when a store is asked."""

from gateway.fleet.breaker import FIRST_PAUSE_S, MAX_PAUSE_S, Breaker


def test_one_failure_is_forgiven_the_second_opens() -> None:
    breaker = Breaker()
    breaker.succeeded()
    breaker.failed(10.0, 0.99)
    first = (breaker.closed, breaker.doubtful, breaker.allows(10.0))
    breaker.failed(10.0, 0.99)
    assert first == (True, True, True)
    assert (breaker.closed, breaker.doubtful) == (False, False)
    assert not breaker.allows(10.0 + FIRST_PAUSE_S / 2)
    assert breaker.allows(10.0 + FIRST_PAUSE_S)


def test_pauses_double_up_to_a_bound_and_are_jittered() -> None:
    breaker = Breaker()
    pauses = []
    for _ in range(8):
        breaker.failed(0.0, 0.0)
        least = breaker.retry_at_s
        pauses.append(least)
    assert pauses[:3] == [FIRST_PAUSE_S / 2, FIRST_PAUSE_S, 2 * FIRST_PAUSE_S]
    assert pauses[-1] == MAX_PAUSE_S / 2
    breaker.failed(0.0, 0.999)
    assert MAX_PAUSE_S * 0.99 < breaker.retry_at_s <= MAX_PAUSE_S
