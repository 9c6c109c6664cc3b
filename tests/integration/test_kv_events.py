"""Engines that say what their prefix caches evict, over real sockets: what the gateway expects."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import pytest

from bench.common.fleet import MODEL, Fleet, consecutive_ports
from bench.common.raw_client import text
from gateway.fleet.kv_events import KvEvents
from gateway.fleet.model_runtime import Pool
from gateway.metrics import Metrics
from gateway.scheduling.prefix_index import PrefixIndex
from tests.asking import eventually, until
from tests.builders import address

zmq = pytest.importorskip("zmq")

TOKENS = 2000
POINTS = ((100, 11), (200, 12), (320, 13))
FIRST, SECOND, THIRD = range(101, 107), range(107, 113), range(113, 121)
"""Blocks of 16 tokens up to the points, less the last part of one."""


@pytest.fixture(scope="module", params=[1, 2], ids=["engine", "ranks"])
def fleet(request: pytest.FixtureRequest) -> Iterator[Fleet]:
    """One engine whose cache holds three of the test's prompts, as one worker or two."""
    ranks: int = request.param
    port = consecutive_ports(ranks)
    endpoint = f"tcp://127.0.0.1:{port}"
    fleet = Fleet(
        short=1,
        long=0,
        short_window=8192,
        mock=(
            *("--speed", "20", "--dp-ranks", str(ranks), "--kv-events", endpoint),
            *("--prefix-cache-tokens", str(int(3.5 * TOKENS))),
        ),
        model={"scheduling": {"policy": "quartz"}},
    )
    worker = {"url": fleet.engines[0].url, "kv_events": f"tcp://*:{port}", "ranks": ranks}
    config: Any = fleet.replicas[0].config
    config["models"][0]["pools"]["short"]["workers"] = [worker]
    with fleet:
        hears(fleet)
        yield fleet


def post(fleet: Fleet, name: str, **more: Any) -> httpx.Response:
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": text(name, TOKENS)}],
        "max_tokens": 2,
        **more,
    }
    answer = httpx.post(fleet.url + "/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer


def ask(fleet: Fleet, name: str, **more: Any) -> tuple[int, int]:
    """(tokens expected in the worker's cache, tokens that were there)."""
    answer = post(fleet, name, **more)
    record = fleet.decision(answer.headers["x-request-id"])
    return record["scheduling"]["expected_hit_tokens"], record["usage"]["cached_tokens"]


def events(fleet: Fleet, kind: str) -> float:
    series = f'sluice_kv_events_total{{kind="{kind}",pool="short"}}'
    return fleet.metrics().get(series, 0)


def ranks_of(fleet: Fleet) -> int:
    config: Any = fleet.replicas[0].config
    ranks: int = config["models"][0]["pools"]["short"]["workers"][0]["ranks"]
    return ranks


def hears(fleet: Fleet) -> None:
    """Ask until the events of each rank come: they are lost before the gateway listens."""

    since_unix_s = time.time()

    def all_heard() -> bool:
        flood(fleet)
        return heard(fleet, since_unix_s) == ranks_of(fleet)

    until(all_heard)


def flood(fleet: Fleet) -> None:
    """Ask each rank something new."""
    names = [f"new {n} {time.monotonic()}" for n in range(4 * ranks_of(fleet))]
    with ThreadPoolExecutor(len(names)) as threads:
        list(threads.map(partial(ask, fleet), names))


def heard(fleet: Fleet, since_unix_s: float = 0) -> int:
    """Workers of which events were heard since then."""
    series = "sluice_worker_kv_event_timestamp_seconds"
    return sum(
        name.startswith(series) and at_unix_s > since_unix_s
        for name, at_unix_s in fleet.metrics().items()
    )


def test_what_the_engine_evicted_is_expected_no_more(fleet: Fleet) -> None:
    held = [f"held {n}" for n in range(2 * ranks_of(fleet))]
    for name in held:
        ask(fleet, name)
    expected, cached = ask(fleet, held[-1], session_id="a client's own", vllm_xargs={"a": 1})
    assert expected == pytest.approx(cached, rel=0.1)
    assert cached > 0.7 * TOKENS
    (sent,) = fleet.engines[0].last()
    assert "a client's own" not in sent["body"]
    before = events(fleet, "removed")
    for _ in range(3):
        flood(fleet)
    until(lambda: events(fleet, "removed") > before + TOKENS / 16)
    evicted = 0
    for name in held:
        expected, cached = ask(fleet, name)
        assert expected == pytest.approx(cached, abs=TOKENS / 8)
        evicted += cached < TOKENS / 2
    assert evicted
    expected, cached = ask(fleet, held[-1])
    assert expected == pytest.approx(cached, rel=0.1), "what is held is still expected"
    assert cached > 0.7 * TOKENS


def test_a_prefill_engine_says_what_it_evicted() -> None:
    endpoint = f"tcp://127.0.0.1:{consecutive_ports(1)}"
    cached_tokens = ("--prefix-cache-tokens", str(int(3.5 * TOKENS)))
    fleet = Fleet(short=2, long=0, mock=("--speed", "20", "--kv-transfer", "vllm", *cached_tokens))
    prefill, decode = fleet.engines
    prefill.command += ["--kv-events", endpoint]
    config: Any = fleet.replicas[0].config
    config["models"][0]["pools"]["short"] = {
        "max_model_len": 8192,
        "prefill": {"max_num_seqs": 8, "workers": [{"url": prefill.url, "kv_events": endpoint}]},
        "decode": {"max_num_seqs": 8, "workers": [decode.url]},
        "transfer": {"kind": "vllm"},
    }

    def expected(name: str) -> int:
        answer = post(fleet, name)
        hit: int = fleet.decision(answer.headers["x-request-id"])["prefill"]["expected_hit_tokens"]
        return hit

    with fleet:
        until(lambda: expected(f"first {time.monotonic()}") or heard(fleet))
        expected("held")
        assert expected("held") > TOKENS / 2
        for other in range(12):
            expected(f"other {other}")
        assert expected("held") < TOKENS / 2
        assert expected("other 11") > TOKENS / 2


def test_after_a_restart_of_the_engine_nothing_is_expected_and_events_are_heard(
    fleet: Fleet,
) -> None:
    ask(fleet, "held")
    engine = fleet.engines[0]
    fleet.kill_engine(engine)
    until(lambda: events(fleet, "gap") == ranks_of(fleet))
    until(lambda: not httpx.get(fleet.url + "/ready").is_success)
    fleet.start_engine(engine)
    until(lambda: httpx.get(fleet.url + "/ready").is_success)

    hears(fleet)
    assert ask(fleet, "held")[0] == 0
    expected, cached = ask(fleet, "held")
    assert expected == pytest.approx(cached, rel=0.1)


class Engine:
    """Publishes by hand what a real engine would."""

    def __init__(self, endpoint: str) -> None:
        self.socket = zmq.Context.instance().socket(zmq.PUB)
        self.number = 0
        try:
            self.socket.bind(endpoint)
        except zmq.ZMQError:
            self.socket.close()
            raise

    def send(self, *said: dict[str, Any] | bytes) -> None:
        payload = said[0] if isinstance(said[0], bytes) else msgspec.msgpack.encode([0.0, said, 0])
        self.socket.send_multipart([b"", self.number.to_bytes(8, "big"), payload])
        self.number += 1

    def stores(self, session: str, *parts: range, parent: int | None = None) -> None:
        for part in parts:
            self.send(
                {
                    "type": "BlockStored",
                    "block_hashes": list(part),
                    "parent_block_hash": parent,
                    "token_ids": [1, 2, 3],
                    "block_size": 16,
                    "session_id": session,
                }
            )
            parent = part[-1]

    def removes(self, *blocks: int) -> None:
        self.send({"type": "BlockRemoved", "block_hashes": list(blocks), "medium": "GPU"})


class Listening:
    """A pool of one worker, its subscription, and its engine."""

    def __init__(self, endpoint: str) -> None:
        self.pool = Pool("all", [address("w:1", kv_events=endpoint)], 8)
        self.pool.prefixes = PrefixIndex(1)
        served: Any = SimpleNamespace(fleet=SimpleNamespace(pools=(self.pool,)))
        self.metrics = Metrics()
        self.events = KvEvents(lambda: (served,), self.metrics)
        self.events.look()
        self.engine = Engine(endpoint)

    @property
    def hit(self) -> int:
        assert self.pool.prefixes is not None
        match = self.pool.prefixes.match(POINTS)
        return match[0][0] if match else 0

    def sent(self) -> str:
        """Bind the prompt to the worker, as a request does."""
        assert self.pool.prefixes is not None
        self.pool.prefixes.insert(POINTS, 0)
        return self.pool.notices[0].begin(POINTS, 1.0)

    async def served(self) -> None:
        """The prompt is sent and computed."""
        self.engine.stores(self.sent(), FIRST, SECOND, THIRD)
        await self.counted("stored", self.count("stored") + 3)

    def count(self, kind: str) -> float:
        return self.metrics.kv_events.values.get(("all", kind), 0)

    async def counted(self, kind: str, times: float) -> None:
        await eventually(lambda: self.count(kind) >= times)


@contextlib.asynccontextmanager
async def connected() -> AsyncIterator[Listening]:
    made = Listening(f"tcp://127.0.0.1:{consecutive_ports(1)}")

    def heard() -> bool:
        made.engine.stores("nobody's", range(9, 10))
        return made.count("stored") > 0

    try:
        await eventually(heard)
        yield made
    finally:
        await made.events.close()
        made.engine.socket.close(linger=0)


@pytest.fixture
async def listening() -> AsyncIterator[Listening]:
    async with connected() as made:
        yield made


async def test_a_subscription_that_ends_as_its_engine_goes_harms_no_other() -> None:
    for _ in range(50):
        async with connected():
            pass


async def test_a_prompt_is_forgotten_from_its_end_as_its_blocks_go(listening: Listening) -> None:
    await listening.served()
    for times, (blocks, hit) in enumerate(((THIRD, 200), (SECOND, 100), (FIRST, 0)), 1):
        assert listening.hit > hit
        listening.engine.removes(*reversed(blocks))
        await listening.counted("removed", times)
        assert listening.hit == hit


async def test_a_bound_prompt_outlives_the_eviction_of_its_old_blocks(
    listening: Listening,
) -> None:
    await listening.served()
    listening.sent()
    listening.engine.removes(*FIRST, *SECOND, *THIRD)
    await listening.counted("removed", 1)
    assert listening.hit == POINTS[-1][0]


@pytest.mark.parametrize("said", ["gap", "cleared", "malformed"])
async def test_what_is_unknown_is_forgotten(listening: Listening, said: str) -> None:
    await listening.served()
    if said == "gap":
        listening.engine.number += 1
        listening.engine.removes(1)
    elif said == "cleared":
        listening.engine.send({"type": "AllBlocksCleared"})
    else:  # an older version's form: estimated as before
        listening.engine.send(msgspec.msgpack.encode([0.0, [["BlockRemoved", [1]]], 0]))
    await listening.counted(said, 1)
    assert listening.hit == (POINTS[-1][0] if said == "malformed" else 0)
    await listening.served()
    listening.engine.removes(*THIRD)
    await eventually(lambda: listening.hit == 200)


async def test_a_subscription_finds_its_engine_again_and_ends_with_its_worker(
    listening: Listening,
) -> None:
    await listening.served()
    endpoint = listening.pool.addresses[0].kv_events or ""
    listening.engine.socket.close(linger=0)
    await asyncio.sleep(0.1)

    def bound() -> bool:
        try:
            listening.engine = Engine(endpoint)
        except zmq.ZMQError:
            return False
        return True

    await eventually(bound)

    stored = listening.count("stored")

    def connected() -> bool:
        listening.engine.stores("nobody's", range(9, 10))
        return listening.count("stored") > stored

    await eventually(connected)
    assert listening.hit == 0
    await listening.served()
    listening.pool.present[0] = False
    listening.events.look()
    assert not listening.pool.notices
