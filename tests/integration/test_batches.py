"""Batches through two replicas over one Redis and one bucket, with the official client.

Whatever goes away in the middle, each item is once in the output and the ledger.
"""

import re
import time
from collections.abc import Iterator

import httpx
import openai
import pytest
from moto.server import ThreadedMotoServer

from bench.common.fleet import MODEL, Fleet, RedisServer
from sluice.children import free_ports
from tests.asking import entitlement, post, until
from tests.batching import (
    assert_once,
    assert_posted,
    client_of,
    create,
    done,
    item,
    items,
    output,
    upload,
)

pytestmark = pytest.mark.redis
TENANTS = ("calls", "killed", "away")
ITEMS = 200
ITEMS_RUN = f'sluice_batch_items_total{{model="{MODEL}",result="completed"}}'
MOCK = ("--speed", "2")
"""An item of 100 tokens takes .7 s; eight run at a time."""


class Bucket:
    """A bucket of moto's S3 server, which can go away and come back with what it held."""

    def __init__(self) -> None:
        (port,) = free_ports(1)
        self.url = f"http://127.0.0.1:{port}"
        self.server = ThreadedMotoServer("127.0.0.1", port, verbose=False)

    def names(self) -> list[str]:
        """What it holds."""
        listed = httpx.get(f"{self.url}/bucket", trust_env=False).raise_for_status()
        return re.findall("<Key>(.*?)</Key>", listed.text)


@pytest.fixture(scope="module")
def bucket() -> Iterator[Bucket]:
    made = Bucket()
    made.server.start()
    httpx.put(f"{made.url}/bucket", trust_env=False).raise_for_status()
    yield made
    made.server.stop()


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.fixture(scope="module")
def fleet(
    bucket: Bucket, redis: RedisServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("batches")
    config = {
        "state": {"url": redis.url},
        "entitlements": [
            entitlement("live", "guaranteed", concurrency=4),
            *(entitlement(name) for name in TENANTS),
        ],
        "batches": {"url": "s3://bucket/files"},
        "ledger": {"path": str(folder / "ledger.db")},
    }
    named = {"ENDPOINT_URL": bucket.url, "ACCESS_KEY_ID": "any", "SECRET_ACCESS_KEY": "any"}
    with Fleet(
        short=1, long=0, short_slots=9, mock=MOCK, config=config, further=[{}], idle=True
    ) as made:
        for replica in made.replicas:
            replica.env = {f"AWS_{name}": value for name, value in named.items()}
            made.start_replica(replica)
        for replica in made.replicas:
            made.wait_ready(replica)
        yield made


def clients(fleet: Fleet, name: str) -> list[openai.OpenAI]:
    return [client_of(replica.url, f"sk-{name}") for replica in fleet.replicas]


def test_each_call_is_answered_by_either_replica(fleet: Fleet, bucket: Bucket) -> None:
    first, second = clients(fleet, "calls")
    data = items(9, 4)
    file = upload(first, data)
    assert second.files.retrieve(file.id) == file
    assert [f.id for f in second.files.list(purpose="batch")] == [file.id]
    assert second.files.content(file.id).content == data
    part = second.files.content(file.id, extra_headers={"range": "bytes=700-999"})
    assert part.content == data[700:1000]
    batch = create(second, file.id, metadata={"run": "1"})
    text = output(first, batch.id, 9)
    assert_posted(assert_once(text, 9), fleet.url, "sk-calls")
    ended = first.batches.retrieve(batch.id)
    assert (ended.metadata, ended.usage is not None) == ({"run": "1"}, True)
    assert [b.id for b in first.batches.list(limit=1)] == [batch.id]
    assert ended.output_file_id is not None
    tail = first.files.content(ended.output_file_id, extra_headers={"range": "bytes=-50"})
    assert tail.text == text[-50:]
    for name in (file.id, ended.output_file_id):
        assert second.files.delete(name).deleted
    with pytest.raises(openai.NotFoundError):
        first.files.content(ended.output_file_id)
    assert all(name.endswith(".idx") for name in bucket.names()), "which lines a part has"
    long = create(first, upload(second, items(50, 1000)).id)
    assert second.batches.cancel(long.id).status in {"cancelling", "cancelled"}
    until(lambda: first.batches.retrieve(long.id).status == "cancelled")


def items_run(fleet: Fleet) -> list[float]:
    """Items that each replica answered."""
    return [replica.metrics().get(ITEMS_RUN, 0) for replica in fleet.replicas]


def test_a_batch_outlives_its_bucket_and_its_replica(fleet: Fleet, bucket: Bucket) -> None:
    first, second = clients(fleet, "killed")
    counts = items_run(fleet)
    batch = create(second, upload(first, items(ITEMS, 100)).id).id
    until(lambda: done(first, batch) > 0)
    owner = 0 if items_run(fleet)[0] > counts[0] else 1
    bucket.server.stop()
    before, end_s = done(first, batch), time.monotonic() + 10
    with pytest.raises(openai.InternalServerError, match="cannot be read or written now"):
        upload(first.with_options(max_retries=0), item(0))
    while time.monotonic() < end_s:
        assert post(fleet.url, "sk-live").status_code == 200
        time.sleep(0.5)
    assert (first.batches.retrieve(batch).status, done(first, batch)) == ("in_progress", before)
    bucket.server.start()
    until(lambda: done(first, batch) > before)
    assert done(first, batch) < ITEMS
    killed, client = fleet.replicas[owner], (second, first)[owner]
    fleet.kill_replica(killed)
    usage = assert_once(output(client, batch, ITEMS), ITEMS)
    assert_posted(usage, str(client.base_url).removesuffix("/v1/"), "sk-killed")
    fleet.start_replica(killed)
    fleet.wait_ready(killed)


def test_a_batch_outlives_redis_and_the_engines_being_away(
    fleet: Fleet, redis: RedisServer
) -> None:
    first, second = clients(fleet, "away")
    batch = create(first, upload(second, items(ITEMS, 100)).id).id
    until(lambda: done(first, batch) > 0)
    redis.hang()
    time.sleep(8)
    fleet.kill_engine(fleet.engines[0])
    time.sleep(9)  # more than 15 s in all: the other replica may take the batch over
    redis.resume()
    time.sleep(3)
    fleet.start_engine(fleet.engines[0])
    assert_posted(assert_once(output(second, batch, ITEMS), ITEMS), fleet.url, "sk-away")
