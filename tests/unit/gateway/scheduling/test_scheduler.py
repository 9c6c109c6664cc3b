import pytest

from gateway.scheduling.prefix_index import PrefixIndex
from gateway.scheduling.scheduler import Prefix


@pytest.mark.parametrize(
    ("followed", "hits"), [((), [100, 0]), ((True, False), [100, 0]), ((False, True), [0, 0])]
)
def test_prefixes_that_only_a_shadow_looks_at_hold_no_request_in_a_pool(
    followed: tuple[bool, ...], hits: list[int]
) -> None:
    points = ((100, 7), (200, 8))
    indexes = [PrefixIndex(2), PrefixIndex(2)]
    indexes[0].insert(points[:1], 1)
    prefix = Prefix(points, indexes, followed=followed)
    assert prefix.hits() == hits
    assert list(prefix.match(0)) == [(100, 0b10)]
