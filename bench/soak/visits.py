"""Clients of all sorts, beside the bulk: endpoints, lengths, conversations, leavers, mistakes.

Every visit ends in one word: `ok`, `left`, `broken` (a stream that ended in an error event),
`http NNN`, or `lost` (the connection broke without an answer). Clients that left before sending
the whole request are not counted: the gateway saw no request.
"""

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from bench.common.raw_client import RawAnswer, RawClient
from bench.common.texts import document
from bench.common.tools import MARK, MODEL, Figures, HttpLoad
from bench.soak.gateway import MOCKED, TIGHT, SoakGateway, key_of

CHAT, COMPLETIONS, RESPONSES, MESSAGES = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
)
BURST: Final = 10
"""Requests that come at once for four slots."""
TURNS: Final = 8
BORDERLINE_TOKENS: Final = 9_300
"""A seventh more than the short pool's window."""
CLIENT_LIMIT_S: Final = 60.0
KEEP_S: Final = 2.0
"""A connection that was idle for longer is not used again: the gateway may be closing it."""
_encode: Final = msgspec.json.Encoder().encode


class Visit(msgspec.Struct, frozen=True, kw_only=True):
    """One request, and how its client behaves."""

    kind: str
    path: str
    body: bytes
    key: str
    stream: bool = False
    leaves_s: float | None = None
    """It leaves so long after it asked."""


class Visitors:
    """Makes visits and knows how each ended; holds as many connections as visits at once."""

    def __init__(self, url: str, seed: int = 11) -> None:
        self._url = url
        self._rng = random.Random(seed)
        self._idle: dict[str, list[tuple[float, RawClient]]] = {}
        """By key: since when, and which."""
        self._talks: list[list[dict[str, str]]] = [[] for _ in range(12)]
        rng = random.Random(seed)
        self._texts = [
            document(kind, tokens, rng).text
            for kind in ("prose", "code", "json", "cjk", "other-script")
            for tokens in (30, 200, 800, 2500)
        ]
        self._borderline = [document("prose", BORDERLINE_TOKENS, rng).text for _ in range(6)]
        self.ended: Counter[tuple[str, str]] = Counter()
        """(kind, how) -> visits."""
        self.strange: list[str] = []
        """The first few ends that nobody caused."""
        self.running = 0

    @property
    def sent(self) -> int:
        """Visits that ended."""
        return self.ended.total()

    def choose(self) -> list[Visit]:
        """What comes next: mostly one, sometimes a burst."""
        draw = self._rng.random()
        for share, make in _KINDS:
            if draw < share:
                return make(self)
            draw -= share
        return [self.chat()]

    async def make(self, visit: Visit) -> None:
        """Ask, and enter how it ended. Raises nothing but cancellation."""
        self.running += 1
        client = self._client(visit.key)
        how = "lost"
        try:
            limit_s = CLIENT_LIMIT_S if visit.leaves_s is None else visit.leaves_s
            async with asyncio.timeout(limit_s):
                how = told(visit, await client.post(visit.path, visit.body))
        except TimeoutError:
            how = "lost" if visit.leaves_s is None else "left"
        except (OSError, EOFError):
            pass
        finally:
            self.running -= 1
            self._idle[visit.key].append((time.monotonic(), client))
            if how != "left" or client.asked:
                self.ended[visit.kind, how] += 1
            if how == "lost" and len(self.strange) < 10:
                self.strange.append(f"{visit.kind} {visit.path}: {how}")

    def close(self) -> None:
        """Leave the gateway's connections."""
        for clients in self._idle.values():
            for _, client in clients:
                client.close()

    # -- kinds

    def chat(self) -> Visit:
        """One question, whole or streamed."""
        stream = self._rng.random() < 0.6
        return self._ask("chat", CHAT, {"messages": [_user(self._text())]}, stream=stream)

    def conversation(self) -> Visit:
        """The next turn of a conversation; the longest one begins anew."""
        talk = self._rng.choice(self._talks)
        if len(talk) >= 2 * TURNS:
            talk.clear()
        talk.append(_user(self._text()))
        visit = self._ask("conversation", CHAT, {"messages": talk}, stream=True)
        talk.append({"role": "assistant", "content": "Noted."})
        return visit

    def other_endpoint(self) -> Visit:
        """Completions, responses, messages."""
        text, stream = self._text(), self._rng.random() < 0.5
        path = self._rng.choice((COMPLETIONS, RESPONSES, MESSAGES))
        bodies: dict[str, dict[str, Any]] = {
            COMPLETIONS: {"prompt": text},
            RESPONSES: {"input": text},
            MESSAGES: {"messages": [_user(text)]},
        }
        said = bodies[path]
        return self._ask(path.rpartition("/")[2], path, said, stream=stream)

    def borderline(self) -> Visit:
        """A prompt a little longer than the short pool's window: compressed, mostly."""
        text = f"{self._rng.choice(self._borderline)}\n\nWhat is said here of {self._word()}?"
        return self._ask("borderline", CHAT, {"messages": [_user(text)]}, stream=False)

    def leaver(self) -> Visit:
        """Leaves while the answer streams, or while it is waited for."""
        stream = self._rng.random() < 0.7
        visit = self._ask("leaver", CHAT, {"messages": [_user(self._text())]}, stream, 600)
        return msgspec.structs.replace(visit, leaves_s=self._rng.uniform(0.02, 0.4))

    def burst(self) -> list[Visit]:
        """More than there are slots for, at once; some leave while they wait."""
        visits = []
        for number in range(BURST):
            body = {"messages": [_user(self._text(short=True))]}
            visit = self._ask("burst", CHAT, body, False, 60, TIGHT, "queued")
            if number % 3 == 2:
                wait_s = self._rng.uniform(0.02, 0.08)
                visit = msgspec.structs.replace(visit, kind="impatient", leaves_s=wait_s)
            visits.append(visit)
        return visits

    def over_concurrency(self) -> list[Visit]:
        """Four at once of an entitlement that may run two."""
        return [
            self._ask("few", CHAT, {"messages": [_user(self._text(short=True))]}, True, 40,
                      MOCKED, "few")
            for _ in range(4)
        ]  # fmt: skip

    def over_rate(self) -> Visit:
        """Of an entitlement that pays for less than it asks."""
        text = self._texts[2]
        return self._ask("metered", CHAT, {"messages": [_user(text)]}, False, 8, TIGHT, "metered")

    def mistake(self) -> Visit:
        """What is refused whoever asks: 400, 401, 404."""
        visit = self.chat()
        wrong = self._rng.randrange(4)
        body, key = visit.body, visit.key
        if wrong == 0:
            body = body[:-5]
        elif wrong == 1:
            key = "sk-nobody"
        elif wrong == 2:
            body = body.replace(MOCKED.encode(), b"no-such-model")
        else:
            body = _encode({"model": MOCKED, "messages": "no list"})
        return msgspec.structs.replace(visit, kind="mistake", body=body, key=key)

    # -- inside

    def _client(self, key: str) -> RawClient:
        clients = self._idle.setdefault(key, [])
        if not clients:
            return RawClient(self._url, key)
        since_s, client = clients.pop()
        if time.monotonic() - since_s > KEEP_S:
            client.close()
        return client

    def _ask(
        self, kind: str, path: str, said: dict[str, Any], stream: bool,
        most_tokens: int = 40, model: str = MOCKED, entitlement: str = "visitor",
    ) -> Visit:  # fmt: skip
        tokens = self._rng.randint(1 + most_tokens // 2, most_tokens)
        limit = "max_output_tokens" if path == RESPONSES else "max_tokens"
        body = {"model": model, **said, limit: tokens, "mock_output_tokens": tokens}
        if stream:
            body["stream"] = True
        key = key_of(entitlement)
        return Visit(kind=kind, path=path, body=_encode(body), key=key, stream=stream)

    def _text(self, *, short: bool = False) -> str:
        text = self._rng.choice(self._texts[::4] if short else self._texts)
        return f"{self._word()}: {text}"

    def _word(self) -> str:
        return f"case {self._rng.randrange(1_000_000)}"


_KINDS: Final[Sequence[tuple[float, Callable[[Visitors], list[Visit]]]]] = (
    (0.25, lambda v: [v.conversation()]),
    (0.20, lambda v: [v.other_endpoint()]),
    (0.015, lambda v: [v.borderline()]),
    (0.12, lambda v: [v.leaver()]),
    (0.015, lambda v: v.burst()),
    (0.02, lambda v: v.over_concurrency()),
    (0.05, lambda v: [v.over_rate()]),
    (0.06, lambda v: [v.mistake()]),
)
"""Shares of what comes; the rest are single questions."""


def told(visit: Visit, answer: RawAnswer) -> str:
    """How a visit ended that was answered."""
    if answer.status != 200:
        return f"http {answer.status}"
    if not visit.stream:
        return "ok"
    if b"event: error" in answer.body or b'data: {"error"' in answer.body:
        return "broken"
    ends = {RESPONSES: b"response.completed", MESSAGES: b"message_stop"}
    return "ok" if ends.get(visit.path, b"[DONE]") in answer.body[-8192:] else "broken"


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


# -- fill the gateway's bounded structures before the soak measures memory


BULK_REQUESTS: Final = 25_000
BULK_TEXT_BYTES: Final = 24_000
"""For the short pool, as all of the bulk is."""
BULK_S: Final = 3.0
"""Of each part: a load generator numbers its prompts from 0, so each part has other texts."""
MAX_PARTS: Final = 100
CONVERSATIONS: Final = 22_000
TEXT_BYTES: Final = 300
"""Enough for a prefix, and so for a conversation."""
LONG_PROMPTS: Final = 400
LONG_TEXT_BYTES: Final = 80_000
"""For the long pool, and far beyond what is compressed."""
BATCH: Final = 64
_SENTENCE: Final = "Of what was said here before, nothing need be remembered for long. "


async def fill(gateway: SoakGateway, tool: Path, folder: Path, visitors: Visitors) -> list[Figures]:
    """Reach every bound; what the bulk's load generator found.

    At the soak's own rate that takes minutes for the prefix index of the bulk's model, and longer
    than the soak for what only visitors fill: 20,000 conversations, 10,000 decisions, 10,000
    responses. Growth after it is a leak, or a fragmented heap.
    """
    found: list[Figures] = []
    while sum(part["requests"] for part in found) < BULK_REQUESTS and len(found) < MAX_PARTS:
        load = HttpLoad(tool, gateway.port, bulk_body(folder, len(found)))
        found.append(await asyncio.to_thread(load.run, BATCH, BULK_S))
    due = visits()
    await asyncio.gather(*(_make(visitors, due) for _ in range(BATCH)))
    return found


def bulk_body(folder: Path, part: int) -> Path:
    """A body whose prompts have nothing in common, neither among them nor with other parts'."""
    text = f"{part} {MARK} {_text(BULK_TEXT_BYTES)}"
    file = folder / "fill.json"
    messages = [{"role": "user", "content": text}]
    file.write_text(json.dumps({"model": MODEL, "messages": messages, "max_tokens": 1}))
    return file


def visits() -> Iterator[Visit]:
    """One after the other, each with another beginning."""
    for number in range(CONVERSATIONS):
        yield _visit(number, TEXT_BYTES, RESPONSES if number % 2 else CHAT)
    for number in range(LONG_PROMPTS):
        yield _visit(CONVERSATIONS + number, LONG_TEXT_BYTES, CHAT)


def _visit(number: int, text_bytes: int, path: str) -> Visit:
    listed = [{"role": "user", "content": f"{number:08d} {_text(text_bytes)}"}]
    body: dict[str, Any] = {"model": MOCKED, "mock_output_tokens": 1}
    if path == RESPONSES:
        body |= {"input": listed, "max_output_tokens": 1}
    else:
        body |= {"messages": listed, "max_tokens": 1}
    return Visit(kind="filler", path=path, body=_encode(body), key=key_of("visitor"))


def _text(size: int) -> str:
    return (_SENTENCE * (size // len(_SENTENCE) + 1))[:size]


async def _make(visitors: Visitors, due: Iterator[Visit]) -> None:
    for visit in due:
        await visitors.make(visit)
