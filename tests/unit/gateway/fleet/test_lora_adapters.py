"""LoRA adapters of a model: which exist, which workers have them, which one is preferred."""

from gateway.fleet import fleet
from gateway.fleet.fleet import PoolState
from gateway.fleet.lora_adapters import Adapters


def pool(workers: int) -> PoolState:
    return PoolState("only", [f"w{n}" for n in range(workers)], 8)


ONE, OTHER = pool(4), pool(4)


def test_workers_whose_list_lacks_an_adapter_are_barred_and_unread_ones_are_not() -> None:
    adapters = Adapters(["sql"])
    assert adapters.listed(ONE, 0, ["sql", "tone"]) == ["sql", "tone"]
    assert adapters.listed(ONE, 1, []) == []
    assert adapters.barred("sql", ONE) == {1}
    assert adapters.workers("sql", ONE) == [0]
    assert adapters.barred("sql", OTHER) == frozenset(), "nobody read the other pool's lists"


def test_a_discovered_adapter_exists_while_a_worker_lists_it() -> None:
    adapters = Adapters(discovers=True)
    adapters.listed(ONE, 0, ["sql"])
    adapters.listed(ONE, 1, ["sql"])
    adapters.listed(ONE, 0, [])
    assert "sql" in adapters
    adapters.forget(ONE, 1)
    assert "sql" not in adapters
    assert not adapters.any


def test_a_named_adapter_exists_without_a_worker() -> None:
    adapters = Adapters(["sql"])
    adapters.listed(ONE, 0, ["sql"])
    adapters.listed(ONE, 0, [])
    assert "sql" in adapters
    assert adapters.barred("sql", ONE) == {0}


def test_a_worker_that_says_it_lacks_an_adapter_is_barred_until_its_list_is_read() -> None:
    adapters = Adapters(["sql"])
    adapters.listed(ONE, 0, ["sql", "tone"])
    adapters.lost(ONE, 0, "sql")
    assert adapters.barred("sql", ONE) == {0}
    assert adapters.barred("tone", ONE) == frozenset()
    assert (ONE, 0) in adapters.doubted
    adapters.listed(ONE, 0, ["sql"])
    assert adapters.barred("sql", ONE) == frozenset()
    assert not adapters.doubted


def test_the_least_loaded_worker_that_runs_an_adapter_is_preferred_unless_crowded() -> None:
    adapters, state = Adapters(["sql"]), pool(4)
    for worker in range(4):
        adapters.listed(state, worker, ["sql"])
    assert adapters.warm("sql", state, 0.0) == -1
    adapters.running(state, 1, ["sql"], 4)
    adapters.running(state, 2, ["sql", "tone"], 4)
    fleet.start(state, 1, 2, 100)
    assert adapters.warm("sql", state, 0.0) == 2
    fleet.start(state, 2, 20, 100)
    assert adapters.warm("sql", state, 0.0) == 1
    fleet.start(state, 1, 20, 100)
    assert adapters.warm("sql", state, 0.0) == -1, "both are crowded"


def test_a_worker_out_of_the_rotation_is_not_preferred() -> None:
    adapters, state = Adapters(["sql"]), pool(2)
    adapters.listed(state, 0, ["sql"])
    adapters.running(state, 0, ["sql"], 1)
    fleet.unfit(state, 0, "it sleeps")
    assert adapters.warm("sql", state, 0.0) == -1
    fleet.probed(state, 0, ok=True)
    fleet.rest(state, 0, 5.0)
    assert adapters.warm("sql", state, 4.0) == -1
    assert adapters.warm("sql", state, 5.0) == 0


def test_workers_without_a_free_place_are_avoided_while_another_has_one() -> None:
    adapters = Adapters(["sql", "tone"])
    for worker in range(2):
        adapters.listed(ONE, worker, ["sql", "tone"])
    adapters.running(ONE, 0, ["tone"], 1)
    assert adapters.barred("sql", ONE) == {0}
    adapters.running(ONE, 1, ["tone"], 1)
    assert adapters.barred("sql", ONE) == frozenset(), "all are full: it waits at one of them"
    adapters.running(ONE, 0, [], 1)
    assert adapters.barred("sql", ONE) == {1}


def test_a_changed_configuration_reads_all_lists_again() -> None:
    adapters = Adapters(["sql"])
    adapters.listed(ONE, 0, ["sql"])
    adapters.use(["tone", "sql"], discovers=True)
    assert "tone" in adapters
    assert adapters.discovers
    assert adapters.workers("sql", ONE) == [0]
    assert adapters.doubted == {(ONE, 0)}
