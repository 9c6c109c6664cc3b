"""How calls of scripts are written, and which servers a URL names; no Redis needed."""

import pytest
from redis.crc import key_slot

from gateway.store.redis import link
from gateway.store.redis import route as redis_route
from gateway.store.redis.link import Op
from gateway.store.redis.model import MAX_TICKED, MIN_TICKED, SLICE, TICK_CALL_US, next_slice
from gateway.store.redis.scripts import MAX_GROUPED, Calls, Scripts
from tests.fakes import FakeClock


@pytest.mark.parametrize("model", ["m", "org/model-7b", "a{b}c", "}{", "ä b"])
def test_all_keys_of_a_model_are_in_one_slot(model: str) -> None:
    calls = Calls(Scripts(), model, 3)
    assert len({key_slot(key.encode()) for key in calls.all_keys()}) == 1
    assert len(set(calls.all_keys())) == 13 + 3 * 4
    assert not set(calls.all_keys()) & set(Calls(Scripts(), model + "x", 3).all_keys())


def test_calls_that_may_share_a_script_do_in_their_order() -> None:
    def named(names: str) -> list[list[str]]:
        ops = [Op(known[name], b"") for name in names]
        return [[op.name[0] for op in group] for group in link.grouped_ops(ops)]

    known = {"a": "admit", "s": "settle", "t": "transfer", "r": "renew"}
    assert named("") == []
    assert named("asta") == [["a", "s", "t", "a"]]
    assert named("arra") == [["a"], ["r"], ["r"], ["a"]]
    many = named("as" * MAX_GROUPED)
    assert [len(group) for group in many] == [MAX_GROUPED, MAX_GROUPED]


def test_only_a_test_build_takes_the_time_as_an_argument() -> None:
    clock = FakeClock(12.5)
    reported, own = Calls(Scripts(clock), "m", 1), Calls(Scripts(), "m", 1)
    assert reported.packed("reap", b"x").endswith(b"$4\r\n12.5\r\n")
    assert own.packed("reap", b"x").endswith(b"$1\r\nx\r\n")
    assert b"tonumber(ARGV[#ARGV])" in reported.scripts.all["reap"].text
    assert b"tonumber(ARGV[#ARGV])" not in own.scripts.all["reap"].text


def test_a_call_names_the_keys_of_pools_that_came_to_be_known() -> None:
    calls = Calls(Scripts(), "m", 1)
    assert b":weights:1\r\n" not in calls.packed("reap", b"x")
    calls.widen(2)
    assert b":weights:1\r\n" in calls.packed("reap", b"x")


def test_urls_of_several_servers_name_nodes_password_and_service() -> None:
    route = redis_route.route_of("redis+sentinel://u:p%40ss@h1:1,[::1]:2/mine/3")
    assert vars(route) == {
        "_seeds": [("h1", 1), ("::1", 2)],
        "_options": {"username": "u", "password": "p@ss"},
        "_service": "mine",
        "_db": 3,
    }
    cluster = redis_route.route_of("redis+cluster://h1:1,h2:2")
    assert vars(cluster) == {
        "_seeds": [("h1", 1), ("h2", 2)],
        "_options": {"username": None, "password": None},
    }


def test_a_tick_s_calls_take_as_many_as_the_server_does_in_time() -> None:
    ticked = SLICE
    for us_each, most in ((15, TICK_CALL_US // 15), (100, TICK_CALL_US // 100)):
        for _ in range(4):
            ticked = next_slice(ticked, ticked * us_each)
        assert most - 1 <= ticked <= most
    assert next_slice(100, 0) == 100, "a server that cannot tell"
    assert next_slice(100, 1) == 200
    assert next_slice(MAX_TICKED, 1) == MAX_TICKED
    assert next_slice(100, 10_000_000) == MIN_TICKED
