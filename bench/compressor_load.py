"""What compressing costs the requests that are not compressed, on one gateway under load.

Asked, with 11 % of the requests in the band: gateway time p99 of uncompressed requests at most
1 ms above a control, and at most .6 ms on average over all requests. The control gets the same
requests, the borderline ones compressed beforehand by the same code, so that both gateways' engines
see the same prompts; it compresses nothing, so that the work of the compressing processes,
which share the machine's cores, counts against the gateway under test.
"""

import asyncio
import random
import statistics
from typing import Any

import httpx
import orjson
from rich.console import Console
from rich.progress import Progress

from bench.fleet import MODEL, Fleet
from bench.report import Report, Row, at_most
from bench.texts import document
from compressor import Compressed, compress

ROUNDS = 5
REQUESTS = 300
RATE_PER_S = 40.0
BORDERLINE = 0.11
CHAT = "/v1/chat/completions"


def run() -> Report:
    """Interleaved rounds; medians of the differences within rounds."""
    plain, band, shorter = _bodies()
    enabled = {"compression": {"enabled": True}}
    differences: dict[str, list[float]] = {"p99": [], "mean": []}
    compressed, failed = 0, 0
    with (
        Fleet(short=1, long=1, model=enabled) as tested,
        Fleet(short=1, long=1) as control,
        Progress(console=Console(stderr=True), transient=True) as progress,
    ):
        task = progress.add_task("rounds", total=ROUNDS + 1)
        for number in range(ROUNDS + 1):
            ours = asyncio.run(_round(tested, plain, band, number))
            theirs = asyncio.run(_round(control, plain, shorter, number))
            progress.advance(task)
            if not number:  # the first round warms both up
                continue
            compressed += sum(r["compressed"] != "none" for r in ours)
            failed += sum(r["status"] != 200 for r in (*ours, *theirs))
            for name, figure in (("p99", _p99_plain), ("mean", _mean_all)):
                differences[name].append(figure(ours) - figure(theirs))
    rows = [
        Row(metric="compressed, of all requests", measured=compressed / (ROUNDS * REQUESTS)),
        at_most("failed", failed, 0),
        at_most(
            "p99 of uncompressed requests, ms above the control",
            statistics.median(differences["p99"]),
            1.0,
            _spread(differences["p99"]),
        ),
        at_most(
            "mean over all requests, ms above the control",
            statistics.median(differences["mean"]),
            0.6,
            _spread(differences["mean"]),
        ),
    ]
    return Report(name="compressor-load", rows=rows)


def _bodies() -> tuple[list[bytes], list[bytes], list[bytes]]:
    """Short prompts; borderline ones; the latter as the gateway would make them."""
    rng = random.Random(7)
    plain = [_body(document("prose", 900, rng).text) for _ in range(40)]
    band: list[bytes] = []
    shorter: list[bytes] = []
    while len(band) < 12:
        text = document("prose", 9_300, rng).text
        text += "\n\nWhat does this say about reading files?"
        found = compress([{"role": "user", "content": text}], 8192 - 64, 4.4)
        if isinstance(found, Compressed):
            band.append(_body(text))
            shorter.append(orjson.dumps({**_fields(), "messages": found.body}))
    return plain, band, shorter


def _body(text: str) -> bytes:
    return orjson.dumps({**_fields(), "messages": [{"role": "user", "content": text}]})


def _fields() -> dict[str, Any]:
    return {"model": MODEL, "max_tokens": 64, "mock_output_tokens": 2}


async def _round(
    fleet: Fleet, plain: list[bytes], band: list[bytes], seed: int
) -> list[dict[str, Any]]:
    """Requests at a fixed rate; what the gateway recorded of each."""
    chance = random.Random(seed)
    limits = httpx.Limits(max_connections=64)
    async with httpx.AsyncClient(timeout=60, trust_env=False, limits=limits) as client:

        async def ask(number: int) -> dict[str, Any]:
            borderline = chance.random() < BORDERLINE
            body = chance.choice(band if borderline else plain)
            await asyncio.sleep(number / RATE_PER_S)
            answer = await client.post(
                fleet.url + CHAT, content=body, headers={"content-type": "application/json"}
            )
            record = fleet.decision(answer.headers["x-request-id"])
            return {
                "borderline": borderline,
                "status": answer.status_code,
                "compressed": record.get("compressed", "none"),
                "overhead_ms": record["overhead_ms"],
            }

        return list(await asyncio.gather(*(ask(n) for n in range(REQUESTS))))


def _p99_plain(records: list[dict[str, Any]]) -> float:
    times = sorted(r["overhead_ms"] for r in records if not r["borderline"])
    return float(times[int(len(times) * 0.99)])


def _mean_all(records: list[dict[str, Any]]) -> float:
    return statistics.fmean(r["overhead_ms"] for r in records)


def _spread(values: list[float]) -> str:
    return "rounds: " + " ".join(f"{v:.2f}" for v in sorted(values))
