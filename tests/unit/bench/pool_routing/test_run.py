"""Published and stated figures of token-budget pool routing, and what is said of the others."""

from collections.abc import Iterator

import numpy as np
import orjson
import pytest

from bench.common import texts
from bench.common.report import Report, Row
from bench.pool_routing import accuracy, run
from bench.pool_routing.model import (
    AZURE,
    CATEGORIES,
    LMSYS,
    CdfWorkload,
    closed_form,
    expected_ema,
    learn,
    learned_ratio,
    size,
)

CJK = CATEGORIES[2]


@pytest.fixture(scope="module")
def report() -> Iterator[Report]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "LONG_REQUESTS", 40_000)
        yield run.run()


@pytest.fixture(scope="module")
def rows(report: Report) -> dict[str, Row]:
    return {row.metric: row for row in report.rows}


def test_throughputs_and_fleets_of_azure() -> None:
    ours = size(AZURE)
    assert ours.mu_one == pytest.approx(2.996, abs=0.0005)
    assert ours.mu_short == pytest.approx(13.46, abs=0.005)
    assert ours.mu_long == pytest.approx(0.379, abs=0.0005)
    assert (ours.one, ours.short, ours.long) == (361, 72, 229)
    assert 100 * ours.savings == pytest.approx(16.6, abs=0.05)


def test_throughputs_and_fleets_of_lmsys() -> None:
    ours = size(LMSYS)
    assert ours.mu_one == pytest.approx(4.076, abs=0.0005)
    assert ours.mu_short == pytest.approx(6.779, abs=0.0005)
    assert (ours.one, ours.short, ours.long) == (265, 155, 8)
    assert 100 * ours.savings == pytest.approx(38.5, abs=0.05)


@pytest.mark.parametrize(
    ("workload", "stated"),
    [
        (AZURE, [10.5, 11.4, 14.7, 16.6, 19.4, 20.5]),
        (LMSYS, [33.6, 36.6, 37.7, 38.5, 33.6, 23.8]),
    ],
    ids=["Azure", "LMSYS"],
)
def test_savings_by_boundary(workload: CdfWorkload, stated: list[float]) -> None:
    ours = [100 * size(workload, b).savings for b in run.BOUNDARIES]
    assert ours == pytest.approx(stated, abs=0.05)


def test_equations_7_and_8() -> None:
    assert closed_form(0.8, 4) == pytest.approx(0.60)
    assert closed_form(0.7, 2) == pytest.approx(0.35)
    azure = size(AZURE)
    assert azure.corrected == pytest.approx((68, 224), abs=0.5)
    # Without heads equation 8 is the fleet: the closed form is off by what it leaves out.
    assert azure.savings_at_equal_heads == pytest.approx(1 - 292 / 333.8, abs=0.001)
    assert azure.closed_form > 4 * azure.savings


@pytest.mark.parametrize("workload", [AZURE, LMSYS], ids=["Azure", "LMSYS"])
@pytest.mark.parametrize(("low", "high"), [(0, 65_536), (0, 8192), (3000, 20_000)])
def test_the_integral_is_what_sampling_gives(workload: CdfWorkload, low: int, high: int) -> None:
    rng = np.random.default_rng(8192)
    at, up_to = zip((0, 0.0), *workload.breakpoints, strict=True)
    drawn = rng.uniform(workload.cdf(low), workload.cdf(high), 100_000)
    tokens = np.interp(drawn, up_to, at)
    share = np.clip(rng.normal(workload.output_mean, workload.output_std, tokens.size), 0.02, 0.95)
    iterations = np.ceil(tokens * (1 - share) / 512) + tokens * share
    error = iterations.std() / tokens.size**0.5
    assert workload.iterations(low, high) == pytest.approx(iterations.mean(), abs=4 * error)


def test_a_start_at_4_is_still_felt_after_50_observations() -> None:
    assert expected_ema(CJK, 50) / CJK.ratio - 1 == pytest.approx(0.076, abs=0.0005)
    assert learned_ratio(CJK, "paper", 50) == pytest.approx(expected_ema(CJK, 50), rel=0.001)
    assert learned_ratio(CJK, "default", 50) == pytest.approx(CJK.ratio, rel=0.002)
    assert learn(CJK, "paper").as_published == 0


def test_table_3_says_what_does_not_reproduce(rows: dict[str, Row]) -> None:
    near = ("homogeneous: TTFT P99, s", "homogeneous: TPOT P50, ms", "token-budget: TPOT P99, ms")
    for figure in near:
        row = rows[f"Table 3, {figure}"]
        assert row.ratio == pytest.approx(1, abs=0.25)
        assert "does not reproduce" not in row.note
    tail = rows["Table 3, token-budget: TTFT P99, s"]
    assert (tail.published, tail.target) == (1.60, None)
    assert tail.measured == pytest.approx(0.7, abs=0.15)
    assert "does not reproduce" in tail.note


def test_table_3_run_on_has_the_short_pool_running_away(rows: dict[str, Row]) -> None:
    shared = rows["Table 3, token-budget: 40,000 requests, one chunk for all prompts"]
    assert shared.measured == "does not"
    assert "rising in pool short" in shared.note
    each = rows["Table 3, token-budget: 40,000 requests, a chunk for each prompt"]
    assert each.measured == "holds its SLO"


def test_all_that_can_be_had_holds(report: Report) -> None:
    assert [row.metric for row in report.rows if row.holds is False] == []
    assert all((row.target is None) == (row.holds is None) for row in report.rows)
    assert len({row.metric for row in report.rows}) == len(report.rows)


def test_every_table_has_its_rows(rows: dict[str, Row]) -> None:
    for table, least in (("1", 8), ("2", 10), ("3", 12), ("4", 20), ("5", 10)):
        assert sum(name.startswith(f"Table {table}") for name in rows) >= least
    assert sum(name.startswith("Figure 6") for name in rows) >= 12


@pytest.mark.parametrize(
    ("metric", "measured"),
    [
        ("Table 5: nodes, homogeneous", "cannot be derived"),
        ("Table 5: nodes, token-budget", "cannot be derived"),
    ],
)
def test_what_cannot_be_had_is_said(rows: dict[str, Row], metric: str, measured: str) -> None:
    assert (rows[metric].measured, rows[metric].target) == (measured, None)
    assert rows[metric].note


@pytest.mark.parametrize(
    ("metric", "stated"),
    [
        ("Table 5: KV per token and GPU, KiB", 23.5),
        ("Table 5: slots, 8K", 676),
        ("Table 5: slots, 32K", 169),
        ("Table 5: M$ a year, homogeneous", 50.67),
        ("Table 5: M$ a year, token-budget", 35.24),
    ],
)
def test_the_arithmetic_of_the_projection(rows: dict[str, Row], metric: str, stated: float) -> None:
    assert rows[metric].measured == pytest.approx(stated, abs=0.005)


def test_the_mixed_load_is_what_it_says() -> None:
    asks = list(accuracy.mixed(200))
    assert asks == list(accuracy.mixed(200))
    assert {ask.kind for ask in asks} == set(texts.KINDS)
    assert sum(ask.stream for ask in asks) / len(asks) == pytest.approx(0.3, abs=0.1)
    for ask in asks:
        body = orjson.loads(ask.body)
        assert body["max_tokens"] == ask.cap_tokens >= body["mock_output_tokens"] >= 1
