"""Exchanges of records keep nothing of subjects that are gone."""

from pathlib import Path

import pytest

from bench.common.fleet import RedisServer
from gateway.store.redis.exchange import RedisExchange
from tests.redis_nodes import RedisCluster

pytestmark = pytest.mark.redis


async def test_a_subject_that_returns_is_read_anew(redis_server: RedisServer) -> None:
    one, other = RedisExchange(redis_server.url, "one"), RedisExchange(redis_server.url, "other")
    await other.exchange({"m": b"news"})
    for found in ([b"news"], []):
        reported = await one.exchange({"m": b"", "n": b""})
        assert [record for _, record in reported["m"].notes] == found
    await one.exchange({"n": b""})  # a reload removed the model
    reported = await one.exchange({"m": b"", "n": b""})  # and added it again
    assert [record for _, record in reported["m"].notes] == [b"news"]
    for each in (one, other):
        await each.close()


async def test_in_a_cluster_a_subject_that_is_gone_keeps_no_connection(tmp_path: Path) -> None:
    with RedisCluster(tmp_path) as cluster:
        found = RedisExchange(cluster.url, "one")
        await found.exchange({"m": b"", "n": b""})
        assert set(found._sessions) == {"m", "n"}
        await found.exchange({"n": b""})
        assert set(found._sessions) == {"n"}
        await found.close()
