"""Cost of compression on one gateway under load, 11 % of requests in the compression window.

Target: no request fails. Aims: gateway time p99 of uncompressed requests at most 1 ms above a
control, and at most .6 ms on average over all requests. Three gateways get the same requests,
round by round:

- the tested one compresses;
- the control receives prompts compressed beforehand, while an equal worker process of this bench
  compresses the same bodies as often and at the same niceness, and discards the result. Both
  thus spend the CPU time of compression; only the delay of a gateway's requests differs;
- the third receives the same compressed prompts and nobody compresses: the difference is the
  whole cost on a machine without a spare core. It has no aim and is stricter than the control.
"""

import asyncio
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import httpx
import orjson

from bench.common.fleet import MODEL, Fleet
from bench.common.report import Report, Row, at_most, scaled, tracked
from bench.common.texts import document
from compressor import Compressed, compress
from gateway.ports import CompressTask
from gateway.records.record import Record
from gateway.workers.pool import CompressWorkers

ROUNDS = scaled(5)
REQUESTS = scaled(300, 60)
RATE_PER_S = 40.0
BORDERLINE = 0.11
CHAT = "/v1/chat/completions"
OUTPUT_TOKENS = 64
BUDGET_TOKENS = 8192 - OUTPUT_TOKENS
BYTES_PER_TOKEN = 4.4


class Prompts(Record, frozen=True):
    """Bodies: short ones; borderline ones; the latter as the gateway would make them."""

    plain: tuple[bytes, ...]
    band: tuple[bytes, ...]
    shorter: tuple[bytes, ...]


class Side:
    """A gateway, and what is done with its borderline requests."""

    def __init__(self, fleet: Fleet, *, compresses: bool, worker: bool) -> None:
        self.fleet = fleet
        self.compresses = compresses
        """The gateway; else it is sent what was compressed beforehand."""
        self.worker = worker
        """Whether a process of this bench compresses, for nothing."""
        self.rounds: list[list[dict[str, Any]]] = []


def run() -> Report:
    """Interleaved rounds; medians of the differences within rounds."""
    prompts = _prompts()
    enabled = {"compression": {"enabled": True, "when": "any", "only_when_busy": False}}
    with (
        Fleet(short=1, model=enabled) as tested,
        Fleet(short=1) as control,
        Fleet(short=1) as idle,
    ):
        sides = (
            Side(tested, compresses=True, worker=False),
            Side(control, compresses=False, worker=True),
            Side(idle, compresses=False, worker=False),
        )
        for number in tracked(range(ROUNDS + 1), "rounds"):
            for side in sides:
                found = asyncio.run(_round(side, prompts, number))
                if number:  # the first round warms all up
                    side.rounds.append(found)
    return Report(name="compressor load", rows=list(_rows(*sides)))


def _rows(tested: Side, control: Side, idle: Side) -> Iterator[Row]:
    ours = [record for found in tested.rounds for record in found]
    every = [r for side in (tested, control, idle) for one in side.rounds for r in one]
    compressed = sum(r["compressed"] != "none" for r in ours) / len(ours)
    yield Row("compressed, of all requests", compressed)
    yield at_most("failed", sum(r["status"] != 200 for r in every), 0)
    for other, what, aims in (
        (control, "the control", ("aim: 1; ", "aim: .6; ")),
        (idle, "a gateway without any compression", ("", "")),
    ):
        for (figure, of), aim in zip(_FIGURES.items(), aims, strict=True):
            pairs = zip(tested.rounds, other.rounds, strict=True)
            more = sorted(of(one) - of(two) for one, two in pairs)
            note = f"{aim}rounds: " + " ".join(f"{v:.2f}" for v in more)
            yield Row(f"{figure}, ms above {what}", statistics.median(more), note)
    times_ms = sorted(r["compress_ms"] for r in ours if r["compress_ms"] is not None)
    if times_ms:
        note = f"p90 {times_ms[len(times_ms) * 9 // 10]:.2f}, best {times_ms[0]:.2f}"
        metric = "a compressed request waits for its text, ms, median"
        yield Row(metric, statistics.median(times_ms), note)


def _p99_plain(records: Sequence[dict[str, Any]]) -> float:
    times = sorted(r["overhead_ms"] for r in records if not r["borderline"])
    return float(times[int(len(times) * 0.99)])


def _mean_all(records: Sequence[dict[str, Any]]) -> float:
    return statistics.fmean(r["overhead_ms"] for r in records)


_FIGURES: Final[dict[str, Callable[[Sequence[dict[str, Any]]], float]]] = {
    "p99 of uncompressed requests": _p99_plain,
    "mean over all requests": _mean_all,
}


def _prompts() -> Prompts:
    rng = random.Random(7)
    plain = [_body(document("prose", 900, rng).text) for _ in range(40)]
    borderline: list[bytes] = []
    shorter: list[bytes] = []
    while len(borderline) < 12:
        text = document("prose", 9_300, rng).text
        text += "\n\nWhat does this say about reading files?"
        found = compress(
            [{"role": "user", "content": text}], BUDGET_TOKENS, BYTES_PER_TOKEN, when="any"
        )
        if isinstance(found, Compressed):
            borderline.append(_body(text))
            shorter.append(orjson.dumps({**_fields(), "messages": found.body}))
    return Prompts(tuple(plain), tuple(borderline), tuple(shorter))


def _body(text: str) -> bytes:
    return orjson.dumps({**_fields(), "messages": [{"role": "user", "content": text}]})


def _fields() -> dict[str, Any]:
    return {"model": MODEL, "max_tokens": OUTPUT_TOKENS, "mock_output_tokens": 2}


async def _round(side: Side, prompts: Prompts, seed: int) -> list[dict[str, Any]]:
    """Requests at a fixed rate; what the gateway recorded of each."""
    runner = CompressWorkers(1) if side.worker else None
    if runner is not None:
        await runner.start()
    try:
        return await _requests(side, prompts, random.Random(seed), runner)
    finally:
        if runner is not None:
            await runner.close()


async def _requests(
    side: Side, prompts: Prompts, chance: random.Random, runner: CompressWorkers | None
) -> list[dict[str, Any]]:
    limits = httpx.Limits(max_connections=64)
    async with httpx.AsyncClient(timeout=60, trust_env=False, limits=limits) as client:

        async def ask(number: int) -> dict[str, Any]:
            borderline = chance.random() < BORDERLINE
            which = chance.randrange(len(prompts.band) if borderline else len(prompts.plain))
            body = prompts.plain[which]
            await asyncio.sleep(number / RATE_PER_S)
            if borderline:
                body = prompts.band[which]
                if runner is not None:
                    await runner.compress(_task(body))
                if not side.compresses:
                    body = prompts.shorter[which]
            answer = await client.post(
                side.fleet.url + CHAT, content=body, headers={"content-type": "application/json"}
            )
            record = side.fleet.decision(answer.headers["x-request-id"])
            return {
                "borderline": borderline,
                "status": answer.status_code,
                "compressed": record.get("compression", {}).get("compressed", "none"),
                "compress_ms": record["timing"].get("compress_ms"),
                "overhead_ms": record["timing"]["overhead_ms"],
            }

        return list(await asyncio.gather(*(ask(n) for n in range(REQUESTS))))


def _task(body: bytes) -> CompressTask:
    return CompressTask(
        endpoint="chat",
        body=body,
        budget_tokens=BUDGET_TOKENS,
        bytes_per_token=BYTES_PER_TOKEN,
        category="prose",
        when="any",
    )
