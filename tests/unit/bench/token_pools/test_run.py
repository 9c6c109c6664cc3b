"""The token-pool experiments, shortened: what they find, and that the laboratory keeps books."""

from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import pytest
from openai import OpenAI, RateLimitError

from bench.token_pools import fairness, memory, reclaim, sharing
from bench.token_pools import protection as token_pools_protection
from bench.token_pools import retries as token_pools_retries
from bench.token_pools import run as token_pools
from bench.token_pools.lab import ITERATION_S, SLOTS, Lab, spark
from bench.token_pools.live import LiveOutcome
from bench.token_pools.protection import experiment
from bench.token_pools.sharing import COPILOT, REPORTS, SYNTH
from gateway.admission.terms import Terms
from gateway.records.entitlement import Entitlement
from tests.running import serving


def tenant(name: str, service_class: str = "elastic", **terms: object) -> Entitlement:
    return Entitlement(name=name, model="m", service_class=service_class, **terms)  # type: ignore[arg-type]


# -- the laboratory


def test_sixteen_slots_make_240_tokens_a_second() -> None:
    lab = Lab(None, [spark()], 0)
    for _ in range(SLOTS):
        lab.offer("t", 64, 64)
    lab.run(20.0)
    end_s = max(job.done_s for job in lab.jobs)
    assert end_s == pytest.approx(64 * ITERATION_S)
    assert SLOTS * 128 / end_s == pytest.approx(240)


def test_leases_live_as_long_as_their_requests_and_no_longer() -> None:
    lab = Lab(Terms(slots=(SLOTS,)), [spark()], 0, tenants=[tenant("t")])
    for _ in range(4):
        assert lab.offer("t", 64, 1_000) is None
    lab.run(60.0)
    assert lab.token_pool is not None
    assert len(lab.token_pool.leases) == 4, "renewed beyond the lease's life of 30 s"
    lab.run(200.0)
    account = lab.token_pool.accounts["t"]
    assert not lab.token_pool.leases
    assert lab.token_pool.pools[0].inflight == account.total == 0
    assert account.debited - account.refunded == account.used == 4 * 1_064


def test_a_denial_for_the_pool_s_sake_says_which_rule_it_was() -> None:
    patient, urgent = tenant("patient", slo_ms=30_000), tenant("urgent", slo_ms=500)
    lab = Lab(Terms(slots=(4,)), [spark(4)], 0, tenants=[patient, urgent])
    assert [lab.offer("patient", 64, 64) for _ in range(3)] == [None] * 3
    reasons = [lab.offer("patient", 64, 64)]
    lab.join(tenant("urgent", slo_ms=500, baseline=(4,)))
    assert lab.offer("urgent", 64, 64) is None
    reasons.append(lab.offer("patient", 64, 64))
    assert lab.offer("urgent", 64, 64) is None, "outranks patient, one beyond the slots"
    reasons.append(lab.offer("urgent", 64, 64))
    assert [r.reason if r else "" for r in reasons] == ["headroom", "low priority", "overshoot"]


# -- Experiment 1


def test_token_pools_keep_the_engine_s_queue_short_and_deny_no_guaranteed() -> None:
    ours, nothing = experiment("token pools", 2), experiment("no admission", 2)
    assert ours.denied_on_priority == 0
    assert ours.most_waiting <= 4 < 25 < nothing.most_waiting
    assert ours.p99_ttft_s[1] < 2.0 < 10.0 < nothing.p99_ttft_s[1]
    assert ours.spot_throttled > 0.3
    assert nothing.spot_throttled == nothing.denied_own == 0


def test_static_limits_let_a_queue_grow_or_turn_guaranteed_traffic_away() -> None:
    sold, fit = experiment("limits as sold", 2), experiment("limits that fit", 2)
    assert sold.most_waiting > 20
    assert sold.p99_ttft_s[1] > 10.0
    assert fit.denied_own > 0.2
    assert fit.p99_ttft_s[1] > 2.0


# -- Experiment 2


def test_scarcity_goes_to_the_patient_tenant_and_is_remembered() -> None:
    found = sharing.experiment("paper", 0)
    assert found.low_priority[COPILOT] == 0
    assert found.low_priority[SYNTH] > 100
    assert found.peak_debt[SYNTH] > 0.7 > 0.3 > found.peak_debt[COPILOT]
    assert max(found.settled_debt.values()) < 0.03
    assert found.ok[COPILOT] == pytest.approx(700, rel=0.05)
    assert found.ok[SYNTH] == pytest.approx(381, rel=0.1)
    assert found.ok[REPORTS] == pytest.approx(60, rel=0.25)
    assert found.most_inflight <= 16


@pytest.mark.parametrize("profile", ["paper", "default"])
def test_scarcity_is_shared_alike_where_terms_are_in_slots(profile: str) -> None:
    found = sharing.experiment(profile, 0, tokens_per_s=sharing.IN_SLOTS)
    assert found.low_priority[COPILOT] == 0
    assert found.low_priority[SYNTH] > 100
    assert found.peak_debt[SYNTH] > 0.3 > 0.1 > found.peak_debt[COPILOT]
    assert max(found.settled_debt.values()) < 0.03


def test_published_debts_are_those_of_a_rule_that_owes_all() -> None:
    found = sharing.experiment("paper", 0, owes_all=True)
    assert found.low_priority[COPILOT] == 0
    assert found.peak_debt[COPILOT] == pytest.approx(0.607, rel=0.1)
    assert found.peak_debt[SYNTH] == pytest.approx(0.775, rel=0.05)


def test_waiting_as_told_costs_no_answers() -> None:
    told = sharing.experiment("paper", 1, wait_cap_s=60.0)
    soon = sharing.experiment("paper", 1)
    assert told.low_priority[SYNTH] < 0.6 * soon.low_priority[SYNTH]
    assert told.ok[SYNTH] > 0.95 * soon.ok[SYNTH]


# -- reclaim, retries, memory, overload


def test_eviction_hands_slots_back_within_reclaim_time() -> None:
    lent = reclaim.experiment("spot", 0, 0, length_s=400)
    evicted = reclaim.experiment("preemptible", 1, 0, length_s=400)
    limit_s = reclaim.RECLAIM_S + reclaim.CANCEL_S + ITERATION_S
    assert max(evicted.waits_s) <= limit_s < 3.0 < max(lent.waits_s)
    assert 0 < evicted.evicted <= len(evicted.waits_s)
    assert lent.denied == evicted.denied == lent.evicted == 0


@pytest.mark.parametrize(("times", "percent"), [(1.5, 80), (2.0, 60), (3.0, 40), (5.0, 24)])
def test_bursts_complete_when_waits_are_promised(times: float, percent: int) -> None:
    assert token_pools_retries.burst(times, 0, promises=True) == 1.0
    alone = token_pools_retries.burst(times, 0, promises=False)
    assert 100 * alone == pytest.approx(percent, abs=0.1)


HEADERS: list[dict[str, str]] = [
    {},
    {"retry-after": "7"},
    {"retry-after": "7", "retry-after-ms": "2500"},
    {"retry-after": "120"},
    {"retry-after": "121"},
    {"retry-after": "0"},
]


class Refusing(BaseHTTPRequestHandler):
    """Answers 429 with the headers of its server."""

    told: ClassVar[dict[str, str]] = {}

    def do_GET(self) -> None:
        self.send_response(429)
        for name, value in self.told.items():
            self.send_header(name, value)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - its name
        """Nothing."""


@pytest.fixture(scope="module")
def refusing() -> Iterator[str]:
    with serving(ThreadingHTTPServer(("127.0.0.1", 0), Refusing)) as url:
        yield url


@pytest.mark.parametrize("headers", HEADERS, ids=str)
def test_the_experiment_s_client_waits_as_the_official_one(
    headers: dict[str, str], refusing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []
    monkeypatch.setattr(Refusing, "told", headers)
    monkeypatch.setattr("openai._base_client.time.sleep", waited.append)
    monkeypatch.setattr("openai._base_client.random", lambda: 0.5)
    with (
        OpenAI(api_key="k", base_url=refusing, max_retries=2) as client,
        pytest.raises(RateLimitError),
    ):
        client.models.list()
    ours = [token_pools_retries.client_wait_s(headers, retry, 0.5) for retry in (0, 1)]
    assert [wait_s for wait_s in ours if wait_s is not None] == waited


def test_reserving_what_is_expected_uses_the_slots() -> None:
    cap = memory.experiment(0, learn=False, length_s=120)
    ours = memory.experiment(0, learn=True, length_s=120)
    assert ours.slots >= 28 > 10 > cap.slots
    assert ours.most_at_entry <= 1.125
    assert ours.most_used <= 1.0
    assert ours.extended > 0
    assert ours.preemptions == 0


def test_credit_keeps_overload_fair() -> None:
    found = fairness.experiment("default", 0, baseline=3, length_s=400)
    assert max(found.drought_ticks.values()) <= fairness.MAX_TICKS
    assert min(found.rate.values()) > 0.3
    assert found.over <= SLOTS + 2
    assert found.use > 0.98


# -- reports


def test_the_weights_are_the_published_ones() -> None:
    assert all(row.holds is not False for row in token_pools.formula_rows())


def test_rows_of_each_experiment_say_what_they_measured() -> None:
    protection = {row.metric: row for row in token_pools_protection.rows(range(2))}
    assert protection["Exp. 1, token pools: guaranteed denied on priority"].holds
    assert protection["Exp. 1, no admission: most requests waiting in the engine"].published == 34
    retries = token_pools_retries.rows(range(1))
    assert [row.holds for row in retries if row.target] == [True] * 3
    assert len(token_pools.formula_rows()) == 8


def run(ttft_s: float, waiting: list[int], *, denied: str = "concurrency") -> LiveOutcome:
    return LiveOutcome(
        ttft_s=ttft_s,
        counted=9,
        waiting=waiting,
        lag_s=0.001,
        denied=Counter([denied]),
        failed=0,
        spot_refused=0.4,
    )
