"""Table 3 of the token-budget paper: a transient, and what it hides."""

from functools import cache
from typing import Literal

from bench.pool_routing.model import AZURE
from simulator.experiments.token_budget_latency import BOUNDARY_TOKENS, Latency, latencies, pool


@cache
def two_rows(
    requests: int, prefill: Literal["shared", "independent"] = "shared"
) -> tuple[Latency, Latency]:
    return latencies(
        AZURE.breakpoints,
        output_mean=AZURE.output_mean,
        output_std=AZURE.output_std,
        one=361,
        short=72,
        long=229,
        requests=requests,
        prefill=prefill,
    )


def test_ten_seconds_give_latencies_near_the_published_ones() -> None:
    one, two = two_rows(10_000)
    # Published: .02 and .91 s, 12 and 13 ms; .09 and 1.60 s, 25 and 29 ms.
    assert 0.015 < one.ttft_p50_s < 0.03
    assert 0.6 < one.ttft_p99_s < 1.0
    assert 0.010 < one.tpot_p50_s < one.tpot_p99_s < 0.013
    assert 0.06 < two.ttft_p50_s < 0.10
    assert 0.5 < two.ttft_p99_s < 1.0
    assert 0.018 < two.tpot_p50_s < two.tpot_p99_s < 0.030
    assert one.drifting == ()


def test_a_longer_run_shows_the_short_pool_running_away() -> None:
    (_, early), (_, late) = two_rows(10_000), two_rows(60_000)
    assert late.wait_p99_s["short"] > 3 * early.wait_p99_s["short"]
    assert "short" in late.drifting


def test_a_chunk_for_each_prompt_does_not_run_away() -> None:
    _, two = two_rows(60_000, "independent")
    assert two.drifting == ()
    assert two.wait_p99_s["short"] < 0.1


def test_the_boundary_is_the_short_window() -> None:
    short, long = (pool(n, 1, w, 128, "shared") for n, w in (("s", BOUNDARY_TOKENS), ("l", 65_536)))
    assert (short.boundary_tokens, long.boundary_tokens) == (8192, None)
