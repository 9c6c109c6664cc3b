"""The requests that the benches send, and how they read what came back; no processes."""

from pathlib import Path

import orjson
import pytest

from bench.common import texts
from bench.pool_routing import accuracy, output
from bench.pool_routing.output import CAP, Length, LengthTrace, simulate


def test_the_mixed_load_is_what_it_says() -> None:
    asks = list(accuracy.mixed(200))
    assert asks == list(accuracy.mixed(200))
    assert {ask.kind for ask in asks} == set(texts.KINDS)
    assert sum(ask.stream for ask in asks) / len(asks) == pytest.approx(0.3, abs=0.1)
    for ask in asks:
        body = orjson.loads(ask.body)
        assert body["max_tokens"] == ask.cap_tokens >= body["mock_output_tokens"] >= 1


def test_messages_end_with_the_user() -> None:
    ask = accuracy.chat(["a", "b", "c"], kind="prose", cap_tokens=4, output_tokens=2, name="n")
    roles = [message["role"] for message in orjson.loads(ask.body)["messages"]]
    assert roles == ["user", "assistant", "user"]


def test_without_data_nothing_is_measured() -> None:
    report = output.run()
    assert report.holds
    assert report.rows[0].measured == "not measured"
    assert report.rows[0].target is None


def test_traces_are_read(tmp_path: Path) -> None:
    head = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    for name in ("conv", "code"):
        file = tmp_path / f"AzureLLMInferenceTrace_{name}.csv"
        file.write_text(head + "2023-11-16 18:15:46,374,44\n", encoding="utf-8")
    file = tmp_path / "mooncake_conversation_trace.jsonl"
    file.write_text('{"timestamp":0,"input_length":6758,"output_length":500}\n', encoding="utf-8")
    conversation, code, mooncake = output.read_traces(tmp_path)
    assert conversation.lengths == code.lengths == [Length(374, 44)]
    assert mooncake.lengths == [Length(6758, 500)]


def test_a_habitual_cap_does_not_empty_the_short_pool() -> None:
    trace = LengthTrace("short", "prose", [Length(1000, 100)] * 50 + [Length(20_000, 100)] * 50)
    found = simulate(trace)
    assert (found.short, found.truly_short, found.would_refuse) == (50, 50, 0)
    assert CAP > output.BOUNDARY
    assert simulate(trace, output_mode="cap").short == 0
