"""The demo as a visitor runs it, and its traffic to a gateway that runs already."""

import re
import subprocess
import sys
from collections.abc import Iterator

import httpx
import openai
import pytest

from sluice.children import Children
from sluice.demo.config import KEYS, MODEL
from sluice.demo.fleet import DemoFleet
from tests.batching import assert_once, client_of, create, items, output, upload
from tests.unit.deploy.files import ours


def run(*words: str) -> str:
    """What the command prints; it has to end well by itself."""
    command = [sys.executable, "-m", "sluice", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def number(text: str) -> float:
    return float(text.replace(",", ""))


@pytest.mark.timed
def test_the_flood_is_told_once_with_what_was_measured() -> None:
    """The best of three: other work on the machine takes its time from one of the two pools."""
    for _ in range(3):
        told = run(
            "demo", "--port", "0", "--once", "--story", "flood", "--pace", "0.5"
        ).splitlines()
        assert told[0].startswith("SLUICE READY http://127.0.0.1:")
        assert told[1].startswith("flood: ")
        assert any(re.match(r"  guaranteed probe .* short .* ms", line) for line in told)
        assert any("429 concurrency" in line for line in told)
        assert told[-1].startswith("flood = ")
        measured = re.search(
            r"\(p95\): ([\d,]+) ms in calm, ([\d,]+) ms in the flood; (\d+) of (\d+) answered. "
            r"Spot: (\d+) served, (\d+) told to wait .* unmanaged pool: ([\d,]+) ms",
            told[-1],
        )
        assert measured is not None
        _, flooded, answered, asked, served, refused, unmanaged = map(number, measured.groups())
        assert answered == asked
        assert served > 0
        assert refused > 50
        if flooded < unmanaged / 2:
            return
    pytest.fail("the flood is felt without the gateway, and less with it")


def test_compressed_prompts_reach_the_engine_with_the_sentence_that_answers() -> None:
    *_, told = run("demo", "--port", "0", "--once", "--story", "retrieval", "--pace", "0.1").split(
        "retrieval = "
    )
    assert told.startswith("2 of 2 fitted into the short pool, ")
    assert "the sentence with the answer was kept in 2. " in told


def test_prompts_computed_apart_are_answered_and_found_cached_again() -> None:
    told = run("demo", "--port", "0", "--once", "--story", "phases", "--pace", "0.3").splitlines()
    assert any(re.match(r"  spot +document .* apart .* prefill at \d+", line) for line in told)
    cached = re.search(r"again, (\d+) % of them was cached. (\d+) of (\d+) .* 0 failed", told[-1])
    assert cached is not None, told[-1]
    assert int(cached[1]) > 90
    assert cached[2] == cached[3]


def test_an_act_that_does_not_exist_is_refused_with_those_that_do() -> None:
    command = [sys.executable, "-m", "sluice", "demo", "--story", "fire"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "calm, flood, retrieval, engine, phases" in " ".join(
        done.stderr.replace("│", " ").split()
    )


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DemoFleet]:
    with Children() as children:
        started = DemoFleet(children, tmp_path_factory.mktemp("demo"), 0, 8.0)
        started.run(compare=False)
        yield started


def test_the_composed_traffic_reaches_every_system_of_a_running_gateway(fleet: DemoFleet) -> None:
    """The command of docker-compose.yml, with the gateway's address as the only difference."""
    command = [w.replace("http://gateway:8080", fleet.url) for w in ours()["traffic"]["command"]]
    told = run(*command, "--once", "--pace", "0.1")
    results = dict(re.findall(r"^(\w+) = (.*)$", told, re.MULTILINE))
    assert list(results) == ["calm", "flood", "retrieval"], "none ends an engine"
    assert "0 failed" in results["calm"]
    page = httpx.get(f"{fleet.url}/metrics", trust_env=False).text
    for series in (
        'sluice_requests_total{model="demo-model",outcome="ok",pool="short"}',
        'sluice_requests_total{model="demo-model",outcome="ok",pool="long"}',
        'sluice_compressions_total{model="demo-model",result="compressed"}',
        'sluice_admission_total{decision="denied",entitlement="demo-spot",reason="concurrency"}',
    ):
        assert series in page


def test_the_official_client_runs_a_batch_on_the_demo(fleet: DemoFleet) -> None:
    client = client_of(fleet.url, KEYS["elastic"])
    data = items(40, 20, MODEL)
    file = upload(client, data)
    assert client.files.retrieve(file.id) == file
    assert client.files.content(file.id).content == data
    batch = create(client, file.id, metadata={"job": "demo"})
    text = output(client, batch.id, 40)
    used = sum(each["completion_tokens"] for each in assert_once(text, 40))
    ended = client.batches.retrieve(batch.id)
    assert ended.usage is not None
    assert (ended.usage.output_tokens, ended.metadata) == (used, {"job": "demo"})
    assert [each.id for each in client.batches.list()] == [batch.id]
    with pytest.raises(openai.ConflictError, match="has ended"):
        client.batches.cancel(batch.id)
    files = [each.id for each in client.files.list(order="asc")]
    assert files == [file.id, ended.output_file_id]
    assert [client.files.delete(name).deleted for name in files] == [True, True]


def test_traffic_to_no_gateway_ends_with_its_address() -> None:
    command = [sys.executable, "-m", "sluice", "traffic", "--url", "http://127.0.0.1:9", "--once"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "http://127.0.0.1:9" in done.stderr
    assert "Traceback" not in done.stderr
