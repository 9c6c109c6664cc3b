"""A plan from the log of the gateway that an earlier plan configured."""

from bench.fleetopt.replanned import replanned_rows


def test_the_second_plan_is_the_first_one() -> None:
    boundary, nodes = replanned_rows(3000)
    assert boundary.holds, boundary
    assert nodes.holds, nodes
