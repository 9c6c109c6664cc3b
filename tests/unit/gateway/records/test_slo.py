"""Whether a request kept its target time to first token, and which requests are judged."""

import pytest

from gateway.records.decision import DECISION_SCHEMA, DecisionRecord, TimingSection
from gateway.records.slo import slo_result


def judged(
    outcome: str = "ok",
    status: int = 200,
    *,
    ttft_s: float | None = None,
    duration_s: float = 9.0,
    stream: bool = True,
    admitted: bool = True,
    target_ms: int = 500,
) -> str | None:
    record = DecisionRecord(
        schema=DECISION_SCHEMA,
        time_unix_s=0.0,
        request_id="r",
        endpoint="chat",
        outcome=outcome,
        status=status,
        stream=stream,
        timing=TimingSection(ttft_s=ttft_s, duration_s=duration_s),
    )
    return slo_result(record, target_ms, admitted=admitted)


@pytest.mark.parametrize(("ttft_s", "met"), [(0.1, "true"), (0.5, "true"), (0.501, "false")])
def test_a_first_token_is_compared_with_the_target(ttft_s: float, met: str) -> None:
    assert judged(ttft_s=ttft_s) == met
    assert judged("disconnected", 499, ttft_s=ttft_s) == met, "who left saw the first token"


def test_without_a_target_or_a_first_token_to_see_nothing_is_judged() -> None:
    assert judged(ttft_s=0.1, target_ms=0) is None
    assert judged(ttft_s=0.1, stream=False) is None
    assert judged("upstream_error", 502, stream=False) is None


@pytest.mark.parametrize("outcome", ["upstream_error", "internal_error", "evicted"])
def test_a_failure_after_admission_breaks_the_target_even_after_a_fast_start(outcome: str) -> None:
    assert judged(outcome, 502) == "false"
    assert judged(outcome, 200, ttft_s=0.01) == "false"


@pytest.mark.parametrize("status", [429, 500, 503, 504])
def test_a_refusal_is_apart_before_admission_and_a_failure_after_it(status: int) -> None:
    assert judged("refused", status, admitted=False) == "refused"
    assert judged("refused", status, admitted=True) == "false"


@pytest.mark.parametrize("status", [400, 401, 403, 404, 413])
@pytest.mark.parametrize("admitted", [True, False])
def test_the_client_s_own_faults_are_not_judged(status: int, admitted: bool) -> None:
    assert judged("refused", status, admitted=admitted) is None
    assert judged("error", status, ttft_s=0.01) is None


def test_who_leaves_before_the_first_token_is_judged_by_its_wait() -> None:
    assert judged("disconnected", 499, duration_s=0.6) == "false"
    assert judged("disconnected", 499, duration_s=0.4) is None
