"""`python -m bench batches live`: what a batch costs live requests, and what it makes of leftovers.

One gateway with token pools before mock engines, in real time. A guaranteed tenant sends the same
arrivals without a batch (the floor) and beside a batch of 10,000 items, by turns. Asked: its P99
time to the first token within 5 % or 10 ms of the floor, as many violations within the same, and
the batch uses 85 % (aim 95) of the slots that live requests left free while it had items waiting.

`million`: a batch of 1,000,000 items. Its upload and creation, the gateway's memory, and its CPU
for an item beside that for the same request sent by a client.
"""

import asyncio
import contextlib
import json
import tempfile
import time
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from random import Random
from statistics import median
from typing import Any, Final

import httpx
import msgspec
import numpy as np

from bench.common.fleet import MODEL, Fleet
from bench.common.raw_client import RawClient, TimedLoad, TimedRequest, chat_body, lag_s, text
from bench.common.report import Report, Row, at_least, at_most, equals, quantile, scaled, tracked
from bench.common.tools import cpu_ns, rss_kib

TURNS: Final = scaled(2)
ITEMS: Final = scaled(10_000, 1_000)
MILLION: Final = scaled(1_000_000, 10_000)
ENGINES, SLOTS = 4, 16
SPEED: Final = 4
LIVE_S: Final = scaled(60, 20)
LIVE_SLOTS: Final = 14
"""That live requests hold on average."""
SLO_S: Final = 0.1
_LIVE_TOKENS, _ITEM_TOKENS = 160, 128
_STEP_S: Final = 0.008 + 0.00065 * SLOTS
_KEY: Final = {"live": "sk-live", "batch": "sk-batch"}
_PART_S: Final = 20.0
_CLIENTS: Final = 40


class _Timing(msgspec.Struct):
    duration_s: float = 0.0


class _Logged(msgspec.Struct):
    time_unix_s: float = 0.0
    tenant: str = ""
    status: int = 0
    timing: _Timing = msgspec.field(default_factory=_Timing)


class Turn(msgspec.Struct, kw_only=True):
    """One run."""

    ttft_s: float
    """P99 of live requests."""
    violations: int
    """Live requests beyond SLO_S, refused or broken."""
    requests: int
    lag_s: float
    used_share: float = 0.0
    done: int = 0
    """Items in the output."""
    lost: int = 0


@contextlib.contextmanager
def batch_fleet(folder: Path, **more: Any) -> Iterator[Fleet]:
    """A gateway with a tenant of live requests and one of batches; `more` is for Fleet."""
    config = {
        "request_log": {"path": str(folder / "requests.jsonl")},
        "batches": {"url": f"file://{folder / 'batches'}", "max_file_bytes": 2 << 30},
        "entitlements": [
            {
                "name": name,
                "tenant": name,
                "model": MODEL,
                "service_class": "guaranteed" if name == "live" else "elastic",
                **({"concurrency": ENGINES * SLOTS // 2} if name == "live" else {}),
                "api_keys": ["sha256:" + sha256(key.encode()).hexdigest()],
            }
            for name, key in _KEY.items()
        ],
    }
    mock = ("--prefix-cache-tokens", "0", "--speed", str(SPEED))
    model = {"admission": {"mode": "enforce", "reclaim": "cancel"}}
    given = {"short": ENGINES, "short_slots": SLOTS, "mock": mock, **more}
    with Fleet(long=0, config=config, model=model, **given) as fleet:
        yield fleet


def _item(index: int, tokens: int) -> bytes:
    body = json.loads(chat_body([("user", text(f"item {index % 50}", 30))], tokens))
    del body["stream"]
    line = {"custom_id": f"i{index}", "method": "POST", "url": "/v1/chat/completions", "body": body}
    return json.dumps(line).encode() + b"\n"


def submit(fleet: Fleet, file: Path, window: str) -> tuple[dict[str, Any], float, float]:
    """The batch of a file, and the seconds that its upload and its creation took."""
    headers = {"authorization": f"Bearer {_KEY['batch']}"}
    with httpx.Client(base_url=fleet.url, headers=headers, timeout=600, trust_env=False) as client:
        begin_s = time.monotonic()
        with file.open("rb") as data:
            files = {"file": ("items.jsonl", data)}
            sent = client.post("/v1/files", data={"purpose": "batch"}, files=files)
        sent.raise_for_status()
        upload_s = time.monotonic() - begin_s
        made = client.post(
            "/v1/batches",
            json={
                "input_file_id": sent.json()["id"],
                "endpoint": "/v1/chat/completions",
                "completion_window": window,
                "sluice": {"accept_late": True},
            },
        )
        made.raise_for_status()
        return made.json(), upload_s, time.monotonic() - begin_s - upload_s


def ask(fleet: Fleet, path: str, method: str = "GET") -> httpx.Response:
    """What the batch's tenant asks."""
    headers = {"authorization": f"Bearer {_KEY['batch']}"}
    return httpx.request(method, fleet.url + path, headers=headers, timeout=60, trust_env=False)


def live() -> Report:
    """Runs without and with a batch, by turns."""
    found: dict[bool, list[Turn]] = {False: [], True: []}
    turns = [(number, batch) for number in range(TURNS) for batch in found]
    for number, batch in tracked(turns, "runs"):
        found[batch].append(_turn(number, batch=batch))
    floor, beside = (median(turn.ttft_s for turn in found[batch]) for batch in (False, True))
    late = [sum(t.violations for t in found[b]) / sum(t.requests for t in found[b]) for b in found]
    lag_ms = 1000 * max(turn.lag_s for turns in found.values() for turn in turns)
    note = f"{sum(turn.requests for turn in found[True])} requests; mocks {lag_ms:.0f} ms late"
    used = median(turn.used_share for turn in found[True])
    rows = [
        Row("live P99 TTFT without a batch, ms", round(1000 * floor, 1)),
        at_most(
            "live P99 TTFT beside a batch, ms",
            round(1000 * beside, 1),
            round(1000 * max(1.05 * floor, floor + 0.010), 1),
            note,
        ),
        Row("live requests beyond 100 ms without a batch", round(late[0], 4)),
        at_most("live requests beyond 100 ms beside it", round(late[1], 4), late[0] + 0.05),
        at_least("leftovers used, of an oracle's", round(used, 3), 0.85, "aim .95"),
        equals("items lost or doubled", sum(turn.lost for turn in found[True]), 0),
    ]
    return Report(name="batches live", rows=rows)


def _turn(number: int, *, batch: bool) -> Turn:
    with tempfile.TemporaryDirectory() as name, batch_fleet(Path(name)) as fleet:
        folder = Path(name)
        load = TimedLoad([fleet.url])
        made: dict[str, Any] = {}
        if batch:
            file = folder / "items.jsonl"
            file.write_bytes(b"".join(_item(i, _ITEM_TOKENS) for i in range(ITEMS)))
            made, _, _ = submit(fleet, file, "24h")
            time.sleep(5)  # what it takes to find its pace
        begin_unix_s = time.time()
        asyncio.run(load.open_loop(list(_arrivals(number))))
        while batch and made["status"] not in ("completed", "failed", "expired"):
            time.sleep(1)
            made = ask(fleet, f"/v1/batches/{made['id']}").json()
        fleet.wait_until_idle(limit_s=60.0)
        late_s = lag_s([engine.metrics() for engine in fleet.engines])
        output = ask(fleet, f"/v1/files/{made['output_file_id']}/content").text if batch else ""
        ids = [json.loads(line)["custom_id"] for line in output.splitlines()]
        time.sleep(1)  # the log is written twice a second
        lines = (folder / "requests.jsonl").read_bytes().splitlines()
        logged = [msgspec.json.decode(line, type=_Logged) for line in lines]
    first = [seen.first_s for seen in load.seen]
    times = [at_s for at_s in first if at_s is not None]
    return Turn(
        ttft_s=quantile(times, 0.99),
        violations=sum(at_s is None or at_s > SLO_S for at_s in first),
        requests=len(first),
        lag_s=late_s,
        used_share=_used_share(logged, begin_unix_s) if batch else 0.0,
        done=len(ids),
        lost=abs(ITEMS - len(set(ids))) + len(ids) - len(set(ids)) if batch else 0,
    )


def _used_share(logged: list[_Logged], begin_unix_s: float) -> float:
    """Slot-seconds of items over those that live requests left, while items waited and both ran."""
    ends = sorted(r.time_unix_s + r.timing.duration_s for r in logged if r.tenant == "batch")
    until_s = min(begin_unix_s + LIVE_S, ends[int(0.95 * len(ends))])
    step_s = 0.05
    steps = max(1, int((until_s - begin_unix_s) / step_s))
    busy = {name: np.zeros(steps + 1) for name in _KEY}
    for record in logged:
        if record.tenant in busy and record.status == 200:
            first = (record.time_unix_s - begin_unix_s) / step_s
            last = first + record.timing.duration_s / step_s
            low, high = np.clip([round(first), round(last)], 0, steps)
            busy[record.tenant][low] += 1
            busy[record.tenant][high] -= 1
    live, items = (np.cumsum(busy[name])[:steps] for name in _KEY)
    return float(items.sum() / np.maximum(0, ENGINES * SLOTS - live).sum())


def _arrivals(number: int) -> Iterator[TimedRequest]:
    body = chat_body([("user", text("live", 50))], _LIVE_TOKENS)
    draw, at_s = Random(f"batches/{number}"), 0.0
    per_s = LIVE_SLOTS / (_LIVE_TOKENS * _STEP_S / SPEED)
    while (at_s := at_s + draw.expovariate(per_s)) < LIVE_S:
        yield TimedRequest(at_s=at_s, client="live", body=body)


# -- a million items


def million() -> Report:
    """Upload, creation, memory and CPU."""
    with (
        tempfile.TemporaryDirectory() as name,
        batch_fleet(Path(name), short_slots=64, mock=("--speed", "50")) as fleet,
    ):
        file = Path(name) / "items.jsonl"
        with file.open("wb") as lines:
            for i in tracked(range(MILLION), "lines"):
                lines.write(_item(i, 8))
        pid = fleet.gateway.pid if fleet.gateway is not None else 0
        before_ns = asyncio.run(_ordinary(fleet, pid))
        first_kib = rss_kib(pid)
        made, upload_s, create_s = submit(fleet, file, "168h")
        made_kib = rss_kib(pid)
        time.sleep(10)  # to find its pace
        begin, spent_ns = _answered(fleet), cpu_ns(pid)
        time.sleep(2 * _PART_S)
        items, spent_ns = _answered(fleet) - begin, cpu_ns(pid) - spent_ns
        ran_kib = rss_kib(pid)
        ask(fleet, f"/v1/batches/{made['id']}/cancel", "POST").raise_for_status()
        fleet.wait_until_idle(limit_s=60.0)
        after_ns = asyncio.run(_ordinary(fleet, pid))
    each_ns, ordinary_ns = spent_ns / max(1, items), (before_ns + after_ns) / 2
    note = f"{each_ns / 1000:.0f} us of {items} items, {ordinary_ns / 1000:.0f} us of a request"
    rows = [
        Row("lines", MILLION, f"{upload_s:.1f} s of upload"),
        at_most("upload and creation, s", round(upload_s + create_s, 1), 60, f"{create_s:.2f} s"),
        at_most("memory after it is made, MiB more", round((made_kib - first_kib) / 1024), 64),
        at_most("memory while it runs, MiB more", round((ran_kib - first_kib) / 1024), 64),
        at_most(
            "gateway's CPU for an item, of a request's", round(each_ns / ordinary_ns, 2), 1.3, note
        ),
    ]
    return Report(name="batches million", rows=rows)


def _answered(fleet: Fleet) -> int:
    return sum(engine.finished() for engine in fleet.engines)


async def _ordinary(fleet: Fleet, pid: int) -> float:
    """CPU of the gateway for one request of the same kind, in nanoseconds."""
    body = json.dumps(json.loads(_item(0, 8))["body"]).encode()
    until_s = time.monotonic() + _PART_S

    async def client() -> int:
        count = 0
        async with RawClient(fleet.url, _KEY["batch"]) as sender:
            while time.monotonic() < until_s:
                answer = await sender.post("/v1/chat/completions", body)
                count += answer.status == 200
        return count

    begin_ns = cpu_ns(pid)
    counts = await asyncio.gather(*(client() for _ in range(_CLIENTS)))
    return (cpu_ns(pid) - begin_ns) / max(1, sum(counts))
