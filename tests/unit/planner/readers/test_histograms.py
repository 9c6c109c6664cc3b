"""Workloads from vLLM's histograms."""

import numpy as np
import pytest

from planner.errors import PlanError
from planner.readers.histograms import (
    ANSWERS,
    LIMITS,
    PREEMPTIONS,
    PROMPTS,
    from_counts,
    parse_metrics,
)

LABELS = 'engine="0",model_name="m"'


def page(name: str, buckets: dict[str, float]) -> str:
    lines = [f"# HELP {name} x", f"# TYPE {name} histogram"]
    lines += [f'{name}_bucket{{{LABELS},le="{le}"}} {count}' for le, count in buckets.items()]
    lines += [f"{name}_sum{{{LABELS}}} 12345.0", f"{name}_count{{{LABELS}}} 10.0"]
    return "\n".join(lines) + "\n"


ENGINE = (
    page(PROMPTS, {"100.0": 4.0, "1000.0": 10.0, "+Inf": 10.0})
    + page(ANSWERS, {"50.0": 5.0, "200.0": 10.0, "+Inf": 10.0})
    + page(LIMITS, {"500.0": 0.0, "1000.0": 10.0, "+Inf": 10.0})
    + f"vllm:prefix_cache_queries_total{{{LABELS}}} 1000.0\n"
    + f"vllm:prefix_cache_hits_total{{{LABELS}}} 250.0\n"
    + f"vllm:num_preemptions_total{{{LABELS}}} 3.0\n"
)


def test_an_engine_s_histograms() -> None:
    found = from_counts(parse_metrics([ENGINE]))
    assert found.pairs is not None
    prompts, answers = found.pairs.prompts, found.pairs.answers
    mass = found.pairs.weights
    assert mass.sum() == pytest.approx(1.0)
    assert mass[prompts <= 100].sum() == pytest.approx(0.4)
    assert mass[answers <= 50].sum() == pytest.approx(0.5)
    both = mass[(prompts <= 100) & (answers <= 50)].sum()
    assert both == pytest.approx(0.4 * 0.5)
    assert found.mean_lengths()[0] == pytest.approx(0.4 * 50 + 0.6 * 550, rel=0.02)
    assert found.cached_share == pytest.approx(0.25)
    assert found.preempted_share == pytest.approx(0.3)
    assert found.asked is not None
    assert np.all((found.asked >= 500) & (found.asked <= 1000))
    assert "independent" in found.notes[0]


def test_engines_are_summed() -> None:
    one, two = parse_metrics([ENGINE]), parse_metrics([ENGINE, ENGINE])
    assert two.buckets[PROMPTS][100.0] == 2 * one.buckets[PROMPTS][100.0]
    assert two.counters[PREEMPTIONS] == 6.0
    assert from_counts(two).mean_lengths() == from_counts(one).mean_lengths()


@pytest.mark.parametrize("text", ["", "vllm:num_preemptions_total 3\n", page(PROMPTS, {"+Inf": 0})])
def test_engines_without_requests_are_refused(text: str) -> None:
    with pytest.raises(PlanError, match="has no requests in vllm:request_prompt_tokens"):
        from_counts(parse_metrics([text]))
