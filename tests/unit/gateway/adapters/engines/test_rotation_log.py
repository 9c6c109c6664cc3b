"""Every change of a worker's state is logged once, whoever saw it."""

import logging

import pytest

from gateway.adapters.engines.rotation import RotationLog
from gateway.policy.fleet import fleet
from gateway.policy.fleet.health_rules import HealthRules
from tests.unit.gateway.adapters.engines.test_probes import fleet_of


def test_each_change_is_told_once_with_cause_and_undo(caplog: pytest.LogCaptureFixture) -> None:
    served, log = fleet_of(2), RotationLog()
    pool = served.fleet.pools[0]

    def told(now_s: float) -> list[str]:
        caplog.clear()
        for _ in range(3):
            log.look([served], now_s)
        return caplog.messages

    rules = HealthRules(eject_after=1, eject_s=5.0)
    with caplog.at_level(logging.INFO, "sluice.workers"):
        assert told(0.0) == []
        fleet.unreachable(pool, 0)  # as traffic notes it
        out = "is out of the rotation: "
        probed = "it returns when a probe succeeds"
        assert told(1.0) == [f"worker only-0 of m/only {out}it refuses connections; {probed}"]
        fleet.unreachable(pool, 0, "it refuses connections")  # as a probe does afterwards
        assert told(2.0) == []
        fleet.unfit(pool, 0, "/health answered 503")
        assert told(3.0)[0].endswith(f"/health answered 503; {probed}")
        fleet.probed(pool, 0, ok=True)
        assert told(4.0) == ["worker only-0 of m/only is back in the rotation"]
        fleet.failed(pool, 1, rules, 4.0, "it answered 500")
        tried = "ejected for 5 s; then it is tried again"
        assert told(4.0) == [f"worker only-1 of m/only {out}it answered 500; {tried}"]
        assert told(10.0) == ["worker only-1 of m/only is back in the rotation"]
        fleet.drain(pool, 1, on=True)  # the audit tells it
        assert told(11.0) == []
