"""No tenant decides about another's requests, whatever it sends.

X, by which one tenant may change another's estimate, is
- 0 for a tenant that has taught its own figures: none but its own observations are in them;
- 0 for a new tenant where fewer than two others have taught: nobody is followed;
- for a new tenant where others have taught, the distance between two of those others: the median
  with the attacker among them lies between two figures of honest tenants. They use one tokenizer
  and differ by what they write, here by 5 %.
"""

import random
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.estimate.estimator import LengthEstimator
from gateway.estimate.merge import EstimatorMerge
from gateway.records.endpoint import CHAT, COMPLETIONS, Endpoint
from gateway.records.estimate import LengthEstimate, Observation, PeerRecord
from gateway.records.request import BodyFacts, Category, Measure
from tests.builders import measure, observation

HONEST = ("a", "b", "c", "d")
APART = 0.05
"""Between honest tenants."""
ANSWER = 200

Lessons = list[tuple[Observation, int]]


def evil(found: Measure, prompt_tokens: int, **more: Any) -> Observation:
    return observation(found, prompt_tokens, **{"tenant": "evil", **more})


@st.composite
def attacks(draw: st.DrawFn) -> Lessons:
    """Observations of the tenant `evil`, each many times; engines report the truth about them."""
    lessons = []
    for _ in range(draw(st.integers(1, 5))):
        size = draw(st.integers(1, 400_000))
        parts = draw(st.sampled_from((0, 0, 1, 8)))
        found = measure(
            size,
            messages=draw(st.integers(0, 50)),
            media_parts=parts,
            media_tokens=768 * parts,
            category=draw(st.sampled_from(get_args(Category))),
            tools=draw(st.booleans()),
        )
        lesson = evil(
            found,
            max(1, int(size / draw(st.floats(0.4, 17)))),
            endpoint=draw(st.sampled_from(("chat", "completions"))),
            completion_tokens=draw(st.sampled_from((1, 17_000, 10**6))),
            sequences=draw(st.integers(1, 4)),
            output_censored=draw(st.booleans()),
        )
        lessons.append((lesson, draw(st.sampled_from((1, 20, 60, 300)))))
    return lessons


def text(tokens: int, ratio: float, category: Category = "prose") -> Measure:
    return measure(round(tokens * ratio), category=category)


def honest(tenant: str, count: int, seed: int = 1) -> list[Observation]:
    """Texts, small prompts and pictures of one tenant; a template of 8 tokens, 700 a picture."""
    rng = random.Random(f"{tenant}{seed}")
    own = 1 + APART * (sum(map(ord, tenant)) % 4) / 3
    found = []
    for _ in range(count):
        for sent, tokens in (
            (text(2000, 4.5 * own * rng.lognormvariate(0, 0.01)), 2008),
            (text(2000, 2.0 * own * rng.lognormvariate(0, 0.01), "cjk"), 2008),
            (text(40, 4.5 * own), 48),
            (measure(450, media_parts=1, media_tokens=768), round(100 / own) + 8 + 700),
        ):
            answer = round(ANSWER * own)
            found.append(observation(sent, tokens, tenant=tenant, completion_tokens=answer))
    return found


def taught(*groups: list[Observation], sent: Lessons | None = None) -> LengthEstimator:
    estimator = LengthEstimator()
    turns = [lesson for group in groups for lesson in group]
    if sent:
        spread = [lesson for lesson, times in sent for _ in range(times)]
        half = len(turns) // 2
        turns = [*turns[:half], *spread, *turns[half:]]
    for lesson in turns:
        estimator.learn(lesson)
    return estimator


PICTURE = measure(4000, messages=2, media_parts=3, media_tokens=2304)
ASKED: list[tuple[Endpoint, Measure]] = [
    (CHAT, text(30_000, 4.5)),
    (CHAT, text(30_000, 2.0, "cjk")),
    (CHAT, text(500, 3.5, "code")),
    (CHAT, PICTURE),
    (COMPLETIONS, measure(900, messages=0)),
]


def asked(estimator: LengthEstimator, tenant: str) -> list[LengthEstimate]:
    return [
        estimator.estimate(endpoint, BodyFacts(model="m", measure=found), tenant)
        for endpoint, found in ASKED
    ]


@given(attacks())
@settings(max_examples=60, deadline=None)
def test_a_tenant_with_figures_of_its_own_is_not_moved_at_all(sent: Lessons) -> None:
    victim = honest("a", 40)
    # What it was taught: texts, pictures and answers of the chat endpoint.
    with_evil, without = taught(victim, sent=sent), taught(victim)
    kinds = (0, 1, 3)
    found, expected = asked(with_evil, "a"), asked(without, "a")
    assert [found[kind] for kind in kinds] == [expected[kind] for kind in kinds]


@given(attacks(), st.integers(0, 1))
@settings(max_examples=60, deadline=None)
def test_a_new_tenant_is_not_moved_while_fewer_than_two_others_teach(
    sent: Lessons, others: int
) -> None:
    teaching = [honest(tenant, 40) for tenant in HONEST[:others]]
    assert asked(taught(*teaching, sent=sent), "new") == asked(taught(*teaching), "new")


@given(attacks())
@settings(max_examples=60, deadline=None)
def test_a_new_tenant_stays_between_the_figures_of_honest_ones(sent: Lessons) -> None:
    estimator = taught(*(honest(tenant, 40) for tenant in HONEST), sent=sent)
    own = [asked(estimator, tenant) for tenant in HONEST]
    for kind in (0, 1, 3):
        found = asked(estimator, "new")[kind]
        ratios = [each[kind].ratio for each in own]
        assert min(ratios) * 0.999 <= found.ratio <= max(ratios) * 1.001
        answers = [each[kind].expected_output_tokens for each in own]
        assert min(answers) <= found.expected_output_tokens <= max(answers)
        tokens = [each[kind].input_tokens for each in own]
        assert min(tokens) * (1 - APART) <= found.input_tokens <= max(tokens) * (1 + 2 * APART)
        assert found.input_tokens_lowest <= min(tokens), "nothing is refused that may fit"


@given(attacks())
@settings(max_examples=40, deadline=None)
def test_merging_replicas_carries_no_attack_to_other_tenants(sent: Lessons) -> None:
    """The attacker uses one of three replicas, or all that it can of it, at any time."""

    def world(sent: Lessons | None) -> list[LengthEstimator]:
        lots = [honest(tenant, 20, seed) for tenant in HONEST for seed in range(3)]
        replicas = [
            taught(*lots[0::3], sent=sent),
            taught(*lots[1::3]),
            taught(*lots[2::3]),
        ]
        ledgers = [EstimatorMerge(replica, 0.0) for replica in replicas]
        for second in range(3):
            records = [PeerRecord(age_s=0.0, parts=each.learned(float(second))) for each in ledgers]
            for i, merge in enumerate(ledgers):
                list(merge.merge(records[:i] + records[i + 1 :]))
        return replicas

    for attacked, spared in zip(world(sent), world(None), strict=True):
        for tenant in HONEST:
            for kind in (0, 1, 3):
                assert asked(attacked, tenant)[kind] == asked(spared, tenant)[kind]
        for kind in (0, 1):
            ratios = [asked(spared, tenant)[kind].ratio for tenant in HONEST]
            found = asked(attacked, "new")[kind].ratio
            assert min(ratios) * 0.999 <= found <= max(ratios) * 1.001


ENDED = evil(text(200, 4.5), 208, completion_tokens=1, output_censored=True)
ENDLESS = evil(text(200, 4.5), 208, completion_tokens=17_000)


@pytest.mark.parametrize(
    ("lesson", "count"),
    [
        pytest.param(evil(text(2000, 1.0), 2008), 42, id="a ratio of 1"),
        pytest.param(evil(PICTURE, 18_000), 200, id="pictures of 6,000 tokens"),
        pytest.param(ENDED, 60_000, id="answers of one token"),
        pytest.param(ENDLESS, 200, id="answers of 17,000 tokens"),
    ],
)
def test_attacks_that_once_worked(lesson: Observation, count: int) -> None:
    quiet, attacked = taught(honest("a", 100)), taught(honest("a", 100))
    for _ in range(count):
        attacked.learn(lesson)
    assert asked(attacked, "a") == asked(quiet, "a")
    assert asked(attacked, "new") == asked(quiet, "new")
