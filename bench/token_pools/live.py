"""`python -m bench token-pools-live`: a flood of spot through a real gateway, in real time.

Experiment 1 of the token-pools paper, scaled: one mock engine of 16 slots that answers 64 tokens
in 1.2 s, not 8.5; 5 s without and 20 s with a second guaranteed tenant, 22 slots' worth of
requests then. Once through a gateway without entitlements, once with token pools enforced, by
turns, three times; the same arrivals each time.

Asked, of requests sent in the last 10 s of the overload: the guaranteed ones' P99 time to the
first token is at least 5 times lower, the engine's queue is empty most of the time, and no
guaranteed request is denied for its priority. How late the mock was says what a time is worth.
"""

import asyncio
import json
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from random import Random
from statistics import median
from typing import Any, Final

import httpx
import msgspec
from rich.console import Console
from rich.progress import Progress

from bench.common.fleet import MODEL, Fleet
from bench.common.report import Report, Row, at_least, equals
from bench.token_pools.records import quantile

CHAT: Final = "/v1/chat/completions"
RUNS: Final = 3
SLOTS: Final = 16
CALM_S: Final = 5.0
OVERLOAD_S: Final = 20.0
LAST_S: Final = 10.0
TIMES_LOWER: Final = 5.0
_OUTPUT: Final = 64
_TEXT: Final = "The river rose in the night and by morning the lower road was gone. " * 3
_SERVICE_S: Final = _OUTPUT * (0.008 + 0.00065 * SLOTS)
"""The mock's default profile with all slots taken."""
_SLOTS_OF: Final = {"guaranteed-a": 6, "spot-b": 10, "guaranteed-c": 6}
_JOINS: Final = "guaranteed-c"


class LiveRequest(msgspec.Struct, kw_only=True):
    """One request. Seconds since the load began; `first_s` None without a token."""

    tenant: str
    at_s: float
    status: int = 0
    first_s: float | None = None


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
    found: dict[str, list[LiveOutcome]] = {"no admission": [], "token pools": []}
    console = Console(stderr=True)
    with Progress(console=console, transient=True) as progress:
        bar = progress.add_task("runs", total=RUNS * len(found))
        for number in range(RUNS):
            for system, outcomes in found.items():
                outcomes.append(experiment(number, pools=system == "token pools"))
                progress.advance(bar)
    return Report(
        name="token-pools-live", rows=rows_of(found["no admission"], found["token pools"])
    )


def rows_of(without: list[LiveOutcome], pools: list[LiveOutcome]) -> list[Row]:
    """Middle of the runs."""
    before, after = (median(o.ttft_s for o in runs) for runs in (without, pools))
    waiting = [n for o in pools for n in o.waiting]
    empty = "token pools: requests waiting in the engine"
    denied = sum((o.denied for o in pools), Counter[str]())
    rows = [
        _seconds("no admission: guaranteed P99 TTFT at the end of overload, s", without),
        _seconds("token pools: guaranteed P99 TTFT at the end of overload, s", pools),
        at_least("guaranteed P99 TTFT, times lower", before / after, TIMES_LOWER),
        Row(
            "no admission: requests waiting in the engine",
            float(median(n for o in without for n in o.waiting)),
            f"most {max(n for o in without for n in o.waiting)}",
        ),
        equals(empty, median(waiting), 0, f"most {max(waiting)}"),
        equals("token pools: guaranteed denied on priority", denied["priority"], 0),
        Row(
            "token pools: guaranteed refused for their own limit",
            denied["concurrency"],
            f"{len(pools)} runs; six slots' worth at random find six taken one time in four",
        ),
        Row(
            "token pools: spot refused in the overload, %",
            100 * median(o.spot_refused for o in pools),
            published=47,
        ),
    ]
    failed = sum(o.failed for o in (*without, *pools))
    return [*rows, equals("requests that failed, all runs", failed, 0)]


def _seconds(metric: str, runs: list[LiveOutcome]) -> Row:
    return Row(
        metric,
        median(o.ttft_s for o in runs),
        ", ".join(f"{o.ttft_s:.2f}" for o in runs)
        + f" of {sum(o.counted for o in runs)} requests; the mock at most "
        f"{1_000 * max(o.lag_s for o in runs):.0f} ms late",
    )


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
            load = ScheduledLoad(
                fleet, list(arrivals(number, calm_s, overload_s)), calm_s + overload_s
            )
            asyncio.run(load.run())
            fleet.wait_until_idle(limit_s=60.0)
            found = fleet.engines[0].metrics()
            lag_s = max(v for k, v in found.items() if k.startswith("mock_lag_p99_seconds"))
        records = [msgspec.json.decode(line) for line in log.read_bytes().splitlines()]
    return _outcome(load, records, lag_s, calm_s)


def _entitlement(tenant: str) -> dict[str, Any]:
    """What an operator writes; guaranteed sells slots, spot has a limit only."""
    firm = tenant.startswith("guaranteed")
    return {
        "name": tenant,
        "tenant": tenant,
        "model": MODEL,
        "service_class": "guaranteed" if firm else "spot",
        "concurrency" if firm else "max_concurrency": _SLOTS_OF[tenant],
        "api_keys": ["sha256:" + sha256(_key(tenant).encode()).hexdigest()],
    }


def _key(tenant: str) -> str:
    return f"key-of-{tenant}"


def arrivals(number: int, calm_s: float, overload_s: float) -> Iterator[tuple[float, str]]:
    """(seconds, tenant): Poisson, as many as fill each tenant's slots on average."""
    for tenant, slots in _SLOTS_OF.items():
        draw = Random(f"live/{tenant}/{number}")
        at_s = calm_s if tenant == _JOINS else 0.0
        while (at_s := at_s + draw.expovariate(slots / _SERVICE_S)) < calm_s + overload_s:
            yield at_s, tenant


class ScheduledLoad:
    """Sends requests when they are due, whatever became of earlier ones."""

    def __init__(self, fleet: Fleet, asked: list[tuple[float, str]], length_s: float) -> None:
        self.sent = [LiveRequest(tenant=tenant, at_s=at_s) for at_s, tenant in sorted(asked)]
        self.waiting: list[tuple[float, int]] = []
        self.length_s = length_s
        self._fleet = fleet
        self._begin_s = 0.0

    async def run(self) -> None:
        """All requests, to their ends."""
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=200)
        async with httpx.AsyncClient(timeout=120, limits=limits, trust_env=False) as client:
            self._begin_s = time.monotonic()
            watching = asyncio.create_task(self._watch(client))
            await asyncio.gather(*(self._send(client, sent) for sent in self.sent))
            await watching

    @property
    def _now_s(self) -> float:
        return time.monotonic() - self._begin_s

    async def _send(self, client: httpx.AsyncClient, sent: LiveRequest) -> None:
        await asyncio.sleep(sent.at_s - self._now_s)
        sent.at_s = self._now_s
        body = {
            "model": MODEL,
            "messages": [{"role": "user", "content": _TEXT}],
            "max_tokens": _OUTPUT,
            "mock_output_tokens": _OUTPUT,
            "stream": True,
        }
        headers = {"authorization": f"Bearer {_key(sent.tenant)}"}
        try:
            async with client.stream(
                "POST", self._fleet.url + CHAT, json=body, headers=headers
            ) as answer:
                sent.status = answer.status_code
                async for line in answer.aiter_lines():
                    if sent.first_s is None and _has_token(line):
                        sent.first_s = self._now_s
        except httpx.HTTPError:
            sent.status = 0

    async def _watch(self, client: httpx.AsyncClient) -> None:
        """The engine's queue, ten times a second while the load lasts."""
        url = self._fleet.engines[0].url + "/metrics"
        while self._now_s < self.length_s:
            page = (await client.get(url)).text
            self.waiting.append((self._now_s, int(_series(page, "vllm:num_requests_waiting"))))
            await asyncio.sleep(0.1)


def _has_token(line: str) -> bool:
    """Whether an SSE line carries text."""
    if not line.startswith("data: {"):
        return False
    choices = json.loads(line[6:]).get("choices") or [{}]
    return bool(choices[0].get("delta", {}).get("content"))


def _series(page: str, name: str) -> float:
    """Sum of a metric's series."""
    lines = (line for line in page.splitlines() if line.startswith(name + "{"))
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def _outcome(
    load: ScheduledLoad, records: list[dict[str, Any]], lag_s: float, calm_s: float
) -> LiveOutcome:
    late_s = load.length_s - LAST_S
    firm: Callable[[str], bool] = lambda tenant: tenant.startswith("guaranteed")  # noqa: E731
    timed = [s for s in load.sent if firm(s.tenant) and s.at_s >= late_s and s.first_s is not None]
    spot = [s for s in load.sent if not firm(s.tenant) and s.at_s >= calm_s]
    refused = [r for r in records if r.get("reason") and firm(r.get("entitlement") or "")]
    return LiveOutcome(
        ttft_s=quantile([s.first_s - s.at_s for s in timed if s.first_s is not None], 0.99),
        counted=len(timed),
        waiting=[n for at_s, n in load.waiting if at_s >= late_s],
        lag_s=lag_s,
        denied=Counter(r["reason"] for r in refused),
        failed=sum(s.status != 429 and s.first_s is None for s in load.sent),
        spot_refused=sum(s.status == 429 for s in spot) / max(1, len(spot)),
    )
