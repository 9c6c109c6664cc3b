"""`sluice compress`: what goes and why, and the judge that asks both prompts."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import respx
from typer.testing import Result

from tests.running import sluice
from tests.unit.compressor.texts import prose

GOLD = "The mayor keeps nine bees."
QUESTION = "How many bees does the mayor keep?"
TEXT = prose(60).replace("\n\n", f" {GOLD}\n\n", 1)
URL = "http://127.0.0.1:9/v1"


def run(*args: str, stdin: str | None = None, **env: str) -> Result:
    return sluice("compress", *args, stdin=stdin, **env)


def test_a_text_and_its_question_for_people() -> None:
    result = run("--budget", "1200", "--question", QUESTION, stdin=TEXT, COLUMNS="300")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert any(line.startswith("+") and "nine bees" in line for line in lines)
    assert any(line.startswith("-") and "scored" in line for line in lines)
    assert f"Asked: Question: {QUESTION}" in result.stdout
    assert "the budget is 3984 bytes" in result.stdout


def test_messages_for_machines(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": TEXT}]
    for body in (messages, {"model": "m", "messages": messages}):
        file = tmp_path / "prompt.json"
        file.write_text(json.dumps(body), encoding="utf-8")
        out = tmp_path / "out.json"
        result = run(
            str(file), "--budget", "1200", "--question", QUESTION, "--json", "-o", str(out)
        )
        assert result.exit_code == 0, result.output
        found: dict[str, Any] = json.loads(result.stdout)
        assert found["messages"][0] == messages[0]
        assert GOLD in found["messages"][1]["content"]
        assert json.loads(out.read_text(encoding="utf-8")) == found["messages"]
        assert found["bytes_after"] <= found["budget_bytes"] < found["bytes_before"]
        kept = [unit for unit in found["units"] if unit["kept"]]
        assert {unit["tier"] for unit in kept} == {"question", "edge", "scored"}


REQUESTS: dict[str, dict[str, Any]] = {
    "completions": {"prompt": f"{TEXT}\n\nQuestion: {QUESTION}"},
    "responses": {
        "instructions": "Be brief.",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": f"{TEXT}\n\n{QUESTION}"}]}
        ],
    },
    "messages": {
        "system": "Be brief.",
        "messages": [{"role": "user", "content": f"{TEXT}\n\n{QUESTION}"}],
    },
}


@pytest.mark.parametrize("kind", REQUESTS)
def test_requests_of_other_endpoints_keep_their_shape(kind: str, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    given = {"model": "m", **REQUESTS[kind]}
    result = run("--budget", "1200", "--json", "-o", str(out), stdin=json.dumps(given))
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["bytes_after"] <= found["budget_bytes"] < found["bytes_before"]
    body = json.loads(out.read_text(encoding="utf-8"))
    assert body == found["messages"]
    assert GOLD in json.dumps(body)
    if kind == "completions":
        assert body.endswith(QUESTION)
    else:
        assert list(body) == list(REQUESTS[kind])
        assert body[next(iter(body))] == "Be brief."


def test_a_request_that_asks_by_itself_takes_no_question() -> None:
    result = run("--question", QUESTION, stdin=json.dumps(REQUESTS["completions"]))
    assert result.exit_code == 2
    assert "--question is for a text or chat messages" in result.output


def test_what_is_left_can_be_printed() -> None:
    args = ("--budget", "1200", "-o", "-")
    result = run(*args, "--question", QUESTION, stdin=TEXT)
    assert result.exit_code == 0, result.output
    kept = json.loads(run("--budget", "1200", "--question", QUESTION, "--json", stdin=TEXT).stdout)
    assert result.stdout == kept["messages"][-1]["content"] + "\n"
    assert "the budget is" in result.stderr
    given = {"model": "m", **REQUESTS["messages"]}
    printed = json.loads(run(*args, stdin=json.dumps(given)).stdout)
    assert printed["system"] == "Be brief."
    both = run(*args, "--json", stdin=TEXT)
    assert both.exit_code == 2
    assert "stdout" in json.loads(both.stdout)["problem"]


def test_a_refusal_says_why_and_exits_1() -> None:
    result = run("--budget", "100", stdin=TEXT)
    assert result.exit_code == 1
    assert "refused: cut_too_deep:" in result.stdout
    found = json.loads(run("--budget", "100", "--json", stdin=TEXT).stdout)
    assert (found["compressed"], found["reason"]) == (False, "cut_too_deep")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["no-such-file"], "no-such-file"),
        (["--profile", "x"], "unknown profile 'x'; there are default, paper"),
        (["--tokenizer", "pyproject.toml"], "is not a tokenizer.json"),
    ],
)
def test_bad_input_exits_2_for_people_and_machines(args: list[str], message: str) -> None:
    result = run(*args, stdin=TEXT)
    assert result.exit_code == 2
    assert message in result.stderr
    result = run(*args, "--json", stdin=TEXT)
    assert (result.exit_code, result.stderr) == (2, "")
    found = json.loads(result.stdout)
    assert (found["ok"], message in found["problem"]) == (False, True)


@pytest.fixture
def engine() -> Iterator[respx.MockRouter]:
    """Answers `nine` when the prompt holds the sentence, else by the seed."""

    def answer(request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        text = body["messages"][-1]["content"]
        said = "It keeps nine." if GOLD in text else f"Guess number {body['seed']}."
        return httpx.Response(
            200,
            json={
                "choices": [{"message": {"content": said}}],
                "usage": {"prompt_tokens": len(text.split())},
            },
        )

    with respx.mock(base_url=URL) as router:
        router.get("/models").respond(json={"data": [{"id": "mine"}]})
        router.post("/chat/completions").mock(side_effect=answer)
        yield router


def test_the_judge_asks_both_prompts_and_reports_agreement(engine: respx.MockRouter) -> None:
    args = ("--budget", "1200", "--question", QUESTION, "--judge", URL, "--samples", "8")
    result = run(*args, "--json", stdin=TEXT, SLUICE_JUDGE_KEY="sk-judge")
    assert result.exit_code == 0, result.output
    verdict = json.loads(result.stdout)["judge"]
    assert (verdict["samples"], verdict["agreement"], verdict["self_agreement"]) == (8, 1.0, 1.0)
    assert verdict["interval_95"] == pytest.approx([0.6756, 1.0], abs=1e-3)
    full, compressed = verdict["prompt_tokens"]
    assert compressed < full
    calls = [c.request for c in engine.calls if c.request.method == "POST"]
    assert len(calls) == 16
    assert {c.headers["authorization"] for c in calls} == {"Bearer sk-judge"}
    assert {json.loads(c.content)["model"] for c in calls} == {"mine"}
    shown = run(*args, stdin=TEXT)
    assert "8 of 8 answers agree" in shown.stdout
    assert "authorization" not in engine.calls.last.request.headers


def test_a_judge_that_fails_is_told_and_exits_1(engine: respx.MockRouter) -> None:
    args = ("--budget", "1200", "--question", QUESTION, "--judge", URL)
    engine.post("/chat/completions").respond(500, text="no luck")
    result = run(*args, stdin=TEXT)
    assert result.exit_code == 1
    assert "answered 500: no luck" in result.stderr
    engine.post("/chat/completions").respond(json={"choices": []})
    assert "gave no chat completion" in run(*args, stdin=TEXT).stderr
    engine.get("/models").respond(json={})
    assert "lists no model" in run(*args, stdin=TEXT).stderr
    engine.get("/models").mock(side_effect=httpx.ConnectError("refused"))
    assert "refused" in run(*args, stdin=TEXT).stderr
