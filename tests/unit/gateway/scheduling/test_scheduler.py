import pytest

from gateway.fleet.model_runtime import Prefix
from gateway.scheduling.prefix_index import PrefixIndex
from tests.builders import changed, served_model


@pytest.mark.parametrize(("followed", "hits"), [(True, [100, 0]), (False, [0, 0])])
def test_prefixes_that_only_a_shadow_looks_at_hold_no_request_in_a_pool(
    hits: list[int], *, followed: bool
) -> None:
    points = ((100, 7), (200, 8))
    index = PrefixIndex(2)
    index.insert(points[:1], 1)
    pools = changed(served_model(), prefixes=(index, None)).fleet.pools
    pools[0].follows_prefixes = followed
    prefix = Prefix(points, pools)
    assert prefix.hits() == hits
    assert list(prefix.match(0)) == [(100, 0b10)]
    assert prefix.match(1) == ()
