"""The demo's configuration under the official client: proof that each of the five systems acts."""

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from bench.common.fleet import read_metrics
from sluice.children import Children
from sluice.demo import prompts
from sluice.demo.config import ADMIN_KEY, KEYS, MODEL, RANKS
from sluice.demo.fleet import DemoFleet


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DemoFleet]:
    with Children() as children:
        started = DemoFleet(children, tmp_path_factory.mktemp("demo"), 0, 4.0)
        started.run(compare=False)
        yield started


def client(fleet: DemoFleet, key: str = KEYS["guaranteed"]) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{fleet.url}/v1", api_key=key, max_retries=0)


def ask(talker: openai.OpenAI, messages: list[prompts.Message], tokens: int = 16) -> dict[str, str]:
    """The headers of a stream that was read to its end."""
    given: Any = messages
    answer = talker.chat.completions.with_raw_response.create(
        model=MODEL, messages=given, max_tokens=tokens, stream=True
    )
    assert "".join(c.choices[0].delta.content or "" for c in answer.parse() if c.choices)
    return dict(answer.headers.items())


def decision(fleet: DemoFleet, headers: dict[str, str]) -> dict[str, Any]:
    url = f"{fleet.url}/admin/decisions/{headers['x-request-id']}"
    answer = httpx.get(url, headers={"authorization": f"Bearer {ADMIN_KEY}"}, trust_env=False)
    found: dict[str, Any] = answer.raise_for_status().json()
    return found


def test_pool_routing_sends_each_length_to_its_pool(fleet: DemoFleet) -> None:
    with client(fleet) as talker:
        short = ask(talker, prompts.question("What is a token budget?"))
        long = ask(talker, prompts.document(random.Random(1), 80_000))
    assert (short["x-sluice-pool"], long["x-sluice-pool"]) == ("short", "long")
    assert decision(fleet, short)["plan"]["reason"] == "within_boundary"
    assert decision(fleet, long)["plan"]["reason"] == "over_window"
    series = f'sluice_boundary_tokens{{model="{MODEL}",pool="short"}}'
    assert read_metrics(fleet.url)[series] == 8192


def test_token_pools_refuse_a_flood_and_not_the_guaranteed_tenant(fleet: DemoFleet) -> None:
    def flood(talker: openai.OpenAI) -> dict[str, str] | None:
        try:
            talker.chat.completions.create(
                model=MODEL,
                messages=[{"role": "user", "content": "Count to a thousand, eight times."}],
                max_tokens=600,
                n=8,
                extra_body={"ignore_eos": True},
            )
        except openai.RateLimitError as error:
            return dict(error.response.headers.items())
        return None

    with (
        ThreadPoolExecutor(10) as threads,
        client(fleet, KEYS["spot"]) as spot,
        client(fleet) as talker,
    ):
        running = [threads.submit(flood, spot) for _ in range(10)]
        protected = ask(talker, prompts.question("And me?"))
        refused = [headers for task in running if (headers := task.result()) is not None]
    assert 0 < int(protected["x-ratelimit-limit-requests"]) <= 32
    assert 1 <= len(refused) <= 4, "of 80 sequences 48 are let in"
    assert {headers["x-sluice-reason"] for headers in refused} == {"concurrency"}
    assert all(float(headers["retry-after"]) > 0 for headers in refused)
    denied = (
        'sluice_admission_total{decision="denied",entitlement="demo-spot",reason="concurrency"}'
    )
    assert read_metrics(fleet.url)[denied] >= len(refused)


def test_compression_fits_a_borderline_prompt_into_the_short_pool(fleet: DemoFleet) -> None:
    (prompt,) = prompts.retrieval(random.Random(2), 1, 38_000)
    with client(fleet, KEYS["elastic"]) as talker:
        headers = ask(talker, prompt.messages)
    before, after = map(int, headers["x-sluice-compressed"].split("->"))
    assert headers["x-sluice-pool"] == "short"
    assert after < 8192 < before + 16
    record = decision(fleet, headers)
    assert record["plan"]["reason"] == "within_gamma"
    assert record["compression"]["compressed"] == headers["x-sluice-compressed"]
    series = f'sluice_compressions_total{{model="{MODEL}",result="compressed"}}'
    assert read_metrics(fleet.url)[series] >= 1


def test_quartz_predicts_prefills_and_keeps_a_conversation_where_its_prefix_is(
    fleet: DemoFleet,
) -> None:
    told = [prompts.system(random.Random(3), 12_000)]
    workers = set()
    with client(fleet) as talker:
        for turn in range(3):
            told.append({"role": "user", "content": f"Step {turn}, please."})
            headers = ask(talker, told)
            workers.add(headers["x-sluice-worker"])
            told.append({"role": "assistant", "content": "Done."})
    assert len(workers) == 1
    record = decision(fleet, headers)
    scheduling = record["scheduling"]
    assert scheduling["predicted_prefill_q_s"] > 0
    assert scheduling["expected_hit_tokens"] > 2000
    assert record["usage"]["cached_tokens"] > 2000


def on_trial(fleet: DemoFleet) -> str:
    """The key of a tenant whose refusals are counted, not made: its requests wait in line."""
    made = httpx.post(
        f"{fleet.url}/admin/entitlements",
        json={"name": "trial", "tenant": "trial", "model": MODEL, "mode": "observe"},
        headers={"authorization": f"Bearer {ADMIN_KEY}"},
        trust_env=False,
    )
    return str(made.raise_for_status().json()["key"])


def test_bfio_keeps_one_line_for_all_ranks_and_fills_each(fleet: DemoFleet) -> None:
    key = on_trial(fleet)

    def document(number: int) -> dict[str, Any]:
        with client(fleet, key) as talker:
            return decision(
                fleet, ask(talker, prompts.document(random.Random(number), 60_000), 200)
            )

    with ThreadPoolExecutor(40) as threads:
        records = list(threads.map(document, range(40)))
    ranks = {f"{fleet.long.partition('://')[2]}#{rank}" for rank in range(RANKS)}
    assert {record["worker"] for record in records} == ranks
    assert all({name for name, _ in r["scheduling"]["candidates"]} == ranks for r in records)
    assert any(record["timing"]["queue_ms"] > 0 for record in records)
    assert not any("predicted_prefill_s" in record["scheduling"] for record in records)
