"""An engine joins or leaves a model: every part that counts workers follows."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.fleet import fleet, members, model_runtime
from gateway.fleet.engine_metrics import EngineSample, record
from gateway.fleet.members import REUSE_AFTER_S
from gateway.fleet.model_runtime import MEMORY, ModelCompression, ModelRuntime, Pool
from gateway.pipeline.request_progress import require
from gateway.records.decision import CompressionSection
from gateway.routing.routing import CompressionRules, ResponseLocation
from gateway.scheduling.prefix_index import PrefixIndex
from gateway.scheduling.quartz import Quartz
from gateway.scheduling.quartz_score import DEFAULT
from gateway.scheduling.rank_group import RankGroup
from gateway.scheduling.rank_solver import assign
from gateway.scheduling.scheduler import Job, Scheduler
from gateway.scheduling.schedulers import SHADOWED, make_scheduler
from predictor.online import PrefillPredictor
from tests.builders import address, changed, routing, served_model
from tests.unit.gateway.scheduling.scheduled import job_of
from tests.unit.gateway.scheduling.test_prefix_index import prompt


def quartz_model(workers: int) -> ModelRuntime:
    """One pool with everything that counts workers."""
    plain = served_model(table=routing(("only", 8192, None)), workers=(workers,))
    predictor = PrefillPredictor(workers=workers)
    return changed(
        plain,
        scheduler=(Quartz(plain.fleet.pools[0], predictor, DEFAULT),),
        predictor=(predictor,),
        prefixes=(PrefixIndex(workers),),
        reads_metrics=True,
    )


def quartz_of(served: ModelRuntime) -> Quartz:
    scheduler = served.fleet.pools[0].scheduler
    assert isinstance(scheduler, Quartz)
    return scheduler


@pytest.mark.parametrize("workers", [0, 2])
def test_a_new_worker_is_scheduled_like_any_other(workers: int) -> None:
    served = quartz_model(workers)
    (place,) = served.fleet.pools[0].join((address("new", port=7),), 0.0, up=True)
    assert served.fleet.pools[0].addresses[place].port == 7
    for other in range(workers):
        fleet.unreachable(served.fleet.pools[0], other)
    scheduler = quartz_of(served)
    (sent,) = scheduler.submit(job_of(), 1.0)
    assert sent.worker == place
    scheduler.first_token(sent, 1.5)
    scheduler.finished(sent, 2.0, answered=True)
    scheduler.tick(2.0)
    assert require(served.fleet.pools[0].predictor).observed == 1


def test_a_new_worker_has_the_pools_learned_speed_and_no_prefix() -> None:
    served = quartz_model(2)
    predictor, index = (
        require(served.fleet.pools[0].predictor),
        require(served.fleet.pools[0].prefixes),
    )
    for _ in range(300):
        for worker in range(2):
            x, mean_s, high_s, bucket = predictor.predict_request(
                worker, 1000, 0, None, 10, 0, 0, 0.0, stream=True
            )
            predictor.observe(worker, x, mean_s, high_s, bucket, 2.0)
    for worker in range(2):
        index.insert(prompt(1, 1000), worker)
    (place,) = served.fleet.pools[0].join((address("new"),), 0.0)
    speed = predictor.prefill_tokens_per_s(place)
    assert speed == pytest.approx(predictor.prefill_tokens_per_s(0), rel=0.2)
    assert index.match(prompt(1, 1000)) == [(1000, 0b011)]
    index.insert(prompt(1, 1000), place)
    assert index.match(prompt(1, 1000)) == [(1000, 0b111)]


def test_a_new_worker_follows_what_the_pool_learns_until_it_was_timed_itself() -> None:
    served = quartz_model(1)
    scheduler, predictor = quartz_of(served), require(served.fleet.pools[0].predictor)
    (place,) = served.fleet.pools[0].join((address("new"),), 0.0, up=True)
    before = scheduler._workers[place].s_per_token
    for _ in range(300):
        x, mean_s, high_s, bucket = predictor.predict_request(
            0, 1000, 0, None, 10, 0, 0, 0.0, stream=True
        )
        predictor.observe(0, x, mean_s, high_s, bucket, 0.001)
    scheduler.tick(1.0)
    assert scheduler._workers[place].s_per_token == 1.0 / predictor.prefill_tokens_per_s(place)
    assert scheduler._workers[place].s_per_token < before


def test_a_pool_without_predictor_and_prefixes_changes_beside_one_that_has_them() -> None:
    plain = served_model()
    quartz = Quartz(plain.fleet.pools[1], PrefillPredictor(workers=2), DEFAULT)
    served = changed(
        plain,
        scheduler=(plain.fleet.pools[0].scheduler, quartz),
        predictor=(None, PrefillPredictor(workers=2)),
        prefixes=(None, PrefixIndex(2)),
    )
    (place,) = served.fleet.pools[0].join((address("new"),), 0.0, up=True)
    assert place in fleet.available(served.fleet.pools[0], 0.0)
    members.leave(served.fleet.pools[0], place)
    assert list(served.fleet.pools[0].finished([place])) == [place]
    model_runtime.vacate(served, served.fleet.pools[0], [place], 1.0)
    assert not served.fleet.pools[0].present[place]


@pytest.mark.parametrize("policy", sorted(SHADOWED))
def test_a_shadow_follows_workers_that_come_and_go(policy: str) -> None:
    plain = served_model(table=routing(("only", 8192, None)), workers=(1,))
    pool, predictor, index = plain.fleet.pools[0], PrefillPredictor(workers=1), PrefixIndex(1)
    scheduler = make_scheduler(policy, pool, predictor=predictor, shadow=True)
    served = changed(plain, scheduler=(scheduler,), predictor=(predictor,), prefixes=(index,))
    (place,) = served.fleet.pools[0].join((address("new"),), 0.0, up=True)
    index.insert(prompt(1, 1000), place)
    fleet.unreachable(pool, 0)
    one = job_of()
    one.match = index.match(prompt(1, 1000))
    assert scheduler.submit(one, 1.0) == (one,)
    assert (one.worker, one.would_bind, one.hit_tokens) == (place, place, 1000)
    scheduler.first_token(one, 1.5)
    scheduler.finished(one, 2.0)
    scheduler.tick(2.0)
    assert predictor.observed == 1
    fleet.probed(pool, 0, ok=True)
    members.leave(pool, place)
    model_runtime.vacate(served, served.fleet.pools[0], [place], 3.0)
    assert index.match(prompt(1, 1000)) == []
    two = job_of()
    scheduler.submit(two, 4.0)
    assert (two.worker, two.would_bind) == (0, 0)


def test_nothing_of_a_worker_that_left_comes_to_the_next_at_its_place() -> None:
    served = quartz_model(2)
    index = require(served.fleet.pools[0].prefixes)
    index.insert(prompt(1, 1000), 1)
    record(served.fleet.pools[0].view, 1, EngineSample(running=3.0), 0.0)
    served.fleet.pools[0].reports_cached.add(1)
    served.fleet.response_affinity.remember("kept", ResponseLocation(pool="only", worker=0))
    served.fleet.response_affinity.remember("gone", ResponseLocation(pool="only", worker=1))
    members.leave(served.fleet.pools[0], 1)
    model_runtime.vacate(served, served.fleet.pools[0], [1], 0.0)
    assert index.match(prompt(1, 1000)) == []
    (place,) = served.fleet.pools[0].join((address("new"),), REUSE_AFTER_S)
    assert place == 1
    assert index.match(prompt(1, 1000)) == []
    assert 1 not in served.fleet.pools[0].view.samples
    assert served.fleet.pools[0].reports_cached == set()
    assert served.fleet.response_affinity.find("kept") is not None
    assert served.fleet.response_affinity.find("gone") is None


def test_workers_with_waiting_jobs_are_found_in_one_pass_over_the_queue() -> None:
    served = quartz_model(4)
    scheduler = quartz_of(served)
    reads = 0

    class Queue(dict[Job, Scheduler]):
        def __iter__(self) -> Any:
            nonlocal reads
            reads += 1
            return super().__iter__()

    served.fleet.pools[0].queued = queue = Queue()
    waiting = job_of()
    waiting.worker = 1
    queue[waiting] = scheduler
    for worker in range(3):
        members.leave(served.fleet.pools[0], worker)
    fleet.start(served.fleet.pools[0], 0, 1, 10)
    assert list(served.fleet.pools[0].finished(range(4))) == [2]
    assert reads == 1


def test_an_engine_of_several_ranks_joins_a_group_and_leaves_it() -> None:
    plain = served_model(table=routing(("only", 8192, None)), workers=(2,))
    pool = Pool("only", [address("a#0"), address("a#1")], 4, [(0, 1)])
    group = RankGroup(pool, assign)
    served = changed(plain, pools=(pool,), scheduler=(group,))
    engine = tuple(address(f"b#{rank}", rank=rank) for rank in range(3))
    places = served.fleet.pools[0].join(engine, 0.0, up=True)
    used = set()
    for n in range(20):
        for sent in group.submit(job_of(100), 40.0 + n / 100):
            used.add(sent.worker)
    assert used == {0, 1, *places}
    members.leave(pool, places[0])
    assert all(sent.worker < 2 for sent in group.tick(41.0))


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9), st.integers(0, 20)), max_size=60),
    st.integers(0, 3),
)
def test_an_index_that_grew_matches_like_one_that_was_large_from_the_start(
    inserts: list[tuple[int, int, int]], start: int
) -> None:
    grown, large = PrefixIndex(start), PrefixIndex(4)
    for place in range(start, 4):
        grown.joined(place)
    for worker, name, hundreds in inserts:
        points = prompt(name, 100 * hundreds, shared=300)
        assert grown.insert(points, worker) == large.insert(points, worker)
    for name in range(10):
        points = prompt(name, 2000, shared=300)
        assert list(grown.match(points)) == list(large.match(points))


CUT = CompressionSection(compressed="9->4", kept_share=0.5)


def test_success_is_the_share_of_all_prompts_in_the_window_that_somebody_looked_at() -> None:
    seen = ModelCompression(rules=CompressionRules())
    for reason in (None, "not_busy", "spilled"):
        seen.settled(CompressionSection(not_compressed=reason))
    assert seen.success is None
    for reason in ("tools", "category", "not_retrieval", "observed", "other_pool"):
        seen.settled(CompressionSection(not_compressed=reason))
    seen.settled(CUT)
    assert seen.success == pytest.approx(0.5)
    for _ in range(20 * MEMORY):
        seen.settled(CUT)
    assert seen.success == pytest.approx(1.0, abs=0.01)
