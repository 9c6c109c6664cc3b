"""`python -m bench pool-routing output --data DIR`: every client asks for 32,768 tokens.

Prompt and answer lengths of the Azure 2023 (conversation, code) and Mooncake conversation
traces; short window 65,536, b_short 8,192. A request is truly short when prompt + answer is
at most 8,192. Two ways:
- in process: every request goes through the shipped policy code, with bytes per token varying as
  in documents of bench.common.texts of about that length; the estimator learns from served ones.
- live: the first requests of each trace as text through a real gateway to mock engines whose
  answers are as long as the trace's.
`output_estimate: cap`, the paper's way, takes the client's cap for the answer's length.
"""

import csv
import random
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

import msgspec
import orjson

from bench.common import texts
from bench.common.fleet import Fleet
from bench.common.report import Report, Row, equals, judged
from bench.common.steps import scaled
from bench.pool_routing.accuracy import (
    MOCK,
    AccuracyRequest,
    ClientAnswer,
    chat,
    drive,
    read_log,
)
from gateway.estimate.estimator import LengthEstimator, OutputMode
from gateway.records.decision import DecisionRecord
from gateway.records.endpoint import CHAT
from gateway.records.estimate import Observation
from gateway.records.request import BodyFacts, Measure
from gateway.routing.routing import PoolShape, Routing, plan_pool
from simulator.mock_server import tokenizer

LIVE_PER_TRACE = scaled(4000, 100)
LIVE_CAP = 200
"""Live requests of each trace under `output_estimate: cap`."""
CAP = 32_768
BOUNDARY = 8192
SHORT_WINDOW = 65_536
LONG_WINDOW = 262_144
WITHIN = 0.03

_FIXED = tokenizer.CHAT_REQUEST_TOKENS + tokenizer.CHAT_MESSAGE_TOKENS
_MEASURED_AT: Final = (300, 1000, 3000, 8000, 24_000)
_MEASURED_DOCUMENTS = 40


class Length(msgspec.Struct, frozen=True):
    """One request of a trace, in tokens."""

    prompt: int
    answer: int

    @property
    def is_short(self) -> bool:
        """Whether it truly belongs in the short pool."""
        return self.prompt + self.answer <= BOUNDARY


class LengthTrace(msgspec.Struct, frozen=True):
    """A trace and the kind of text that its prompts are."""

    name: str
    kind: texts.Kind
    lengths: list[Length]


def read_traces(folder: Path) -> list[LengthTrace]:
    """The three traces; raises FileNotFoundError."""
    azure = [
        LengthTrace(
            f"azure {name}", kind, _read_azure(folder / f"AzureLLMInferenceTrace_{name}.csv")
        )
        for name, kind in _AZURE.items()
    ]
    lines = (folder / "mooncake_conversation_trace.jsonl").read_bytes().splitlines()
    rows = [orjson.loads(line) for line in lines]
    mooncake = [Length(row["input_length"], row["output_length"]) for row in rows]
    return [*azure, LengthTrace("mooncake", "prose", mooncake)]


_AZURE: Final[dict[str, texts.Kind]] = {"conv": "prose", "code": "code"}


def _read_azure(file: Path) -> list[Length]:
    with file.open(encoding="utf-8", newline="") as lines:
        return [
            Length(int(row["ContextTokens"]), int(row["GeneratedTokens"]))
            for row in csv.DictReader(lines)
        ]


def run(data: Path | None = None) -> Report:
    """Both ways and both estimates; without the traces nothing is measured."""
    name = "pool-routing output"
    if data is None:
        needs = "give --data: a folder with the Azure 2023 and Mooncake conversation traces"
        row = Row("short share on real lengths", "not measured", needs)
        return Report(name=name, rows=[row])
    traces = read_traces(data)
    rows = [row for trace in traces for row in _in_process_rows(trace)]
    live, detail = _live_rows(traces)
    return Report(name=name, rows=rows + live, detail=detail)


def _within(metric: str, routed: float, true: float, note: str) -> Row:
    said = f"{100 * (routed - true):+.2f} points; {note}"
    holds = abs(routed - true) <= WITHIN
    return judged(metric, routed, f"true {true:.4f} +- {WITHIN:g}", holds, said)


def _cap_row(metric: str, share: float) -> Row:
    return judged(metric, share, "= 0", share == 0, "`output_estimate: cap`, the paper's way", 0.0)


# -- in process


class _Tally(msgspec.Struct):
    """Counts over one trace."""

    requests: int = 0
    short: int = 0
    truly_short: int = 0
    would_refuse: int = 0
    """The pool's window cannot hold prompt + cap."""
    by_answer_estimate: int = 0
    """Short, with the true prompt and the estimated answer."""
    by_prompt_estimate: int = 0
    """Short, with the estimated prompt and the true answer."""


def _in_process_rows(trace: LengthTrace) -> list[Row]:
    found = simulate(trace)
    cap = simulate(trace, output_mode="cap")
    n = found.requests
    true = found.truly_short / n
    causes = (
        f"estimated answer alone {100 * (found.by_answer_estimate / n - true):+.2f}, "
        f"estimated prompt alone {100 * (found.by_prompt_estimate / n - true):+.2f}"
    )
    where = f"{trace.name}, in process"
    return [
        _within(f"{where}: short share of {n}", found.short / n, true, causes),
        equals(f"{where}: sent where prompt + cap does not fit", found.would_refuse, 0),
        _cap_row(f"{where}, cap: short share", cap.short / n),
    ]


def simulate(trace: LengthTrace, output_mode: OutputMode = "predicted") -> _Tally:
    """Every request of a trace, in order, through estimate and plan; each is learned from."""
    routing = Routing(
        pools=(
            PoolShape(name="short", window_tokens=SHORT_WINDOW, boundary_tokens=BOUNDARY),
            PoolShape(name="long", window_tokens=LONG_WINDOW, boundary_tokens=None),
        )
    )
    estimator = LengthEstimator(output_mode=output_mode)
    rng = random.Random(f"{trace.name}")
    tally = _Tally()
    for length in trace.lengths:
        measure = _measure(trace.kind, length.prompt, rng)
        facts = BodyFacts(model="m", measure=measure, cap_tokens=CAP)
        estimate = estimator.estimate(CHAT, facts, trace.name)
        plan = plan_pool(routing, estimate)
        tally.requests += 1
        tally.short += plan.pool == 0
        tally.truly_short += length.is_short
        window = routing.pools[plan.pool].window_tokens
        tally.would_refuse += length.prompt + CAP > window
        tally.by_answer_estimate += length.prompt + estimate.output_tokens <= BOUNDARY
        tally.by_prompt_estimate += estimate.input_tokens + length.answer <= BOUNDARY
        estimator.learn(
            Observation(
                endpoint=CHAT.name,
                tenant=trace.name,
                measure=measure,
                prompt_tokens=length.prompt,
                completion_tokens=length.answer,
                sequences=1,
                output_censored=False,
            )
        )
    return tally


def _measure(kind: texts.Kind, prompt_tokens: int, rng: random.Random) -> Measure:
    """The measure of a conversation of so many tokens, as a document of that length has it."""
    at = min(_MEASURED_AT, key=lambda size: abs(size - prompt_tokens))
    size = round(max(0, prompt_tokens - _FIXED) * rng.choice(_measured_ratios(kind, at)))
    return Measure(text_bytes=size, longest_text_bytes=size, messages=1, category=kind)


@cache
def _measured_ratios(kind: texts.Kind, tokens: int) -> tuple[float, ...]:
    """Bytes per token of documents of about `tokens` tokens."""
    rng = random.Random(tokens)
    found = (texts.document(kind, tokens, rng).text for _ in range(_MEASURED_DOCUMENTS))
    return tuple(len(text.encode()) / tokenizer.count(text) for text in found)


# -- live


class _Served(msgspec.Struct, frozen=True):
    """A live request with what became of it."""

    length: Length
    answer: ClientAnswer
    record: DecisionRecord

    @property
    def is_short(self) -> bool:
        """By the engine's own count of the prompt."""
        return (self.record.usage.prompt_tokens or 0) + self.length.answer <= BOUNDARY


def _live_rows(traces: Sequence[LengthTrace]) -> tuple[list[Row], dict[str, Any]]:
    rows = []
    served, leases = _serve(traces, LIVE_PER_TRACE, {}, "live")
    for trace in traces:
        own = served[trace.name]
        short = sum(s.record.plan.pool == "short" for s in own) / len(own)
        true = sum(s.is_short for s in own) / len(own)
        note = f"streams {sum(s.record.stream for s in own)}"
        rows.append(_within(f"{trace.name}, live: short share of {len(own)}", short, true, note))
    every = [s for own in served.values() for s in own]
    problems = [s.answer.problem for s in every if s.answer.problem]
    rows += [
        equals("live: answers cut below the client's limit", sum(map(_is_cut, every)), 0),
        equals("live: refused by an engine", sum(s.record.rescued for s in every), 0),
        equals("live: client-visible failures", len(problems), 0),
        equals("live: leases at the end", leases, 0),
    ]
    capped, _ = _serve(traces, LIVE_CAP, {"output_estimate": "cap"}, "live, cap")
    of_cap = [s for own in capped.values() for s in own]
    share = sum(s.record.plan.pool == "short" for s in of_cap) / len(of_cap)
    rows.append(_cap_row(f"live, cap: short share of {len(of_cap)}", share))
    return rows, {"problems": problems[:20]}


def _is_cut(served: _Served) -> bool:
    """Whether the answer ended before its natural end: all of those are below the cap."""
    usage = served.answer.usage
    shorter = usage is None or usage["completion_tokens"] != served.length.answer
    return served.answer.finish_reason != "stop" or shorter


def _serve(
    traces: Sequence[LengthTrace], each: int, model: dict[str, Any], label: str
) -> tuple[dict[str, list[_Served]], int]:
    """The first `each` requests of every trace, the traces in turn; and leases at the end."""
    lengths = {
        f"{trace.name.replace(' ', '-')}-{i}": (trace, length)
        for trace in traces
        for i, length in enumerate(trace.lengths[:each])
    }
    names = sorted(lengths, key=lambda name: int(name.rpartition("-")[2]))
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "requests.jsonl"
        with Fleet(
            short_window=SHORT_WINDOW,
            long_window=LONG_WINDOW,
            mock=MOCK,
            model={"boundary": {"b_short": BOUNDARY}, **model},
            config={"request_log": {"path": str(log)}},
        ) as fleet:
            asks = (_ask(name, *lengths[name]) for name in names)
            answers = drive(fleet.url, asks, len(names), label)
            fleet.wait_until_idle()
            leases = fleet.leases()
        records = read_log(log)
    served: dict[str, list[_Served]] = {trace.name: [] for trace in traces}
    for name, (trace, length) in lengths.items():
        if name not in records:
            raise RuntimeError(f"{name} is not in the log: {answers[name].problem}")
        served[trace.name].append(_Served(length, answers[name], records[name]))
    return served, leases


def _ask(name: str, trace: LengthTrace, length: Length) -> AccuracyRequest:
    rng = random.Random(name)
    document = texts.document(trace.kind, max(8, length.prompt - _FIXED), rng)
    return chat(
        [document.text],
        kind=trace.kind,
        cap_tokens=CAP,
        output_tokens=length.answer,
        name=name,
        stream=rng.random() < 0.3,
        usage=True,
    )
