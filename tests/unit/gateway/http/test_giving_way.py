"""Who gives way: the address that holds most, its oldest connections first."""

from gateway.http.client_connection import giving_way


def test_the_oldest_of_whoever_holds_most_give_way_until_others_hold_as_much() -> None:
    greedy = [("greedy", float(n), f"g{n}") for n in range(6)]
    others = [("a", -2.0, "a0"), ("b", -1.0, "b0"), ("a", 9.0, "a1")]
    assert giving_way([*others, *reversed(greedy)], 4) == ["g0", "g1", "g2", "g3"]
    found = giving_way([*others, *greedy], 7)
    assert set(found[:6]) == {"g0", "g1", "g2", "g3", "g4", "a0"}
    assert len(giving_way([*others, *greedy], 100)) == 9
    assert giving_way([], 3) == []
