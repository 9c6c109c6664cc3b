"""What is held for clients without a key is bounded, and those who hold most are dropped."""

from hypothesis import given
from hypothesis import strategies as st

from gateway.web.unproven import Unproven


class Holder:
    def __init__(self, unproven: Unproven) -> None:
        self.unproven = unproven
        self.size = 0
        self.dropped = 0

    def hold(self, size: int) -> None:
        self.size = size
        self.unproven.hold(self, size)

    def drop(self) -> None:
        self.dropped += 1
        self.hold(0)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 60)), max_size=60))
def test_the_sum_is_that_of_the_holders_and_bounded(steps: list[tuple[int, int]]) -> None:
    unproven = Unproven(100)
    holders = [Holder(unproven) for _ in range(10)]
    for who, size in steps:
        holders[who].hold(size)
        assert unproven.total == sum(holder.size for holder in holders) <= 100


def test_who_holds_most_is_dropped_and_who_holds_little_stays() -> None:
    unproven = Unproven(1_000)
    small = [Holder(unproven) for _ in range(50)]
    greedy = [Holder(unproven) for _ in range(3)]
    for holder in small:
        holder.hold(5)
    for step in range(1, 100):
        for holder in greedy:
            holder.hold(10 * step)
    assert not any(holder.dropped for holder in small)
    assert all(holder.dropped for holder in greedy)
