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
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import httpx
import msgspec
import orjson

from bench.common import texts
from bench.common.fleet import MODEL, Fleet
from bench.common.report import Report, Row, at_least, at_most, bars, equals, judged, scaled
from gateway.records.decision import DecisionRecord
from simulator.mock_server import tokenizer

REQUESTS: Final = scaled(10_000, 200)
BOUNDARY: Final = 8192
LONG_WINDOW: Final = 65_536
SEED: Final = 8192
CONCURRENCY: Final = 32
OBSERVATIONS: Final = 55
"""A kind; a few of them are taken for another kind."""
LIES: Final = 120
"""Requests a lie is told to, all categories together."""
MOCK: Final = ("--speed", "400", "--prefix-cache-tokens", "0")
_NEAR: Final = 0.15
_NEAR_SHARE: Final = 0.31
_LOWEST, _HIGHEST = 50, 30_000
_STREAMS: Final = 0.3
_COMPLETIONS: Final = 0.1
_LONG_PROMPT: Final = 128
_FAULTS: Final = ("usage-zero", "usage-huge", "usage-none")


class AccuracyRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request of a load."""

    id: str
    path: str
    body: bytes
    kind: str
    cap_tokens: int
    stream: bool


class ClientAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """What a client saw. `problem` is None when all was well."""

    problem: str | None
    finish_reason: str | None = None
    usage: dict[str, Any] | None = None


def chat(
    said: Sequence[str] | str,
    *,
    kind: str,
    cap_tokens: int,
    output_tokens: int,
    name: str,
    stream: bool = False,
    usage: bool = False,
) -> AccuracyRequest:
    """A conversation of these messages, the last one the user's; a text is a plain prompt."""
    body: dict[str, Any] = {"model": MODEL, "max_tokens": cap_tokens}
    body["mock_output_tokens"] = output_tokens
    if isinstance(said, str):
        path, body["prompt"] = "/v1/completions", said
    else:
        path, roles = "/v1/chat/completions", ("user", "assistant")
        body["messages"] = [
            {"role": roles[(len(said) - 1 - i) % 2], "content": text} for i, text in enumerate(said)
        ]
    if stream:
        body["stream"] = True
        if usage and path != "/v1/completions":
            body["stream_options"] = {"include_usage": True}
    return AccuracyRequest(
        id=name,
        path=path,
        body=orjson.dumps(body),
        kind=kind,
        cap_tokens=cap_tokens,
        stream=stream,
    )


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
        kind, stream = rng.choice(texts.KINDS), rng.random() < _STREAMS
        # Answers stay short: they cost the mock engines time and decide nothing here.
        output = max(1, min(cap, round(rng.lognormvariate(3.0, 0.8))))
        messages = 0 if rng.random() < _COMPLETIONS else rng.choice((1, 1, 1, 2, 3, 5))
        fixed = _template(messages) if messages else tokenizer.PROMPT_TOKENS
        document = texts.document(kind, max(8, total - cap - fixed), rng)
        yield chat(
            _split(document.pieces, messages) if messages else document.text,
            kind=kind,
            cap_tokens=cap,
            output_tokens=output,
            name=f"mixed-{number}",
            stream=stream,
            usage=rng.random() < 0.5,
        )


def even(per_kind: int, name: str) -> Iterator[AccuracyRequest]:
    """Requests of 500 to 1,500 tokens, the kinds in turn.

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


def _split(pieces: Sequence[str], parts: int) -> list[str]:
    """Pieces joined into at most `parts` texts, in order."""
    size = -(-len(pieces) // parts)
    return ["".join(pieces[at : at + size]) for at in range(0, len(pieces), size)]


def _template(messages: int) -> int:
    return tokenizer.CHAT_REQUEST_TOKENS + tokenizer.CHAT_MESSAGE_TOKENS * messages


# -- the client


def drive(
    url: str, asks: Iterable[AccuracyRequest], count: int, label: str
) -> dict[str, ClientAnswer]:
    """Send all requests, CONCURRENCY at a time, taking them in order; answers by id."""
    with bars() as bar:
        return asyncio.run(_drive(url, iter(asks), bar(label, count)))


async def _drive(
    url: str, asks: Iterator[AccuracyRequest], done: Callable[[], None]
) -> dict[str, ClientAnswer]:
    answers: dict[str, ClientAnswer] = {}
    async with httpx.AsyncClient(base_url=url, timeout=300.0, trust_env=False) as client:

        async def work() -> None:
            for ask in asks:  # one iterator for all workers: each takes the next request
                try:
                    answers[ask.id] = await _ask(client, ask)
                except httpx.HTTPError as error:
                    answers[ask.id] = ClientAnswer(problem=repr(error))
                done()

        await asyncio.gather(*(work() for _ in range(CONCURRENCY)))
    return answers


async def _ask(client: httpx.AsyncClient, ask: AccuracyRequest) -> ClientAnswer:
    headers = {"content-type": "application/json", "x-request-id": ask.id}
    response = await client.post(ask.path, content=ask.body, headers=headers)
    if response.status_code != 200:
        return ClientAnswer(problem=f"{response.status_code} {response.text[:200]}")
    if not ask.stream:
        answer = orjson.loads(response.content)
        finish = answer["choices"][0]["finish_reason"]
        return ClientAnswer(problem=None, finish_reason=finish, usage=answer.get("usage"))
    lines = [line[6:] for line in response.text.splitlines() if line.startswith("data: ")]
    finish, usage = None, None
    for event in (orjson.loads(line) for line in lines if line != "[DONE]"):
        if "error" in event:
            return ClientAnswer(problem=str(event["error"])[:200])
        for choice in event["choices"]:
            finish = choice.get("finish_reason") or finish
        usage = event.get("usage") or usage
    problem = None if lines[-1:] == ["[DONE]"] and finish else "the stream ended unfinished"
    return ClientAnswer(problem=problem, finish_reason=finish, usage=usage)


def read_log(file: Path) -> dict[str, DecisionRecord]:
    """The gateway's own request log, by request id."""
    decode = msgspec.json.Decoder(DecisionRecord).decode
    records = (decode(line) for line in file.read_bytes().splitlines())
    return {record.request_id: record for record in records}


def problems_of(answers: dict[str, ClientAnswer]) -> list[str]:
    """Troubles that clients saw."""
    return [f"{name}: {answer.problem}" for name, answer in answers.items() if answer.problem]


# -- phase 1


class _Case(msgspec.Struct, frozen=True, kw_only=True):
    """A request with the truth about it."""

    ask: AccuracyRequest
    answer: ClientAnswer
    record: DecisionRecord

    @property
    def prompt_tokens(self) -> int:
        """As the engine counted them."""
        return self.record.usage.prompt_tokens or 0

    @property
    def total_tokens(self) -> int:
        """With the client's limit."""
        return self.prompt_tokens + self.ask.cap_tokens

    @property
    def refused(self) -> bool:
        """A short engine answered that it does not fit."""
        return any(a.pool == "short" and a.result == "overflow" for a in self.record.attempts)

    @property
    def kept_out(self) -> bool:
        """Sent long, though it fitted short."""
        return self.record.plan.pool == "long" and self.total_tokens <= BOUNDARY


def run(requests: int = REQUESTS) -> Report:
    """All three phases; `requests` of the first one."""
    asks: dict[str, AccuracyRequest] = {}

    def remembered() -> Iterator[AccuracyRequest]:
        for ask in mixed(requests):
            asks[ask.id] = msgspec.structs.replace(ask, body=b"")
            yield ask

    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "requests.jsonl"
        with Fleet(
            short_window=BOUNDARY,
            long_window=LONG_WINDOW,
            mock=MOCK,
            config={"request_log": {"path": str(log)}},
        ) as fleet:
            answers = drive(fleet.url, remembered(), requests, "mixed requests")
            fleet.wait_until_idle()
            leases = fleet.leases()
        records = read_log(log)
    cases = [
        _Case(ask=ask, answer=answers[name], record=records[name])
        for name, ask in asks.items()
        if name in records
    ]
    near = _share(abs(c.total_tokens / BOUNDARY - 1) <= _NEAR for c in cases)
    problems = problems_of(answers)
    more, learned = _learning_phases()
    rows = [
        Row("requests", len(cases)),
        at_least("share within 15 % of the boundary", near, 0.3),
        Row("share of streams", _share(c.ask.stream for c in cases)),
        *_estimate_rows(cases),
        *_misroute_rows(cases),
        equals("client-visible failures", len(problems), 0),
        equals("requests without a record in the log", len(asks) - len(cases), 0),
        equals("leases at the end", leases, 0),
        *more,
    ]
    detail = {"problems": problems[:20], "by_kind": _by_kind(cases), **learned}
    return Report(name="pool-routing accuracy", rows=rows, detail=detail)


def _estimate_rows(cases: Sequence[_Case]) -> Iterator[Row]:
    right = _share(c.record.estimate.category == c.ask.kind for c in cases)
    yield Row("share recognised as the kind they are", right)
    told = []
    for kind in texts.KINDS:
        own = [c for c in cases if c.ask.kind == kind and c.prompt_tokens >= _LONG_PROMPT]
        if len(own) > 1:
            ratios = [_true_ratio([c.record]) for c in own]
            told.append(f"{kind} {statistics.pstdev(ratios) / statistics.fmean(ratios):.1%}")
    yield Row("std of true bytes/token over its mean, prompts >= 128", ", ".join(told))
    errors = sorted(
        abs((c.record.estimate.input_tokens or 0) / (c.prompt_tokens or 1) - 1)
        for c in cases
        if c.answer.problem is None
    )
    for percent in (50, 99):
        metric = f"estimate error p{percent} (|estimated/true - 1| of prompt tokens)"
        note = "conservative estimates: mean bytes/token less one standard deviation"
        yield Row(metric, errors[min(len(errors) - 1, len(errors) * percent // 100)], note)


def _true_ratio(records: Sequence[DecisionRecord]) -> float:
    """Bytes per token, template aside."""
    size = sum(r.request.text_bytes or 0 for r in records)
    return size / max(1, sum((r.usage.prompt_tokens or 0) - template_tokens(r) for r in records))


def template_tokens(record: DecisionRecord) -> int:
    """What the mock engine's template adds."""
    plain = record.endpoint == "completions"
    return tokenizer.PROMPT_TOKENS if plain else _template(record.request.messages)


def _misroute_rows(cases: Sequence[_Case]) -> Iterator[Row]:
    short = [c for c in cases if c.record.plan.pool == "short"]
    long = len(cases) - len(short)
    refused = [c for c in short if c.refused]
    lost = sum(c.answer.problem is not None for c in refused)
    share, note = len(refused) / max(1, len(short)), f"{len(refused)} of {len(short)}"
    metric = "sent short, refused by the engine, of short-routed"
    yield judged(metric, share, "<= 0.01", share <= 0.01, note, 0.01)
    yield equals("of those not rescued", lost, 0)
    fitted = sum(c.kept_out for c in cases)
    note = f"{fitted} of {len(cases)}; {fitted / max(1, long):.1%} of {long} sent long"
    yield at_most("sent long, fitted short, of all", fitted / len(cases), 0.1, note)
    yield equals("spilled to another pool", sum(c.record.admission.spilled for c in cases), 0)


def _by_kind(cases: Sequence[_Case]) -> dict[str, Any]:
    by_kind = {kind: [c for c in cases if c.ask.kind == kind] for kind in texts.KINDS}
    return {
        kind: {
            "requests": len(own),
            "refused": sum(c.refused for c in own),
            "long_fitted_short": sum(c.kept_out for c in own),
            "recognised_as": Counter(c.record.estimate.category for c in own),
        }
        for kind, own in by_kind.items()
    }


# -- phases 2 and 3


def _learning_phases() -> tuple[list[Row], dict[str, Any]]:
    """Ratios of a fresh gateway, then what lies do to them."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "requests.jsonl"
        config = {"request_log": {"path": str(log)}}
        with Fleet(short=1, long=1, mock=MOCK, config=config) as fleet:
            asks = list(even(OBSERVATIONS, "ratios"))
            answers = drive(fleet.url, asks, len(asks), "ratios")
            learned = _estimator(fleet)["categories"]
            lies, failures = _liars(fleet)
            ignored = _estimator(fleet)["ignored"]
        records = [record for name, record in read_log(log).items() if name in answers]
    rows = []
    for kind in texts.KINDS:
        state = learned[kind]
        own = [r for r in records if r.estimate.category == kind
               and (r.usage.prompt_tokens or 0) >= _LONG_PROMPT]  # fmt: skip
        true = _true_ratio(own)
        off = abs(state["mean"] / true - 1) if own else 1.0
        note = f"learned {state['mean']:.3f}, true {true:.3f}, {int(state['n'])} observations"
        metric = f"ratio of {kind}, off the true one"
        rows.append(judged(metric, off, "<= 0.035", off <= 0.035, note, 0.035))
    failures += len(problems_of(answers))
    rows += [*lies, equals("client-visible failures, ratios and lies", failures, 0)]
    return rows, {"learned": learned, "ignored": ignored}


def _liars(fleet: Fleet) -> tuple[list[Row], int]:
    """Rows, and failures that clients saw."""
    rows, failures = [], 0
    for fault in _FAULTS:
        for engine in fleet.engines:
            engine.fail(fault)
        before = _estimator(fleet)["categories"]
        asks = list(even(LIES // len(texts.KINDS), fault))
        failures += len(problems_of(drive(fleet.url, asks, len(asks), fault)))
        after = _estimator(fleet)["categories"]
        moved = {kind: abs(after[kind]["mean"] / before[kind]["mean"] - 1) for kind in after}
        worst = max(moved, key=lambda kind: moved[kind])
        note = f"{worst}; {len(asks)} requests, all to lying engines"
        rows.append(at_most(f"{fault}: largest move of a ratio", moved[worst], 0.01, note))
    for engine in fleet.engines:
        engine.fail("")
    return rows, failures


def _estimator(fleet: Fleet) -> dict[str, Any]:
    snapshot: dict[str, Any] = fleet.admin("/admin/pools").raise_for_status().json()[0]["estimator"]
    return snapshot


def _share(flags: Iterable[bool]) -> float:
    listed = list(flags)
    return sum(listed) / max(1, len(listed))
