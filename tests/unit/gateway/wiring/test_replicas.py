"""What a replica says of itself and of the others."""

import time

import pytest

from gateway.fleet.model_runtime import ModelRuntime
from gateway.replicas.calls import ReplicaCalls
from gateway.settings import Config, parse
from gateway.wiring.models import served_model
from gateway.wiring.replicas import Replicas, loopback_of_many

FILE = """
version: 1
server: {host: HOST}
state: {url: "URL"}
models:
  - name: m
    scheduling: {policy: bfio}
    pools:
      only:
        max_model_len: 4096
        max_num_seqs: 8
        workers: [{url: "http://127.0.0.1:9", ranks: 2}]
"""
LOCAL = "redis://127.0.0.1:1/0"


def config(host: str, url: str) -> Config:
    return parse(FILE.replace("HOST", host).replace("URL", url), "sluice.yaml", {})


class Wire:
    """Another replica, in this process."""

    def __init__(self, answers: ReplicaCalls) -> None:
        self._answers = answers

    async def ask(self, topic: str, payload: bytes = b"") -> list[bytes]:
        found = self._answers.answer(topic, payload)
        return [] if found is None else [found]


class Pair:
    """Two replicas; the second answers the first one's questions."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        made = config("127.0.0.1", LOCAL)
        self.models = [[served_model(made, model) for model in made.models] for _ in range(2)]
        self.retiring: list[ModelRuntime] = []
        """Of the first."""
        self.first, second = (
            Replicas(
                *(made, models, time.monotonic),
                port=1,
                counted=lambda _: 2,
                retiring=retiring,
            )
            for models, retiring in zip(self.models, (self.retiring, []), strict=True)
        )
        monkeypatch.setattr(self.first, "peers", Wire(second.peers))

    def draining(self, replica: int) -> list[bool]:
        return self.models[replica][0].fleet.pools[0].draining

    def noted(self) -> dict[str, bool]:
        assert self.first._fleet is not None
        return {worker: drain.on for worker, drain in self.first._fleet._drains.items()}


async def test_a_drain_is_in_force_on_all_replicas_once_it_is_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pair = Pair(monkeypatch)
    assert await pair.first.drain("127.0.0.1:9", True) == 2
    assert (pair.draining(0), pair.draining(1)) == ([True, True], [True, True])
    assert await pair.first.drain("127.0.0.1:9#1", False) == 1
    assert (pair.draining(0), pair.draining(1)) == ([True, False], [True, False])


async def test_a_worker_that_only_another_replica_has_left_is_drained_and_told_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pair = Pair(monkeypatch)
    pool = pair.models[0][0].fleet.pools[0]
    for place in range(2):
        pool.present[place] = False
    assert await pair.first.drain("127.0.0.1:9", True) == 2
    assert pair.draining(1) == [True, True]
    assert pair.noted() == {"127.0.0.1:9": True}


async def test_the_drain_of_a_worker_that_nobody_has_is_not_remembered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pair = Pair(monkeypatch)
    assert await pair.first.drain("127.0.0.1:7", True) == 0
    assert pair.noted() == {}


async def test_a_drain_reaches_models_that_a_reload_removed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pair = Pair(monkeypatch)
    pair.retiring += pair.models[0]
    assert await pair.first.drain("127.0.0.1:9", True) == 2, "each pool counts once"
    pair.models[0].clear()
    assert await pair.first.drain("127.0.0.1:9", False) == 2
    assert pair.retiring[0].fleet.pools[0].draining == [False, False]


def test_several_replicas_before_balanced_ranks_say_so_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    made, there = config("127.0.0.1", LOCAL), 1
    models = [served_model(made, model) for model in made.models]
    replicas = Replicas(made, models, time.monotonic, port=1, counted=lambda _: there)
    replicas._sharing("m")
    assert not caplog.messages
    there = 2
    for _ in range(3):
        assert replicas._sharing("m") == 2
    (said,) = caplog.messages
    assert said.startswith("2 replicas serve m: each balances only its own requests")


@pytest.mark.parametrize(
    ("host", "url", "warns"),
    [
        ("127.0.0.1", "redis://10.0.0.9:6379/0", True),
        ("localhost", "rediss://redis.invalid:6379/0", True),
        ("10.1.2.3", "redis://10.0.0.9:6379/0", False),
        ("127.0.0.1", LOCAL, False),
        ("127.0.0.1", "redis://localhost:6379/0", False),
        ("127.0.0.1", "memory://", False),
    ],
)
def test_an_address_that_other_hosts_cannot_ask_at_is_told(
    host: str, url: str, warns: bool
) -> None:
    said = loopback_of_many(config(host, url))
    assert (said is not None) == warns
    assert said is None or f"registers {host}" in said
