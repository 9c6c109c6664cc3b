"""What the indexes of bench caches know of the engines."""

from bench.caches.indexes import NoticedIndex, PerfectIndex
from bench.caches.run import INDEXES, attempt, tokens_of
from bench.quartz.workloads import MIXED, demand, mixed
from simulator.engine.engine import Engine, EngineRequest
from simulator.experiments.scheduling import BLOCK_TOKENS, WORKER, block_points


def test_a_noticed_prefix_is_forgotten_unless_a_prompt_computes_it() -> None:
    index = NoticedIndex(2)
    points = ((64, 1), (128, 2))
    bound = index.insert(points, 1)
    index.evicted(1, 2)
    assert index.match(points) == [(128, 0b10)]
    index.correct(1, bound, 0)
    index.evicted(0, 1)
    index.evicted(1, 2)
    assert index.match(points) == [(64, 0b10)]


def test_the_perfect_index_knows_what_is_cached_and_what_is_bound() -> None:
    asked = demand(0.0, "a", ((1, 4 * BLOCK_TOKENS), (2, 1)), 5, MIXED, 1.0, "chat")
    points = block_points(asked.blocks, BLOCK_TOKENS)
    index = PerfectIndex(2, [asked])
    index.engines = {0: Engine(WORKER), 1: Engine(WORKER)}
    assert index.match(points) == []
    bound = index.insert(points, 1)
    assert index.match(points) == [(4 * BLOCK_TOKENS, 0b10)]
    index.correct(1, bound, 0)
    assert index.match(points) == []
    request = EngineRequest(
        id="a", prompt_tokens=asked.prompt_tokens, output_tokens=1, block_hashes=asked.blocks
    )
    index.engines[0].submit(request, 0.0)
    index.engines[0].run_until(10.0)
    assert index.match(points) == [(4 * BLOCK_TOKENS, 0b01)]


def test_the_working_set_is_what_was_used_and_will_be() -> None:
    first, again, other = (
        demand(at_s, "a", segments, 10, MIXED, 1.0, "chat")
        for at_s, segments in (
            (0.0, ((1, BLOCK_TOKENS),)),
            (5.0, ((1, BLOCK_TOKENS), (2, BLOCK_TOKENS))),
            (10.0, ((3, BLOCK_TOKENS),)),
        )
    )
    assert tokens_of([first, again, other])[1] == BLOCK_TOKENS / 2


def test_every_index_serves_all_requests_of_two_gateways() -> None:
    demands = mixed(3, MIXED, 120)
    for index in INDEXES:
        assert (attempt(index, demands, WORKER, 2, 3).ttft_s > 0).all()
