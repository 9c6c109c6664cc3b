"""Merging what replicas learned: order and repetition do not matter, and nobody is misled."""

import math
import random
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.estimate.estimator import PROFILES, LengthEstimator
from gateway.estimate.learners import HIGHEST_RATIO, LOWEST_RATIO, Ratio
from gateway.estimate.merge import RATE_MEMORY_S, EstimatorMerge, merged
from gateway.records.estimate import Observation, PartState, PeerRecord
from tests.builders import measure, observation

finite = st.floats(0, 1, allow_subnormal=False)
sums = st.builds(
    PartState,
    epoch=st.integers(0, 3),
    n=st.integers(1, 1000),
    rate=st.floats(0, 1e6),
    sums=st.fixed_dictionaries({"total": finite, "weight": finite}),
)


def lesson(
    ratio: float, tokens: int = 900, *, category: str = "prose", answer: int = 100
) -> Observation:
    """A request of so many text tokens; the template of 7 tokens is the fit's own prior."""
    found = measure(round(ratio * tokens), category=category)
    return observation(found, tokens + 7, completion_tokens=answer)


def mean(estimator: LengthEstimator, category: str = "prose") -> float:
    found: float = estimator.snapshot()["categories"][category]["mean"]
    return found


def whole(estimator: LengthEstimator) -> dict[str, object]:
    """All that was learned, without the process's own counts."""
    found = estimator.snapshot()
    return {k: found[k] for k in ("categories", "templates", "media", "expected_output_tokens")}


class Replica:
    """An estimator and its ledger, exchanging in plain calls."""

    def __init__(self, profile: str = "default") -> None:
        self.estimator = LengthEstimator(PROFILES[profile])
        self.ledger = EstimatorMerge(self.estimator, 0.0)

    def learn(self, observations: Iterable[Observation]) -> None:
        for each in observations:
            self.estimator.learn(each)

    def receive(self, peers: Iterable[PeerRecord]) -> int:
        """Merge; how many parts changed."""
        return len(list(self.ledger.merge(peers)))

    def record(self, now_s: float, age_s: float = 0.0) -> PeerRecord:
        return PeerRecord(age_s=age_s, parts=self.ledger.learned(now_s))


# merged


@given(st.lists(sums, min_size=1, max_size=6), st.randoms())
def test_merging_does_not_depend_on_order(parts: list[PartState], rng: random.Random) -> None:
    shuffled = list(parts)
    rng.shuffle(shuffled)
    one, other = merged(parts), merged(shuffled)
    assert (one.epoch, one.n, one.rate) == (other.epoch, other.n, other.rate)
    assert one.sums == pytest.approx(other.sums, abs=1e-12)


@given(sums, st.integers(1, 5))
def test_merging_equals_gives_the_same(part: PartState, copies: int) -> None:
    found = merged([part] * copies)
    assert (found.epoch, found.n) == (part.epoch, part.n)
    assert found.sums == pytest.approx(part.sums, rel=1e-12, abs=1e-300)


def most_observed(parts: list[PartState]) -> list[PartState]:
    """Those of the epoch with the greatest sum of rates, each at least 1; the later of two."""
    observed = {
        part.epoch: sum(max(p.rate, 1.0) for p in sorted(parts, key=repr) if p.epoch == part.epoch)
        for part in parts
    }
    epoch = max(observed, key=lambda epoch: (observed[epoch], epoch))
    return [part for part in parts if part.epoch == epoch]


whole_rates = st.builds(
    PartState,
    epoch=st.integers(0, 3),
    n=st.integers(1, 1000),
    rate=st.integers(0, 1000).map(float),
    sums=st.fixed_dictionaries({"total": finite, "weight": finite}),
)


@given(st.lists(whole_rates, min_size=1, max_size=6))
def test_a_merge_lies_within_what_was_merged(parts: list[PartState]) -> None:
    found = merged(parts)
    for name in ("total", "weight"):
        values = [p.sums[name] for p in most_observed(parts)]
        assert min(values) - 1e-12 <= found.sums[name] <= max(values) + 1e-12


@given(st.lists(whole_rates, min_size=2, max_size=6))
def test_only_the_epoch_that_most_was_observed_in_counts(parts: list[PartState]) -> None:
    assert merged(parts) == merged(most_observed(parts))


# One replica


@pytest.mark.parametrize("profile", sorted(PROFILES))
def test_alone_it_learns_as_without_a_store(profile: str) -> None:
    rng = random.Random(5)
    alone, plain = Replica(profile), LengthEstimator(PROFILES[profile])
    for second in range(30):
        lessons = [
            lesson(rng.uniform(3, 5), rng.randint(20, 3000), answer=rng.randint(1, 900))
            for _ in range(20)
        ]
        alone.learn(lessons)
        for each in lessons:
            plain.learn(each)
        alone.ledger.learned(second)
        assert alone.receive([]) == 0
    assert alone.estimator.snapshot() == plain.snapshot()


@pytest.mark.parametrize("profile", sorted(PROFILES))
def test_a_new_process_goes_on_where_the_old_one_stopped(profile: str) -> None:
    rng = random.Random(6)
    old, new = Replica(profile), Replica(profile)
    old.learn(lesson(rng.uniform(3.9, 4.1), rng.choice([30, 2000])) for _ in range(200))
    old.learn(lesson(rng.uniform(2.9, 3.1), category="code") for _ in range(40))
    assert new.receive([old.record(1.0, age_s=86400.0)]) > 0
    assert whole(new.estimator) == whole(old.estimator)
    more = [lesson(4.2) for _ in range(10)]
    old.learn(more)
    new.learn(more)
    assert mean(new.estimator) == pytest.approx(mean(old.estimator), rel=1e-12)


# Several


@settings(max_examples=25, deadline=None)
@given(
    st.integers(2, 6),
    st.floats(1.0, 8.0),
    st.integers(1, 12),
    st.integers(0, 2**32),
    st.sampled_from(sorted(PROFILES)),
)
def test_replicas_with_a_share_each_agree_with_one_that_sees_all(
    count: int, ratio: float, each: int, seed: int, profile: str
) -> None:
    rng = random.Random(seed)
    replicas = [Replica(profile) for _ in range(count)]
    single = LengthEstimator(PROFILES[profile])
    rounds = 400 // each + 20
    for second in range(rounds):
        lessons = [lesson(ratio * rng.lognormvariate(0, 0.02)) for _ in range(each * count)]
        for one in lessons:
            single.learn(one)
        for i, replica in enumerate(replicas):
            replica.learn(lessons[i::count])
        records = [replica.record(float(second)) for replica in replicas]
        for i, replica in enumerate(replicas):
            replica.receive(records[:i] + records[i + 1 :])
    found = [mean(replica.estimator) for replica in replicas]
    assert max(found) - min(found) < 1e-9 * ratio, "all read the same"
    assert found[0] == pytest.approx(mean(single), rel=0.01)


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 4)), max_size=40))
@settings(max_examples=60, deadline=None)
def test_any_order_of_hearing_ends_in_what_all_have_observed(
    history: list[tuple[int, int]],
) -> None:
    """Replicas learn and hear of one another in any order; no mean leaves what was seen."""
    rng = random.Random(1)
    replicas = [Replica() for _ in range(3)]
    board: dict[int, PeerRecord] = {}
    for step, (who, lessons) in enumerate(history):
        replicas[who].learn(lesson(rng.uniform(3.5, 4.5)) for _ in range(lessons))
        record = replicas[who].record(float(step))
        if record.parts:
            board[who] = record
        others = [peer for owner, peer in board.items() if owner != who]
        replicas[who].receive(others)
        replicas[who].receive(others)
    for replica in replicas:
        if "ratio.prose@t" in replica.ledger.learned(1000.0):
            assert 3.49 < mean(replica.estimator) < 4.51


def test_the_busier_replica_weighs_more() -> None:
    busy, idle, reader = Replica(), Replica(), Replica()
    busy.learn(lesson(4.0) for _ in range(300))
    idle.learn(lesson(5.0) for _ in range(100))
    reader.receive([busy.record(1.0), idle.record(1.0)])
    assert mean(reader.estimator) == pytest.approx(4.25, rel=0.01)


def test_the_dead_are_outvoted_and_with_the_living_gone_they_are_heard() -> None:
    dead, living, reader, late = Replica(), Replica(), Replica(), Replica()
    dead.learn(lesson(6.0) for _ in range(1000))
    living.learn(lesson(4.0) for _ in range(100))
    long_s = 20 * RATE_MEMORY_S
    reader.receive([dead.record(0.0, age_s=long_s), living.record(0.0)])
    assert mean(reader.estimator) == pytest.approx(4.0, rel=0.01)
    late.receive([dead.record(0.0, age_s=long_s)])
    assert mean(late.estimator) == pytest.approx(6.0, rel=0.01)


def test_what_was_taken_over_fades_with_further_observations() -> None:
    dead, heir = Replica(), Replica()
    dead.learn(lesson(4.5) for _ in range(500))
    heir.receive([dead.record(0.0)])
    heir.learn(lesson(4.0) for _ in range(150))
    assert mean(heir.estimator) == pytest.approx(4.0, rel=0.001)


def test_one_replica_fed_nonsense_does_not_override_what_the_others_observe() -> None:
    attacked, honest = Replica(), Replica()
    for replica in (attacked, honest):
        replica.learn(lesson(4.0) for _ in range(100))
        replica.ledger.learned(1.0)
    honest.learn(lesson(4.0) for _ in range(5000))
    attacked.learn(lesson(1.0) for _ in range(60))
    assert attacked.ledger.learned(1.0)["ratio.prose@t"].epoch == 1
    honest.receive([attacked.record(1.0)])
    assert mean(honest.estimator) == pytest.approx(4.0, rel=0.001)
    attacked.receive([honest.record(1.0)])
    assert mean(attacked.estimator) == pytest.approx(4.0, rel=0.001)


def test_a_changed_world_wins_once_most_was_observed_in_it() -> None:
    finders, idle = [Replica(), Replica()], Replica()
    for replica in (*finders, idle):
        replica.learn(lesson(4.0) for _ in range(100))
        replica.ledger.learned(1.0)
    for finder in finders:
        finder.learn(lesson(2.0) for _ in range(90))
    now_s = 1.0 + RATE_MEMORY_S
    old = idle.record(now_s)
    idle.receive([finder.record(now_s) for finder in finders])
    assert mean(idle.estimator) == pytest.approx(2.0, rel=0.01)
    for finder in finders:
        finder.receive([old])
        assert mean(finder.estimator) == pytest.approx(2.0, rel=0.01), "the old do not pull back"


# What is not believed


def told(name: str, given: dict[str, float], n: int = 50, epoch: int = 0) -> PeerRecord:
    return PeerRecord(age_s=0.0, parts={name: PartState(epoch=epoch, n=n, rate=9.0, sums=given)})


RATIO = {"total": 2.0, "weight": 0.5, "spread_total": 0.1, "spread_weight": 0.5}


@pytest.mark.parametrize(
    "peer",
    [
        told("ratio.prose@t", {**RATIO, "total": math.nan}),
        told("ratio.prose@t", {**RATIO, "total": 0.5 * LOWEST_RATIO * 0.9}),
        told("ratio.prose@t", {**RATIO, "total": 0.5 * HIGHEST_RATIO * 1.1}),
        told("ratio.prose@t", {**RATIO, "weight": 0.0, "total": 0.0}),
        told("ratio.prose@t", {**RATIO, "weight": 100.0, "total": 400.0}),
        told("ratio.prose@t", {**RATIO, "spread_total": -1.0}),
        told("ratio.prose@t", RATIO, n=0),
        told("ratio.prose@t", RATIO, epoch=-1),
        told("ratio.prose@t", {"total": 2.0, "weight": 0.5}),
        told("ratio.prose@t", {}),
        told("ratio.klingon@t", RATIO),
        told("nonsense@t", RATIO),
        told("ratio.prose", RATIO),
        told("output.chat", {"w1": 1.0}),
        told("template.chat@t", {"a": -1.0, "b": 0.0, "paa": 1.0, "pab": 0.0, "pbb": 1.0}),
        told("template.chat@t", {"a": 1.0, "b": 0.0, "paa": 1.0, "pab": 2.0, "pbb": 1.0}),
        told("template.chat@t", {"a": 1.0, "b": 0.0, "paa": 1000000000.0, "pab": 0.0, "pbb": 1.0}),
        told("template.chat@t", {"a": 1.0}),
        told("output.chat@t", {"w9999": 1.0}),
        told("output.chat@t", {"x1": 1.0}),
        told("output.chat@t", {"w1": -1.0}),
        told("output.embeddings@t", {"w1": 1.0}),
        told("output.chat/klingon@t", {"w1": 1.0}),
        told("output.chat/@t", {"w1": 1.0}),
    ],
)
def test_impossible_records_change_nothing(peer: PeerRecord) -> None:
    replica = Replica()
    before = replica.estimator.snapshot()
    assert replica.receive([peer]) == 0
    assert replica.estimator.snapshot() == before


def test_a_bad_part_spoils_neither_the_good_ones_nor_other_records() -> None:
    teacher, pupil = Replica(), Replica()
    teacher.learn(lesson(4.5) for _ in range(50))
    good = teacher.record(0.0)
    bad = told(
        "ratio.prose@t",
        {"total": math.inf, "weight": 1.0, "spread_total": 0.0, "spread_weight": 1.0},
    )
    pupil.receive([bad, good])
    assert mean(pupil.estimator) == mean(teacher.estimator)


@given(st.lists(st.floats(LOWEST_RATIO, HIGHEST_RATIO), min_size=1, max_size=60))
@settings(max_examples=50)
def test_what_a_ratio_learns_it_accepts(observed: list[float]) -> None:
    for corrected in (True, False):
        ratio = Ratio(4.0, beta=0.95, gamma=1.0, corrected=corrected)
        for value in observed:
            ratio.add(value, 500)
        copy = Ratio(4.0, beta=0.95, gamma=1.0, corrected=corrected)
        assert copy.accepts(ratio.learned())
        copy.adopt(ratio.learned())
        assert copy.state() == ratio.state()
