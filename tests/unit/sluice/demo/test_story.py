"""The order of the acts, and what a client makes of answers."""

from collections.abc import Callable

import httpx
import pytest
import respx

from sluice.demo import story
from sluice.demo.client import Answer, Client
from sluice.demo.command import Teller
from sluice.demo.prompts import question
from sluice.demo.stage import Stage

URL = "http://gateway"
CHAT = f"{URL}/v1/chat/completions"


class Notes:
    """A display that only remembers."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def act(self, name: str, caption: str) -> None:
        self.told.append(f"{name}: {caption}")

    def line(self, answer: Answer) -> None:
        self.told.append(answer.what)

    def result(self, name: str, text: str) -> None:
        self.told.append(f"{name} = {text}")


def acts(*names: str, ended: Callable[[], None] = lambda: None) -> dict[str, story.Act]:
    async def play(stage: Stage) -> str:
        ended()
        return f"paced {stage.pace}"

    return {name: story.Act(name, "A caption.", play) for name in names}


def test_a_story_goes_on_until_it_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    notes, teller = Notes(), None
    monkeypatch.setattr(story, "ACTS", acts("one"))
    teller = Teller(lambda: story.tell(URL, notes, ("one",), pace=0.001))
    teller.start()
    while notes.told.count("one: A caption.") < 3:
        assert not teller.over
    teller.end()
    assert teller.over
    assert teller.failure is None


def test_a_story_that_breaks_says_why() -> None:
    async def breaks() -> None:
        raise ValueError("no such act")

    teller = Teller(breaks)
    teller.start()
    while not teller.over:
        pass
    assert str(teller.failure) == "no such act"


async def asked(*, stream: bool = True, compress: bool = True) -> Answer:
    async with Client(URL) as client:
        return await client.ask(
            "spot", "question", question("Hello"), max_tokens=4, stream=stream, compress=compress
        )


STREAM = (
    'data: {"choices": [{"delta": {"content": "Hi"}}]}\n\n'
    'data: {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 1, '
    '"prompt_tokens_details": {"cached_tokens": 8}}}\n\n'
)


@respx.mock
async def test_a_stream_is_whole_with_its_last_line_only() -> None:
    headers = {"x-sluice-pool": "short", "x-sluice-compressed": "9->8", "x-sluice-queue-ms": "7"}
    route = respx.post(CHAT).respond(text=f"{STREAM}data: [DONE]\n\n", headers=headers)
    told = await asked()
    assert told.served
    assert (told.prompt_tokens, told.cached_tokens, told.completion_tokens) == (9, 8, 1)
    assert (told.pool, told.compressed, told.queue_ms) == ("short", "9->8", 7)
    assert told.ttft_s is not None
    sent = route.calls.last.request
    assert sent.headers["authorization"] == "Bearer sk-demo-spot"
    assert sent.headers["x-request-id"] == told.request_id
    respx.post(CHAT).respond(text=STREAM)
    assert (await asked()).failed, "cut off before its end"


@respx.mock
async def test_a_whole_answer_has_no_first_token() -> None:
    route = respx.post(CHAT).respond(json={"usage": {"prompt_tokens": 9}})
    told = await asked(stream=False, compress=False)
    assert (told.served, told.ttft_s, told.prompt_tokens) == (True, None, 9)
    assert route.calls.last.request.headers["x-sluice-compress"] == "off"
    respx.post(CHAT).respond(text="no JSON")
    assert (await asked(stream=False)).failed


@respx.mock
async def test_refusals_tell_their_reason_and_faults_their_kind() -> None:
    headers = {"x-sluice-reason": "concurrency", "retry-after": "3"}
    respx.post(CHAT).respond(429, headers=headers, json={})
    told = await asked()
    assert (told.refused, told.reason, told.retry_after_s) == (True, "concurrency", 3.0)
    respx.post(CHAT).mock(side_effect=httpx.ConnectError("away"))
    told = await asked()
    assert (told.failed, told.status, told.reason) == (True, 0, "ConnectError")
