"""`python -m bench bfio-live`: balanced data-parallel ranks, in virtual and in real time.

First the gateway's schedulers run before eight ranks in virtual time (`bench.bfio.run`). Then
`sluice serve` runs before `sluice mock --dp-ranks 8` in real time, with policies bfio,
least-loaded and round-robin by turns, three times each, with the same requests each time. 384
clients send their next request when they have their answer. The mock runs at a fraction of real
speed: at most 3,000 chunks flow per second, so that processes do not limit the model.

Targets: in virtual time at least 6 % more tokens/s than least-KV and round robin; in real time
at least 4 % more than round robin, and more in every run; no request lost, the queue bounded.
"""

import asyncio
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, Final

import msgspec

from bench.bfio.run import (
    CLIENTS,
    PROFILE,
    RANKS,
    SCHEDULERS,
    SLOTS,
    Measured,
    RankWork,
    measure,
    work,
)
from bench.common.fleet import MODEL, Fleet
from bench.common.raw_client import RawClient, lag_s, write_profile
from bench.common.report import Report, Row, at_least, at_most, bars, equals, scaled, scaled_s

POLICIES: Final = ("bfio", "least-loaded", "round-robin")
RUNS: Final = scaled(3)
SEEDS: Final = range(scaled(3))
SPEED: Final = 0.04
MEAN_OUTPUT: Final = 50.0
WARM_UP_S: Final = scaled_s(20.0, 5.0)
COUNTED_S: Final = scaled_s(60.0, 10.0)
VIRTUAL_GAIN: Final = 6.0
LIVE_GAIN: Final = 4.0
MAX_CHUNKS: Final = 3000.0
_QUEUE_LIMIT: Final = 1000


class Live(msgspec.Struct, kw_only=True):
    """One run in real time."""

    tokens_per_s: float
    """In model time."""
    chunks_per_s: float
    """In real time."""
    barrier_share: float
    """Of the ranks' time, what they waited for the slowest one."""
    most_waiting: int
    """In the gateway, as sampled."""
    answers: int
    failed: int
    lag_s: float
    """P99 of how late the mock's tokens were, in real seconds."""


def run() -> Report:
    """Both clocks."""
    virtual: dict[str, list[Measured]] = {name: [] for name in SCHEDULERS}
    live: dict[str, list[Live]] = {name: [] for name in POLICIES}
    with bars() as bar:
        step = bar("virtual time", len(SCHEDULERS) * len(SEEDS))
        for seed in SEEDS:
            for name, make in SCHEDULERS.items():
                virtual[name].append(measure(make, seed))
                step()
        step = bar("real time", RUNS * len(POLICIES))
        for number in range(RUNS):
            for policy, outcomes in live.items():
                outcomes.append(experiment(policy, number))
                step()
    detail = {"virtual": msgspec.to_builtins(virtual), "live": msgspec.to_builtins(live)}
    return Report(name="bfio live", rows=[*virtual_rows(virtual), *live_rows(live)], detail=detail)


def virtual_rows(found: dict[str, list[Measured]]) -> list[Row]:
    """Means over seeds; gains are of the same seed."""
    ours = found["bfio"]
    rows = [
        Row(
            f"virtual: {name}, tokens/s",
            _mean([m.tokens_per_s for m in runs]),
            f"step {1000 * _mean([m.step_s for m in runs]):.2f} ms, imbalance "
            f"{_mean([m.imbalance_tokens for m in runs]) / 1e4:.2f}e4 tokens",
        )
        for name, runs in found.items()
    ]
    for name, runs in found.items():
        if name == "bfio":
            continue
        gains = [_gain(a.tokens_per_s, b.tokens_per_s) for a, b in zip(ours, runs, strict=True)]
        note = ", ".join(f"{gain:.1f}" for gain in gains)
        rows.append(at_least(f"virtual: gain over {name}, %", _mean(gains), VIRTUAL_GAIN, note))
    waits = max(m.longest_wait_steps for m in ours)
    fifo = max(m.longest_wait_steps for m in found["least-KV, late"])
    limit = fifo + 200 + 50
    return [
        *rows,
        at_most("virtual: bfio, longest wait, steps", waits, limit, f"in order: {fifo:.0f}"),
        equals("virtual: requests lost", sum(m.lost for r in found.values() for m in r), 0),
    ]


def live_rows(found: dict[str, list[Live]]) -> list[Row]:
    """Gains by turn, their middle, and what shows that the run was fair."""
    every = [outcome for outcomes in found.values() for outcome in outcomes]
    rows = [
        Row(
            f"live: {policy}, tokens per model second",
            median(o.tokens_per_s for o in runs),
            ", ".join(f"{o.tokens_per_s:.0f}" for o in runs)
            + f"; at the barrier {100 * median(o.barrier_share for o in runs):.1f} % of the time",
        )
        for policy, runs in found.items()
    ]
    for policy in POLICIES[1:]:
        pairs = zip(found["bfio"], found[policy], strict=True)
        gains = [_gain(a.tokens_per_s, b.tokens_per_s) for a, b in pairs]
        note = ", ".join(f"{gain:.1f}" for gain in gains)
        if policy == "round-robin":
            rows.append(at_least(f"live: gain over {policy}, %", median(gains), LIVE_GAIN, note))
            rows.append(at_least("live: least gain of a turn, %", min(gains), 0.0))
        else:
            rows.append(Row(f"live: gain over {policy}, %", median(gains), note))
    waiting = max(o.most_waiting for o in found["bfio"])
    lag_ms = 1000 * max(o.lag_s for o in every)
    return [
        *rows,
        at_most("live: most chunks/s", max(o.chunks_per_s for o in every), MAX_CHUNKS),
        at_most("live: bfio, most that waited", waiting, CLIENTS - RANKS * SLOTS),
        equals(
            "live: requests that failed",
            sum(o.failed for o in every),
            0,
            f"of {sum(o.answers for o in every)}; the mock at most {lag_ms:.0f} ms late",
        ),
    ]


def experiment(
    policy: str, number: int, *, warm_up_s: float = WARM_UP_S, counted_s: float = COUNTED_S
) -> Live:
    """One run against an engine and a gateway of its own."""
    with tempfile.TemporaryDirectory() as folder:
        profile = write_profile(Path(folder), PROFILE)
        mock = ("--profile-file", str(profile), "--dp-ranks", str(RANKS), "--speed", str(SPEED))
        with fleet_of(policy, mock) as fleet:
            load = BarrierLoad(fleet, work(number, MEAN_OUTPUT))
            return asyncio.run(load.run(warm_up_s, counted_s))


def fleet_of(policy: str, mock: Sequence[str]) -> Fleet:
    """One engine of eight ranks behind a gateway with this policy."""
    scheduling = {"policy": policy, "queue_limit": _QUEUE_LIMIT, "queue_timeout_s": 600}
    fleet = Fleet(
        short=1,
        long=0,
        short_window=PROFILE.max_model_len,
        short_slots=SLOTS,
        mock=mock,
        model={"scheduling": scheduling},
    )
    config: Any = fleet.replicas[0].config
    config["models"][0]["pools"]["short"]["workers"] = [
        {"url": fleet.engines[0].url, "ranks": RANKS}
    ]
    return fleet


class BarrierLoad:
    """Clients that ask again when they have their answer."""

    def __init__(self, fleet: Fleet, asked: RankWork) -> None:
        self._fleet = fleet
        self._requests = iter(enumerate(zip(asked.prompts, asked.outputs, strict=True)))
        self._answers = 0
        self._failed = 0

    async def run(self, warm_up_s: float, counted_s: float) -> Live:
        """Load the fleet, and count after the warm-up."""
        engine, most_waiting = self._fleet.engines[0], 0
        clients = [asyncio.create_task(self._client()) for _ in range(CLIENTS)]
        await asyncio.sleep(warm_up_s)
        before, began_s = await asyncio.to_thread(engine.metrics), time.monotonic()
        while (left_s := began_s + counted_s - time.monotonic()) > 0:
            await asyncio.sleep(min(1.0, left_s))
            page = await asyncio.to_thread(self._fleet.metrics)
            most_waiting = max(most_waiting, int(_sum(page, "sluice_queue_depth")))
        after, took_s = await asyncio.to_thread(engine.metrics), time.monotonic() - began_s
        for task in clients:
            task.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
        chunks, waited_s = (
            _sum(after, name) - _sum(before, name)
            for name in ("vllm:generation_tokens_total", "mock_barrier_wait_seconds_total")
        )
        return Live(
            tokens_per_s=chunks / took_s / SPEED,
            chunks_per_s=chunks / took_s,
            barrier_share=waited_s / (RANKS * took_s * SPEED),
            most_waiting=most_waiting,
            answers=self._answers,
            failed=self._failed,
            lag_s=lag_s([after]),
        )

    async def _client(self) -> None:
        async with RawClient(self._fleet.url) as connection:
            for number, (prompt, output) in self._requests:  # one iterator for all clients
                body = {
                    "model": MODEL,
                    "prompt": [7 + (number + at) % 900 for at in range(prompt)],
                    "max_tokens": output,
                    "ignore_eos": True,
                    "stream": True,
                }
                try:
                    answer = await connection.post("/v1/completions", msgspec.json.encode(body))
                    whole = answer.status == 200 and answer.body.endswith(b"data: [DONE]\n\n")
                except (OSError, EOFError):
                    whole = False
                self._answers += 1
                self._failed += not whole


def _sum(page: dict[str, float], name: str) -> float:
    return sum(v for k, v in page.items() if k.startswith(name + "{"))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _gain(ours: float, theirs: float) -> float:
    return 100 * (ours / theirs - 1)
