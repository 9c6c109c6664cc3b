"""Digests of prompts in the request log, over real sockets: what they tell, and to whom."""

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from bench.common.fleet import Fleet
from tests.asking import chat, entitlement, post, until

Digests = list[list[int]]
SYSTEM = "Answer in one word. " * 100


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "requests.jsonl"


@pytest.fixture
def fleet(log: Path) -> Iterator[Fleet]:
    entitlements = [entitlement("a"), entitlement("b")]
    config = {"entitlements": entitlements, "request_log": {"path": str(log)}}
    with Fleet(short=1, long=0, config=config) as fleet:
        yield fleet


def asked(fleet: Fleet, log: Path, key: str, question: str = "Is it late?") -> Digests:
    """Digests of a request that begins with SYSTEM."""
    lines = len(log.read_text().splitlines())
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    assert post(fleet.url, key, chat(messages=messages)).status_code == 200
    until(lambda: len(log.read_text().splitlines()) > lines)
    record = json.loads(log.read_text().splitlines()[-1])
    digests: Digests = record["request"].get("prompt_digests", [])
    return digests


def restarted(fleet: Fleet, change: Callable[[dict[str, Any]], object]) -> None:
    replica = fleet.replicas[0]
    fleet.kill_replica(replica, signal.SIGTERM)
    change(replica.config)
    replica.file.write_text(yaml.safe_dump(replica.config, sort_keys=False))
    fleet.start_replica(replica)
    fleet.wait_ready(replica)


def test_they_tell_what_prompts_share_and_stay_the_same_under_one_admin_key(
    fleet: Fleet, log: Path
) -> None:
    first, second = asked(fleet, log, "sk-a"), asked(fleet, log, "sk-a", "Is it early?")
    shared = [length for length, digest in first if [length, digest] in second]
    assert shared
    assert len(SYSTEM) <= max(shared) < first[-1][0]
    assert asked(fleet, log, "sk-b") == first, "one cache for all tenants"
    restarted(fleet, lambda config: config["models"][0].update(cache_salt=True))
    salted = asked(fleet, log, "sk-a")
    others = [salted, asked(fleet, log, "sk-b"), first]
    restarted(fleet, lambda _: None)
    assert asked(fleet, log, "sk-a") == salted
    restarted(fleet, lambda config: config["server"].update(admin_key="another-key"))
    others.append(asked(fleet, log, "sk-a"))
    assert [[length for length, _ in each] for each in others] == [[n for n, _ in first]] * 4
    assert len({digest for each in others for _, digest in each}) == 4 * len(first)
    restarted(fleet, lambda config: config["request_log"].update(digests=False))
    assert asked(fleet, log, "sk-a") == []
