"""Estimates and what is learned: convergence, lies, media, batches, the paper's profile."""

import json
import random
from typing import Any

import pytest

from gateway.estimate.estimator import PAPER, LengthEstimator
from gateway.payload.body import read_body
from gateway.records.endpoint import CHAT, COMPLETIONS, EMBEDDINGS, Endpoint
from gateway.records.estimate import LengthEstimate, Observation
from gateway.records.request import BodyFacts, Category, Measure
from tests.builders import measure, observation

TRUE: dict[Category, float] = {
    "prose": 4.48,
    "code": 3.52,
    "json": 3.1,
    "cjk": 2.01,
    "other-script": 5.5,
    "mixed": 3.81,
}


def estimate(
    estimator: LengthEstimator, found: Measure, endpoint: Endpoint = CHAT, **facts: Any
) -> LengthEstimate:
    return estimator.estimate(endpoint, BodyFacts(model="m", measure=found, **facts), "t")


class Traffic:
    """Seeded documents with a true ratio, 4 % dispersion, and a template of 3 + 5 m."""

    def __init__(self, seed: int, *, dispersion: float = 0.04) -> None:
        self.rng = random.Random(seed)
        self.dispersion = dispersion
        self.bytes = dict.fromkeys(TRUE, 0)
        self.tokens = dict.fromkeys(TRUE, 0)

    def observation(self, category: Category, low: int = 128, high: int = 8000) -> Observation:
        rng = self.rng
        tokens = int(low * (high / low) ** rng.random())
        size = int(tokens * TRUE[category] * rng.lognormvariate(0, self.dispersion))
        messages = rng.randint(1, 9)
        self.bytes[category] += size
        self.tokens[category] += tokens
        found = measure(size, messages=messages, category=category)
        return observation(found, tokens + 3 + 5 * messages)

    def teach(self, estimator: LengthEstimator, each: int) -> None:
        order = [category for category in TRUE for _ in range(each)]
        self.rng.shuffle(order)
        for category in order:
            estimator.learn(self.observation(category))

    def ratio(self, category: Category) -> float:
        return self.bytes[category] / self.tokens[category]


def means(estimator: LengthEstimator) -> dict[Category, float]:
    categories = estimator.snapshot()["categories"]
    return {name: categories[name]["mean"] for name in TRUE}


@pytest.mark.parametrize("first", range(0, 100, 10))
def test_fifty_observations_bring_each_ratio_within_three_and_a_half_percent(first: int) -> None:
    for seed in range(first, first + 10):
        estimator, traffic = LengthEstimator(), Traffic(seed)
        traffic.teach(estimator, 50)
        for category, mean in means(estimator).items():
            assert mean == pytest.approx(traffic.ratio(category), rel=0.035), (seed, category)
        template = estimator.snapshot()["templates"]["chat"]
        fixed = template["request_tokens"] + 5 * template["message_tokens"]
        assert fixed == pytest.approx(3 + 5 * 5, abs=10), seed


@pytest.mark.parametrize("seed", range(10))
def test_prompts_of_like_lengths_do_not_make_template_and_ratio_drift_away(seed: int) -> None:
    estimator, traffic = LengthEstimator(), Traffic(seed, dispersion=0.08)
    for _ in range(100):
        for category in TRUE:
            estimator.learn(traffic.observation(category, low=500, high=1500))
    template = estimator.snapshot()["templates"]["chat"]
    assert template["request_tokens"] + 5 * template["message_tokens"] <= 3 + 5 * 5
    for category, mean in means(estimator).items():
        assert mean == pytest.approx(traffic.ratio(category), rel=0.06), category


def test_the_template_is_found_from_small_prompts() -> None:
    estimator, traffic = LengthEstimator(), Traffic(1)
    traffic.teach(estimator, 50)
    for _ in range(200):
        estimator.learn(traffic.observation("prose", low=4, high=100))
    template = estimator.snapshot()["templates"]["chat"]
    assert template["request_tokens"] == pytest.approx(3, abs=1)
    assert template["message_tokens"] == pytest.approx(5, abs=0.4)


def test_small_prompts_do_not_update_the_ratio() -> None:
    estimator = LengthEstimator()
    estimator.learn(observation(measure(200), 100))
    assert means(estimator)["prose"] == 4.0
    assert estimator.snapshot()["templates"]["chat"]["n"] == 1


@pytest.mark.parametrize("lie", [0, 10**9, None, -5, True, 250.0, "12", 1])
def test_impossible_usage_is_counted_and_moves_nothing(lie: Any) -> None:
    estimator, traffic = LengthEstimator(), Traffic(2)
    traffic.teach(estimator, 50)
    before = estimator.snapshot()
    for size in (100, 4000, 60_000):
        for _ in range(50):
            estimator.learn(observation(measure(size), lie, completion_tokens=lie))
    after = estimator.snapshot()
    assert after["categories"] == before["categories"]
    assert after["templates"] == before["templates"]
    # One completion token is possible; none of the others is.
    assert sum(after["ignored"].values()) == (150 if lie == 1 and lie is not True else 300)


@pytest.mark.parametrize("factor", [0.5, 0.7, 1.5, 3.0])
def test_a_worker_with_plausible_lies_moves_no_ratio_by_much(factor: float) -> None:
    estimator, honest, traffic = LengthEstimator(), LengthEstimator(), Traffic(3)
    traffic.teach(estimator, 60)
    for _ in range(400):
        seen = traffic.observation("prose")
        estimator.learn(seen)
        honest.learn(seen)
        if traffic.rng.random() < 0.05:
            assert seen.prompt_tokens is not None
            before = means(estimator)["prose"]
            estimator.learn(observation(seen.measure, int(seen.prompt_tokens * factor)))
            assert means(estimator)["prose"] == pytest.approx(before, rel=0.01)
    assert means(estimator)["prose"] == pytest.approx(means(honest)["prose"], rel=0.015)


def test_cold_thai_that_fits_is_not_refused() -> None:
    thai = "มนุษย์ทั้งหลายเกิดมามีอิสระและเสมอภาคกันในเกียรติศักดิ์ " * 800
    raw = json.dumps({"model": "m", "messages": [{"role": "user", "content": thai}]}).encode()
    found = read_body(CHAT, raw)
    assert found.measure.category == "other-script"
    estimated = LengthEstimator().estimate(CHAT, found, "t")
    true_tokens = found.measure.text_bytes / 7.5
    assert estimated.input_tokens_lowest <= true_tokens < estimated.input_tokens


def test_conservative_estimates_cover_most_prompts() -> None:
    estimator, traffic = LengthEstimator(), Traffic(5)
    traffic.teach(estimator, 100)
    under = 0
    for _ in range(500):
        seen = traffic.observation("code")
        found = estimate(estimator, seen.measure)
        assert seen.prompt_tokens is not None
        under += found.input_tokens < seen.prompt_tokens
        assert found.input_tokens == pytest.approx(seen.prompt_tokens, rel=0.25, abs=15)
    assert under < 0.35 * 500


def test_the_three_output_figures() -> None:
    estimator = LengthEstimator()
    found = estimate(estimator, measure(4000))
    assert (found.cap_tokens, found.expected_output_tokens, found.output_tokens) == (
        None,
        1024,
        1024,
    )
    found = estimate(estimator, measure(4000), cap_tokens=32_768)
    assert (found.cap_tokens, found.output_tokens) == (32_768, 1024)
    found = estimate(estimator, measure(4000), cap_tokens=16)
    assert found.output_tokens == 16
    assert found.fit_tokens == found.input_tokens + 16
    for _ in range(40):
        estimator.learn(observation(measure(4000), 1000, completion_tokens=100))
    found = estimate(estimator, measure(4000), cap_tokens=32_768)
    assert 100 <= found.output_tokens <= 107


def test_cap_mode_reserves_the_cap() -> None:
    estimator = LengthEstimator(output_mode="cap")
    found = estimate(estimator, measure(4000), cap_tokens=32_768)
    assert found.output_tokens == 32_768
    assert estimate(estimator, measure(4000)).output_tokens == 1024


def test_batches_route_by_the_longest_and_cost_the_sum() -> None:
    batch = Measure(text_bytes=9000, longest_text_bytes=6000, prompts=3)
    found = estimate(LengthEstimator(), batch, COMPLETIONS, cap_tokens=10, sequences_per_prompt=2)
    assert found.sequences == 6
    assert found.input_tokens == pytest.approx(6000 / 3.6 + 1, abs=1)
    assert found.input_tokens_total == pytest.approx(9000 / 3.6 + 3, abs=1)
    assert found.cost_tokens == found.input_tokens_total + 60
    assert found.fit_tokens == found.input_tokens + 10


def test_token_ids_are_exact() -> None:
    ids = Measure(
        text_bytes=0, longest_text_bytes=0, exact_tokens=50, longest_exact_tokens=30, prompts=2
    )
    found = estimate(LengthEstimator(), ids, EMBEDDINGS)
    assert (found.input_tokens, found.input_tokens_total) == (30, 50)
    assert found.input_tokens_lowest == 30
    assert (found.output_tokens, found.fit_tokens, found.cost_tokens) == (0, 30, 50)


@pytest.mark.parametrize("each", [200, 768, 1600])
def test_media_tokens_are_learned_and_stay_out_of_the_ratio(each: int) -> None:
    estimator = LengthEstimator()
    picture = measure(400, media_parts=2, media_tokens=2 * 768)
    for _ in range(40):
        estimator.learn(observation(picture, 100 + 7 + 2 * each))
    assert means(estimator)["prose"] == 4.0
    found = estimate(estimator, picture)
    assert found.input_tokens == pytest.approx(107 + 2 * each, rel=0.1, abs=30)


def test_compressed_requests_stay_out() -> None:
    estimator = LengthEstimator()
    estimator.learn(observation(measure(4000), 500, learn_ratio=False))
    assert means(estimator)["prose"] == 4.0
    assert estimator.ignored == {"prompt_changed": 1}


def test_absurd_media_counts_are_ignored() -> None:
    estimator = LengthEstimator()
    estimator.learn(observation(measure(400, media_parts=1, media_tokens=768), 10**9))
    assert estimator.ignored == {"prompt_tokens_out_of_range": 1}
    assert estimator.snapshot()["media"]["n"] == 0


def test_answers_of_several_sequences_count_each() -> None:
    estimator = LengthEstimator()
    for _ in range(40):
        estimator.learn(observation(measure(4000), 1000, completion_tokens=400, sequences=4))
    assert 100 <= estimate(estimator, measure(4000)).output_tokens <= 107


def test_the_papers_profile_is_the_papers_formula() -> None:
    estimator = LengthEstimator(PAPER)
    found = estimate(estimator, measure(4001, category="cjk"), cap_tokens=5000)
    assert (found.ratio, found.ratio_conservative) == (4.0, 4.0)
    assert (found.input_tokens, found.output_tokens) == (1001, 5000)
    assert found.template_tokens == 0
    estimator.learn(observation(measure(4000, category="cjk"), 2000))
    found = estimate(estimator, measure(4000, category="cjk"))
    ratio = 0.95 * 4 + 0.05 * 2
    sigma = 0.05 * (ratio - 2)
    assert found.ratio == pytest.approx(ratio)
    assert found.ratio_conservative == pytest.approx(ratio - sigma)
