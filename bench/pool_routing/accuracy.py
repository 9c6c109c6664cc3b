"""`python -m bench pool-routing accuracy`: estimates, misroutes and rescues on mixed real text.

A real gateway before real mock engines. Three phases:
1. mixed: requests of five kinds, a third of them near the boundary. Counted are short-routed
requests that engines refused, long-routed ones that fitted short, and results for clients.
2. ratios: a fresh gateway; after 50 observations a kind, learned against true bytes per token.
3. liars: the same gateway; engines report usage 0, 1e9, none.
The gateway gets no hints: the bench knows the lengths, and the engines' usage is the truth.
"""

import asyncio
import random
import statistics
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import httpx
import msgspec
import orjson
from rich.console import Console
from rich.progress import Progress

from bench.common import texts
from bench.common.fleet import MODEL, Fleet
from bench.common.report import Report, Row, at_least, at_most, equals
from bench.common.steps import scaled
from gateway.records.decision import DecisionRecord
from simulator.mock_server import tokenizer

REQUESTS = scaled(10_000, 200)
BOUNDARY = 8192
LONG_WINDOW = 65_536
SEED = 8192
CONCURRENCY = 32
OBSERVATIONS = 55
"""A kind; a few of them are taken for another kind."""
LIES = 120
"""Requests a lie is told to, all categories together."""

_NEAR = 0.15
_NEAR_SHARE = 0.31
_LOWEST, _HIGHEST = 50, 30_000
_STREAMS = 0.3
_COMPLETIONS = 0.1
_FAULTS: Final = ("usage-zero", "usage-huge", "usage-none")
_MOCK: Final = ("--speed", "400", "--prefix-cache-tokens", "0")


class AccuracyRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request of a load."""

    path: str
    body: bytes
    kind: str
    cap_tokens: int
    stream: bool
    id: str


class ClientAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """What a client saw. `problem` is None when all was well."""

    id: str
    problem: str | None
    finish_reason: str | None = None
    usage: dict[str, Any] | None = None


def chat(
    pieces: Sequence[str],
    *,
    kind: str,
    cap_tokens: int,
    output_tokens: int,
    name: str,
    stream: bool = False,
    usage: bool = False,
) -> AccuracyRequest:
    """A conversation whose messages are `pieces`, the last one the user's."""
    roles = ("user", "assistant")
    messages = [
        {"role": roles[(len(pieces) - 1 - i) % 2], "content": piece}
        for i, piece in enumerate(pieces)
    ]
    body = {"model": MODEL, "messages": messages, **_limits(cap_tokens, output_tokens)}
    return AccuracyRequest(
        path="/v1/chat/completions",
        body=orjson.dumps({**body, **_streaming(stream=stream, usage=usage)}),
        kind=kind,
        cap_tokens=cap_tokens,
        stream=stream,
        id=name,
    )


def completion(
    text: str, *, kind: str, cap_tokens: int, output_tokens: int, name: str, stream: bool = False
) -> AccuracyRequest:
    """A plain prompt."""
    body = {"model": MODEL, "prompt": text, **_limits(cap_tokens, output_tokens)}
    return AccuracyRequest(
        path="/v1/completions",
        body=orjson.dumps({**body, **_streaming(stream=stream, usage=False)}),
        kind=kind,
        cap_tokens=cap_tokens,
        stream=stream,
        id=name,
    )


def _limits(cap_tokens: int, output_tokens: int) -> dict[str, int]:
    return {"max_tokens": cap_tokens, "mock_output_tokens": output_tokens}


def _streaming(*, stream: bool, usage: bool) -> dict[str, Any]:
    if not stream:
        return {}
    return {"stream": True, **({"stream_options": {"include_usage": True}} if usage else {})}


def mixed(count: int, seed: int = SEED) -> Iterator[AccuracyRequest]:
    """`count` requests: five kinds, streams, near the boundary and far from it."""
    for number in range(count):
        rng = random.Random(f"{seed}-{number}")
        near = number % 100 < round(100 * _NEAR_SHARE)
        if near:
            total = round(BOUNDARY * rng.uniform(1 - _NEAR, 1 + _NEAR))
        else:
            total = round(_LOWEST * (_HIGHEST / _LOWEST) ** rng.random())
        cap = min(round(16 * 64 ** rng.random()), total // 2)
        yield _mixed_one(rng, rng.choice(texts.KINDS), total - cap, cap, f"mixed-{number}")


def _mixed_one(
    rng: random.Random, kind: texts.Kind, prompt: int, cap: int, name: str
) -> AccuracyRequest:
    stream = rng.random() < _STREAMS
    # Answers stay short: they cost the mock engines time and decide nothing here.
    output = max(1, min(cap, round(rng.lognormvariate(3.0, 0.8))))
    if rng.random() < _COMPLETIONS:
        document = texts.document(kind, max(8, prompt - tokenizer.PROMPT_TOKENS), rng)
        return completion(
            document.text, kind=kind, cap_tokens=cap, output_tokens=output, name=name, stream=stream
        )
    messages = rng.choice((1, 1, 1, 2, 3, 5))
    fixed = tokenizer.CHAT_REQUEST_TOKENS + tokenizer.CHAT_MESSAGE_TOKENS * messages
    document = texts.document(kind, max(8, prompt - fixed), rng)
    return chat(
        _split(document.pieces, messages),
        kind=kind,
        cap_tokens=cap,
        output_tokens=output,
        name=name,
        stream=stream,
        usage=rng.random() < 0.5,
    )


def _split(pieces: Sequence[str], parts: int) -> list[str]:
    """Pieces joined into at most `parts` texts, in order."""
    size = -(-len(pieces) // parts)
    return ["".join(pieces[at : at + size]) for at in range(0, len(pieces), size)]


# -- the client


def drive(
    url: str, asks: Iterable[AccuracyRequest], count: int, label: str, console: Console
) -> dict[str, ClientAnswer]:
    """Send all requests, CONCURRENCY at a time, taking them in order; answers by id."""
    with Progress(console=console, transient=True) as progress:
        bar = progress.add_task(label, total=count)
        return asyncio.run(_drive(url, iter(asks), lambda: progress.advance(bar)))


async def _drive(url: str, asks: Iterator[AccuracyRequest], done: Any) -> dict[str, ClientAnswer]:
    answers: dict[str, ClientAnswer] = {}
    limits = httpx.Limits(max_connections=CONCURRENCY, max_keepalive_connections=CONCURRENCY)
    async with httpx.AsyncClient(
        base_url=url, timeout=300.0, trust_env=False, limits=limits
    ) as client:

        async def work() -> None:
            for ask in asks:  # one iterator for all workers: each takes the next request
                try:
                    answer = await _ask(client, ask)
                except httpx.HTTPError as error:
                    answer = ClientAnswer(id=ask.id, problem=repr(error))
                answers[ask.id] = answer
                done()

        await asyncio.gather(*(work() for _ in range(CONCURRENCY)))
    return answers


async def _ask(client: httpx.AsyncClient, ask: AccuracyRequest) -> ClientAnswer:
    headers = {"content-type": "application/json", "x-request-id": ask.id}
    async with client.stream("POST", ask.path, content=ask.body, headers=headers) as response:
        if response.status_code != 200:
            text = (await response.aread()).decode("utf-8", "replace")
            return ClientAnswer(id=ask.id, problem=f"{response.status_code} {text[:200]}")
        if not ask.stream:
            answer = orjson.loads(await response.aread())
            finish = answer["choices"][0]["finish_reason"]
            return ClientAnswer(
                id=ask.id, problem=None, finish_reason=finish, usage=answer.get("usage")
            )
        return await _read_stream(response, ask)


async def _read_stream(response: httpx.Response, ask: AccuracyRequest) -> ClientAnswer:
    finish: str | None = None
    usage: dict[str, Any] | None = None
    complete = False
    async for line in response.aiter_lines():
        if not line.startswith("data: "):
            continue
        if line == "data: [DONE]":
            complete = True
            continue
        event = orjson.loads(line[6:])
        if "error" in event:
            return ClientAnswer(id=ask.id, problem=str(event["error"])[:200])
        for choice in event["choices"]:
            finish = choice.get("finish_reason") or finish
        usage = event.get("usage") or usage
    problem = None if complete and finish else "the stream ended unfinished"
    return ClientAnswer(id=ask.id, problem=problem, finish_reason=finish, usage=usage)


def read_log(file: Path) -> dict[str, DecisionRecord]:
    """The gateway's own request log, by request id."""
    decode = msgspec.json.Decoder(DecisionRecord).decode
    records = (decode(line) for line in file.read_bytes().splitlines())
    return {record.request_id: record for record in records}


# -- phase 1


class _Case(msgspec.Struct, frozen=True, kw_only=True):
    """A request with the truth about it."""

    ask: AccuracyRequest
    answer: ClientAnswer
    record: DecisionRecord

    @property
    def total_tokens(self) -> int:
        """Prompt as the engine counted it + the client's limit."""
        return (self.record.usage.prompt_tokens or 0) + self.ask.cap_tokens

    @property
    def refused(self) -> bool:
        """A short engine answered that it does not fit."""
        return any(a.pool == "short" and a.result == "overflow" for a in self.record.attempts)


def run(requests: int | None = None) -> Report:
    """All three phases; `requests` of the first one, else 10,000."""
    count = requests or REQUESTS
    console = Console(stderr=True)
    with tempfile.TemporaryDirectory() as folder:
        rows, detail = _mixed_phase(count, Path(folder) / "requests.jsonl", console)
    more_rows, more = _learning_phases(console)
    rows += more_rows
    detail |= more
    return Report(name="gateway-accuracy", rows=rows, detail=detail)


def _mixed_phase(count: int, log: Path, console: Console) -> tuple[list[Row], dict[str, Any]]:
    asks: dict[str, AccuracyRequest] = {}

    def remembered() -> Iterator[AccuracyRequest]:
        for ask in mixed(count):
            asks[ask.id] = msgspec.structs.replace(ask, body=b"")
            yield ask

    with Fleet(
        short=2,
        long=1,
        short_window=BOUNDARY,
        long_window=LONG_WINDOW,
        mock=_MOCK,
        config={"request_log": {"path": str(log)}},
    ) as fleet:
        answers = drive(fleet.url, remembered(), count, "mixed requests", console)
        fleet.wait_until_idle()
        leases = fleet.leases()
    records = read_log(log)
    cases = [
        _Case(ask=ask, answer=answers[name], record=records[name])
        for name, ask in asks.items()
        if name in records
    ]
    failures = sum(answer.problem is not None for answer in answers.values())
    rows = [
        Row("requests", len(cases)),
        at_least("share within 15 % of the boundary", _share(_is_near(c) for c in cases), 0.3),
        Row("share of streams", _share(c.ask.stream for c in cases)),
        *_category_rows(cases),
        *_misroute_rows(cases),
        equals("client-visible failures", failures, 0),
        equals("requests without a record in the log", len(asks) - len(cases), 0),
        *_error_rows(cases),
        equals("leases at the end", leases, 0),
    ]
    problems = [f"{a.id}: {a.problem}" for a in answers.values() if a.problem]
    return rows, {"problems": problems[:20], "by_kind": _by_kind(cases)}


def _is_near(case: _Case) -> bool:
    return abs(case.total_tokens / BOUNDARY - 1) <= _NEAR


def _category_rows(cases: Sequence[_Case]) -> list[Row]:
    right = _share(c.record.estimate.category == c.ask.kind for c in cases)
    found = {
        kind: statistics.pstdev(ratios) / statistics.fmean(ratios)
        for kind in texts.KINDS
        if len(ratios := [_ratio(c) for c in cases if c.ask.kind == kind and _is_long(c)]) > 1
    }
    spread = ", ".join(f"{kind} {value:.1%}" for kind, value in found.items())
    return [
        Row("share recognised as the kind they are", right),
        Row("std of true bytes/token over its mean, prompts >= 128", spread),
    ]


def _is_long(case: _Case) -> bool:
    return (case.record.usage.prompt_tokens or 0) >= 128


def _ratio(case: _Case) -> float:
    """True bytes per token, template aside."""
    fixed = template_tokens(case.record)
    return (case.record.request.text_bytes or 0) / ((case.record.usage.prompt_tokens or 0) - fixed)


def template_tokens(record: DecisionRecord) -> int:
    """What the mock engine's template adds."""
    if record.endpoint == "completions":
        return tokenizer.PROMPT_TOKENS
    return tokenizer.CHAT_REQUEST_TOKENS + tokenizer.CHAT_MESSAGE_TOKENS * record.request.messages


def _misroute_rows(cases: Sequence[_Case]) -> list[Row]:
    short = [c for c in cases if c.record.plan.pool == "short"]
    long = [c for c in cases if c.record.plan.pool == "long"]
    refused = [c for c in short if c.refused]
    lost = [c for c in refused if c.answer.problem is not None]
    fitted = [c for c in long if c.total_tokens <= BOUNDARY]
    return [
        _published(
            0.01,
            at_most(
                "sent short, refused by the engine, of short-routed",
                len(refused) / max(1, len(short)),
                0.01,
                f"{len(refused)} of {len(short)}",
            ),
        ),
        equals("of those not rescued", len(lost), 0),
        at_most(
            "sent long, fitted short, of all",
            len(fitted) / len(cases),
            0.1,
            f"{len(fitted)} of {len(cases)}; {len(fitted) / max(1, len(long)):.1%} of "
            f"{len(long)} sent long",
        ),
        equals("spilled to another pool", sum(c.record.admission.spilled for c in cases), 0),
    ]


def _error_rows(cases: Sequence[_Case]) -> list[Row]:
    errors = sorted(
        abs((c.record.estimate.input_tokens or 0) / (c.record.usage.prompt_tokens or 1) - 1)
        for c in cases
        if c.answer.problem is None
    )
    return [
        Row(
            f"estimate error p{percent} (|estimated/true - 1| of prompt tokens)",
            errors[min(len(errors) - 1, len(errors) * percent // 100)],
            "conservative estimates: mean bytes/token less one standard deviation",
        )
        for percent in (50, 99)
    ]


def _by_kind(cases: Sequence[_Case]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for kind in texts.KINDS:
        own = [c for c in cases if c.ask.kind == kind]
        found[kind] = {
            "requests": len(own),
            "refused": sum(c.refused for c in own),
            "long_fitted_short": sum(
                c.record.plan.pool == "long" and c.total_tokens <= BOUNDARY for c in own
            ),
            "recognised_as": Counter(c.record.estimate.category for c in own),
        }
    return found


# -- phases 2 and 3


def _learning_phases(console: Console) -> tuple[list[Row], dict[str, Any]]:
    """Ratios of a fresh gateway, then what lies do to them."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "requests.jsonl"
        with Fleet(
            short=1, long=1, mock=_MOCK, config={"request_log": {"path": str(log)}}
        ) as fleet:
            asks = list(even(OBSERVATIONS, "ratios"))
            answers = drive(fleet.url, asks, len(asks), "ratios", console)
            learned = _ratios(fleet)
            liar_rows, lies = _liars(fleet, console)
        records = [record for name, record in read_log(log).items() if name in answers]
    failures = sum(answer.problem is not None for answer in answers.values())
    rows = [*_ratio_rows(learned, records), *liar_rows]
    rows.append(equals("client-visible failures, ratios and lies", failures + lies["failures"], 0))
    return rows, {"learned": learned, "ignored": lies["ignored"]}


def even(per_kind: int, name: str) -> Iterator[AccuracyRequest]:
    """Requests of 500 to 1,500 tokens, the kinds in turn, all from the first of 128 on.

    Even lengths: the true ratio weighs tokens, so one long document would be most of it.
    """
    rng = random.Random(f"{SEED}-{name}")
    for number in range(per_kind):
        for kind in texts.KINDS:
            document = texts.document(kind, rng.randint(500, 1500), rng)
            yield chat(
                _split(document.pieces, rng.choice((1, 1, 3))),
                kind=kind,
                cap_tokens=64,
                output_tokens=rng.randint(1, 32),
                name=f"{name}-{kind}-{number}",
                stream=rng.random() < _STREAMS,
                usage=rng.random() < 0.5,
            )


def _ratios(fleet: Fleet) -> dict[str, dict[str, float]]:
    """Each category's learned state."""
    found: dict[str, dict[str, float]] = _estimator(fleet)["categories"]
    return found


def _estimator(fleet: Fleet) -> dict[str, Any]:
    snapshot: dict[str, Any] = fleet.admin("/admin/pools").raise_for_status().json()[0]["estimator"]
    return snapshot


def _ratio_rows(
    learned: dict[str, dict[str, float]], records: Sequence[DecisionRecord]
) -> list[Row]:
    rows = []
    for kind in texts.KINDS:
        state = learned[kind]
        own = [
            r
            for r in records
            if r.estimate.category == kind and (r.usage.prompt_tokens or 0) >= 128
        ]
        size = sum(r.request.text_bytes or 0 for r in own)
        true = size / max(1, sum((r.usage.prompt_tokens or 0) - template_tokens(r) for r in own))
        note = f"learned {state['mean']:.3f}, true {true:.3f}, {int(state['n'])} observations"
        off = abs(state["mean"] / true - 1) if own else 1.0
        rows.append(
            _published(0.035, at_most(f"ratio of {kind}, off the true one", off, 0.035, note))
        )
    return rows


def _published(value: float, row: Row) -> Row:
    """The row with the upper bound that the token-budget paper states."""
    return msgspec.structs.replace(row, published=value)


def _liars(fleet: Fleet, console: Console) -> tuple[list[Row], dict[str, Any]]:
    rows = []
    failures = 0
    for fault in _FAULTS:
        for engine in fleet.engines:
            engine.fail(fault)
        before = _ratios(fleet)
        asks = list(even(LIES // len(texts.KINDS), fault))
        answers = drive(fleet.url, asks, len(asks), fault, console)
        failures += sum(answer.problem is not None for answer in answers.values())
        after = _ratios(fleet)
        moved = {kind: abs(after[kind]["mean"] / before[kind]["mean"] - 1) for kind in after}
        worst = max(moved, key=lambda kind: moved[kind])
        rows.append(
            at_most(
                f"{fault}: largest move of a ratio",
                moved[worst],
                0.01,
                f"{worst}; {len(asks)} requests, all to lying engines",
            )
        )
    for engine in fleet.engines:
        engine.fail("")
    return rows, {"failures": failures, "ignored": _estimator(fleet)["ignored"]}


def _share(flags: Iterable[bool]) -> float:
    listed = list(flags)
    return sum(listed) / max(1, len(listed))
