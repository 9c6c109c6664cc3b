"""What a replica says of itself and of the others."""

import time

import pytest

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
