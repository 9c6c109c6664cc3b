"""`python -m bench token-pools live`: a flood of spot through a real gateway, in real time.

Experiment 1 of the token-pools paper, scaled: one mock engine of 16 slots that answers 64 tokens
in 1.2 s, not 8.5; 5 s without and 20 s with a second guaranteed tenant, 22 slots' worth of
requests then. Once through a gateway without entitlements, once with token pools enforced, by
turns, three times; the same arrivals each time.

Asked, of requests sent in the last 10 s of the overload: the guaranteed ones' P99 time to the
first token is at least 5 times lower, the engine's queue is empty most of the time, and no
guaranteed request is denied for its priority. How late the mock was says what a time is worth.
"""

import asyncio
import tempfile
from collections import Counter
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from random import Random
from statistics import median
from typing import Any, Final

import msgspec

from bench.common.fleet import MODEL, EngineProcess, Fleet
from bench.common.raw_client import TimedLoad, TimedRequest, chat_body, lag_s, text
from bench.common.report import Report, Row, at_least, equals, quantile, scaled, tracked

RUNS: Final = scaled(3)
SLOTS: Final = 16
CALM_S: Final = 5.0
OVERLOAD_S: Final = 20.0
LAST_S: Final = 10.0
TIMES_LOWER: Final = 5.0
_OUTPUT: Final = 64
_SERVICE_S: Final = _OUTPUT * (0.008 + 0.00065 * SLOTS)
"""The mock's default profile with all slots taken."""
_SLOTS_OF: Final = {"guaranteed-a": 6, "spot-b": 10, "guaranteed-c": 6}
_JOINS: Final = "guaranteed-c"


class LiveOutcome(msgspec.Struct, kw_only=True):
    """One run."""

    ttft_s: float
    """P99 of guaranteed requests sent in the last LAST_S that were let in."""
    counted: int
    waiting: list[int]
    """Samples of the engine's queue in the last LAST_S."""
    lag_s: float
    """P99 of how late the mock's tokens were."""
    denied: Counter[str]
    """Guaranteed requests refused, by reason."""
    failed: int
    """Answers that were neither whole nor 429."""
    spot_refused: float


def run() -> Report:
    """Three runs of each, by turns."""
    found: dict[bool, list[LiveOutcome]] = {False: [], True: []}
    turns = [(number, pools) for number in range(RUNS) for pools in found]
    for number, pools in tracked(turns, "runs"):
        found[pools].append(experiment(number, pools=pools))
    return Report(name="token-pools live", rows=rows_of(found[False], found[True]))


def rows_of(without: list[LiveOutcome], pools: list[LiveOutcome]) -> list[Row]:
    """Middle of the runs."""
    before, after = (median(o.ttft_s for o in runs) for runs in (without, pools))
    rows = []
    for name, runs in (("no admission", without), ("token pools", pools)):
        note = (
            ", ".join(f"{o.ttft_s:.2f}" for o in runs)
            + f" of {sum(o.counted for o in runs)} requests; the mock at most "
            f"{1_000 * max(o.lag_s for o in runs):.0f} ms late"
        )
        metric = f"{name}: guaranteed P99 TTFT at the end of overload, s"
        rows.append(Row(metric, median(o.ttft_s for o in runs), note))
    rows.append(at_least("guaranteed P99 TTFT, times lower", before / after, TIMES_LOWER))
    grown, kept = ([n for o in runs for n in o.waiting] for runs in (without, pools))
    metric = "requests waiting in the engine"
    rows.append(Row(f"no admission: {metric}", float(median(grown)), f"most {max(grown)}"))
    rows.append(equals(f"token pools: {metric}", median(kept), 0, f"most {max(kept)}"))
    denied = sum((o.denied for o in pools), Counter[str]())
    refused = 100 * median(o.spot_refused for o in pools)
    note = f"{len(pools)} runs; six slots' worth at random find six taken one time in four"
    metric = "token pools: guaranteed refused for their own limit"
    return [
        *rows,
        equals("token pools: guaranteed denied on priority", denied["priority"], 0),
        Row(metric, denied["concurrency"], note),
        Row("token pools: spot refused in the overload, %", refused, published=47),
        equals("requests that failed", sum(o.failed for o in (*without, *pools)), 0),
    ]


def experiment(
    number: int, *, pools: bool, calm_s: float = CALM_S, overload_s: float = OVERLOAD_S
) -> LiveOutcome:
    """One run against a gateway of its own."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "requests.jsonl"
        config: dict[str, Any] = {"request_log": {"path": str(log)}}
        if pools:
            config["entitlements"] = [_entitlement(tenant) for tenant in _SLOTS_OF]
        with Fleet(
            short=1,
            long=0,
            short_slots=SLOTS,
            mock=("--prefix-cache-tokens", "0"),
            config=config,
            model={"admission": {"mode": "enforce"}} if pools else None,
        ) as fleet:
            load = TimedLoad([fleet.url])
            waiting: list[tuple[float, int]] = []
            asks = sorted(arrivals(number, calm_s, overload_s), key=lambda ask: ask.at_s)
            asyncio.run(_under_watch(load, asks, fleet.engines[0], waiting, calm_s + overload_s))
            fleet.wait_until_idle(limit_s=60.0)
            late_s = lag_s([fleet.engines[0].metrics()])
        records = [msgspec.json.decode(line) for line in log.read_bytes().splitlines()]
    last_s = calm_s + overload_s - LAST_S
    firm = [s for s in load.seen if s.ask.client.startswith("guaranteed")]
    spot = [s for s in load.seen if s not in firm and s.ask.at_s >= calm_s]
    times = [s.first_s for s in firm if s.ask.at_s >= last_s and s.first_s is not None]
    refused = [r["reason"] for r in records if r.get("reason")
               and (r.get("entitlement") or "").startswith("guaranteed")]  # fmt: skip
    return LiveOutcome(
        ttft_s=quantile(times, 0.99),
        counted=len(times),
        waiting=[n for at_s, n in waiting if at_s >= last_s],
        lag_s=late_s,
        denied=Counter(refused),
        failed=sum(s.status != 429 and s.first_s is None for s in load.seen),
        spot_refused=sum(s.status == 429 for s in spot) / max(1, len(spot)),
    )


async def _under_watch(
    load: TimedLoad,
    asks: list[TimedRequest],
    engine: EngineProcess,
    waiting: list[tuple[float, int]],
    length_s: float,
) -> None:
    """The load, and the engine's queue ten times a second while it lasts."""
    sending = asyncio.create_task(load.open_loop(asks))
    await asyncio.sleep(0)
    while load.now_s < length_s:
        page = await asyncio.to_thread(engine.metrics)
        count = sum(v for k, v in page.items() if k.startswith("vllm:num_requests_waiting{"))
        waiting.append((load.now_s, int(count)))
        await asyncio.sleep(0.1)
    await sending


def _entitlement(tenant: str) -> dict[str, Any]:
    """What an operator writes; guaranteed sells slots, spot has a limit only."""
    firm = tenant.startswith("guaranteed")
    return {
        "name": tenant,
        "tenant": tenant,
        "model": MODEL,
        "service_class": "guaranteed" if firm else "spot",
        "concurrency" if firm else "max_concurrency": _SLOTS_OF[tenant],
        "api_keys": ["sha256:" + sha256(f"sk-{tenant}".encode()).hexdigest()],
    }


def arrivals(number: int, calm_s: float, overload_s: float) -> Iterator[TimedRequest]:
    """Poisson, as many as fill each tenant's slots on average."""
    body = chat_body([("user", text("live", 50))], _OUTPUT)
    for tenant, slots in _SLOTS_OF.items():
        draw = Random(f"live/{tenant}/{number}")
        at_s = calm_s if tenant == _JOINS else 0.0
        while (at_s := at_s + draw.expovariate(slots / _SERVICE_S)) < calm_s + overload_s:
            yield TimedRequest(at_s=at_s, client=tenant, body=body)
