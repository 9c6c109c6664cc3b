"""What --fail accepts, and which requests meet what."""

import pytest

from simulator.mock_server.api.faults import FaultError, parse_faults


@pytest.mark.parametrize(
    ("spec", "name", "value", "rate"),
    [
        ("reset-mid", "reset-mid", 3, 1.0),
        ("reset-mid:7", "reset-mid", 7, 1.0),
        ("stall", "stall", 0, 1.0),
        ("stall:3@0.25", "stall", 3, 0.25),
        ("slow:2.5", "slow", 2.5, 1.0),
        ("500:0.3", "500", 0, 0.3),
        ("503@0.4", "503", 0, 0.4),
        ("usage-zero@0", "usage-zero", 0, 0.0),
    ],
)
def test_arguments_and_probabilities(spec: str, name: str, value: float, rate: float) -> None:
    (fault,) = parse_faults(spec).faults
    assert (fault.name, fault.value, fault.rate) == (name, value, rate)


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("explode", "unknown fault 'explode'"),
        ("explode", "reset-mid:K"),
        ("slow", "slow needs an argument"),
        ("slow:x", "must be a number"),
        ("slow:0.5", "must be in [1, 1e+06]"),
        ("stall:1.5", "whole number"),
        ("stall:-1", "must be in [0, 1e+09]"),
        ("500:2", "must be in [0, 1]"),
        ("500:0.1@0.2", "probability once"),
        ("refuse:1", "takes no argument"),
        ("refuse@", "must be a number"),
        ("refuse@nan", "must be in [0, 1]"),
        ("stall,stall:2", "stall is given twice"),
    ],
)
def test_a_bad_spec_says_what_is_wrong(spec: str, says: str) -> None:
    with pytest.raises(FaultError) as caught:
        parse_faults(spec)
    assert says in str(caught.value)


def test_draws_depend_on_the_request_number_only_and_meet_the_rate() -> None:
    faults = parse_faults("500:0.3,stall@0.1,no-done")
    draws = [faults.draw(number) for number in range(10_000)]
    assert [d.by_name for d in draws] == [faults.draw(n).by_name for n in range(10_000)]
    for name, rate in (("500", 0.3), ("stall", 0.1), ("no-done", 1.0)):
        assert sum(name in draw for draw in draws) / 10_000 == pytest.approx(rate, abs=0.015)
    both = sum("500" in draw and "stall" in draw for draw in draws) / 10_000
    assert both == pytest.approx(0.03, abs=0.01)  # drawn apart
