"""CPU time of bind and queue."""

import heapq
import time
from typing import Final

import numpy as np

from bench.common.report import Row
from gateway.fleet import fleet
from gateway.fleet.fleet import PoolState
from gateway.scheduling.scheduler import Job
from gateway.scheduling.schedulers import make_scheduler
from predictor.online import PrefillPredictor

REQUESTS: Final = 4000
_REPEATS: Final = 5


def cost_rows() -> list[Row]:
    """Bind + queue: all calls of a request's life but what its first token teaches."""
    rows = []
    for workers in (4, 256):
        for name in ("least-loaded", "sticky", "quartz"):
            bind_us, learn_us = min(_cost(name, workers, seed) for seed in range(_REPEATS))
            metric = f"{name}, {workers} workers: bind + queue, CPU-us a request"
            note = f"and {learn_us:.1f} at its first token, which quartz learns from"
            rows.append(Row(metric=metric, measured=bind_us, note=note))
    return rows


def _cost(name: str, workers: int, seed: int) -> tuple[float, float]:
    """Microseconds of CPU a request: submit, finished and a share of ticks; first tokens."""
    pool = PoolState("pool", tuple(f"w{i}" for i in range(workers)), 256)
    predictor = PrefillPredictor(workers=workers)
    scheduler = make_scheduler(name, pool, predictor=predictor)
    jobs = _jobs(workers, seed)
    clock = time.process_time_ns
    bind_ns = learn_ns = 0
    due: list[tuple[float, int, Job]] = []
    now_s = 0.0

    def sent(ready: object) -> None:
        for job in ready:  # type: ignore[attr-defined]
            fleet.start(pool, job.worker, 1, job.kv_tokens)
            done_s = now_s + (job.prompt_tokens - job.hit_tokens) / 9000 + 0.03
            heapq.heappush(due, (done_s, id(job), job))

    for job in jobs:
        while due and due[0][0] <= job.arrived_s:
            now_s, _, first = heapq.heappop(due)
            begun = clock()
            ready = scheduler.first_token(first, now_s)
            middle = clock()
            scheduler.finished(first, now_s)
            ended = clock()
            learn_ns += middle - begun
            bind_ns += ended - middle
            fleet.finish(pool, first.worker, 1, first.kv_tokens)
            sent(ready)
        now_s = job.arrived_s
        begun = clock()
        ready = scheduler.submit(job, now_s)
        bind_ns += clock() - begun
        sent(ready)
    # A reading of the clock costs as much as many a call.
    begun = clock()
    for _ in range(1000):
        clock()
    reading_us = (clock() - begun) / 1e6
    count = len(jobs)
    return bind_ns / 1e3 / count - 2 * reading_us, learn_ns / 1e3 / count - reading_us


def _jobs(workers: int, seed: int) -> list[Job]:
    """Requests at four fifths of what the workers prefill, half of each prompt cached once."""
    random = np.random.default_rng(seed)
    prompts = random.integers(200, 6000, REQUESTS)
    times = np.cumsum(random.exponential(1 / (3.0 * workers), REQUESTS))
    everyone = (1 << workers) - 1
    return [
        Job(
            owner=None,
            prompt_tokens=int(prompt),
            output_tokens=200,
            arrived_s=1000.0 + float(at_s),
            client=f"client-{i % 28}",
            kv_tokens=int(prompt) + 200,
            match=((int(prompt) // 2, 1 << int(random.integers(workers))), (150, everyone)),
        )
        for i, (prompt, at_s) in enumerate(zip(prompts, times, strict=True))
    ]
