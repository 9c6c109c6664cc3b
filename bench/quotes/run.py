"""`python -m bench quotes`: do quotes come true? A reliability diagram, in virtual time.

The gateway's own schedulers and `Outlook` before engine models. Every request is quoted the moment
before it is sent, as a client could ask; of those quoted, the share is counted whose wait in the
gateway and whose time to first token were no longer than each quantile said. Learned is only what
the gateway would have learned by then: samples of requests that have ended. Four workers; three
workloads; .5, .8, 1.0 and 1.2 of the knee, and the first requests are left out.

Target: of quotes that say p95, 92 to 98 % come true.
"""

from collections.abc import Sequence
from functools import partial
from itertools import product
from math import inf
from pathlib import Path
from typing import Any, Final

import numpy as np

from bench.common.report import Report, bars, judged, scaled
from bench.quartz.lab import WORKERS, make, processes
from bench.quartz.lab import run as serve
from bench.quartz.loads import LOADS, SCENES, knee
from gateway.fleet.fleet import Pending, PoolState
from gateway.scheduling.outlook import Forecast, Outlook, Quoted
from gateway.scheduling.scheduler import Job, Scheduler

POLICIES: Final = ("QUARTZ", "FIFO-LL")
WORKLOADS: Final = ("Chat", "RAG", "Mixed")
LEVELS: Final = (0.1, 0.25, 0.5, 0.75, 0.9, 0.95)
REQUESTS: Final = scaled(3000, 1500)
SETTLED: Final = 500
"""Requests after which quotes count."""
SEEDS: Final = scaled(3)
LEAST, MOST = 0.92, 0.98
PLOT: Final = Path("docs/images/quotes.png")

Cell = tuple[str, str, float]
"""Policy, workload, load."""
Share = dict[str, list[float]]
"""wait, ttft -> for each level, the share of quotes that came true."""


class Quoting:
    """A scheduler that is asked for a quote before each job, and told what came of it."""

    def __init__(self, inner: Scheduler, pool: PoolState) -> None:
        self.inner = inner
        self._pool = pool
        self._pending: dict[Job, Pending] = {}
        self.outlook = Outlook(LEVELS)
        self.quoted: dict[Job, dict[str, Quoted]] = {}
        self._sampled: dict[Job, Forecast] = {}
        self._first_s: dict[Job, float] = {}

    def submit(self, job: Job, now_s: float) -> Sequence[Job]:
        """As of Scheduler."""
        forecast = Forecast(job.priority_class, *self.inner.forecast(job, now_s))
        if job.owner >= SETTLED:
            wait, ttft = self.outlook.expect(forecast)
            self.quoted[job] = {"wait": wait, "ttft": ttft}
        if self.outlook.samples(now_s):
            self._sampled[job] = forecast
        ready = self.inner.submit(job, now_s)
        self._sent(ready)
        return ready

    def first_token(self, job: Job, now_s: float, *given: Any, **more: Any) -> Sequence[Job]:
        """As of Scheduler."""
        self._first_s[job] = now_s
        if (forecast := self._sampled.pop(job, None)) is not None:
            self.outlook.note(forecast, job.sent_s - job.arrived_s, now_s - job.arrived_s)
        ready = self.inner.first_token(job, now_s, *given, **more)
        self._sent(ready)
        return ready

    def finished(self, job: Job, now_s: float, *, answered: bool = False) -> Sequence[Job]:
        """As of Scheduler; the gateway notes a sample when its request is settled."""
        self._pool.engine_of[job.worker].progress.end(self._pending.pop(job), answered=answered)
        ready = self.inner.finished(job, now_s, answered=answered)
        self._sent(ready)
        return ready

    def tick(self, now_s: float) -> Sequence[Job]:
        """As of Scheduler."""
        ready = self.inner.tick(now_s)
        self._sent(ready)
        return ready

    def _sent(self, ready: Sequence[Job]) -> None:
        """Have the pool know what is under way at its engines, as the gateway does."""
        for job in ready:
            pending = Pending(job, job.sent_s, inf, partial(self._emitted, job))
            self._pending[job] = pending
            self._pool.engine_of[job.worker].progress.begin(pending)

    def _emitted(self, job: Job) -> int:
        return int(job in self._first_s)

    def came_true(self) -> Share:
        """The share of quotes at each level that came true."""
        found: Share = {}
        for name in ("wait", "ttft"):
            true: list[list[bool]] = [[] for _ in LEVELS]
            for job, quotes in self.quoted.items():
                end_s = job.sent_s if name == "wait" else self._first_s[job]
                for at, said in enumerate(quotes[name]):
                    if said is not None:
                        true[at].append(end_s - job.arrived_s <= said + 1e-9)
            found[name] = [float(np.mean(each)) if each else float("nan") for each in true]
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def shares_of(task: tuple[Cell, int]) -> Share:
    """One run."""
    (policy, workload, load), seed = task
    demands = SCENES[workload](seed, load * knee(workload, WORKERS), WORKERS, REQUESTS, None)
    gateway = make(policy, seed=seed)
    quoting: Any = Quoting(gateway.scheduler, gateway.pool)
    gateway.scheduler = quoting
    serve(demands, [gateway], seed=seed)
    found: Share = quoting.came_true()
    return found


def run() -> Report:
    """All cells, the rows of their p95, and the diagram."""
    cells: list[Cell] = list(product(POLICIES, WORKLOADS, LOADS))
    tasks = [(cell, seed) for cell in cells for seed in range(SEEDS)]
    found: dict[Cell, list[Share]] = {}
    with bars() as bar, processes() as pool:
        step = bar("runs", len(tasks))
        for (cell, _), share in zip(tasks, pool.map(shares_of, tasks), strict=True):
            found.setdefault(cell, []).append(share)
            step()
    means = {
        (cell, name): np.mean([share[name] for share in shares], axis=0)
        for cell, shares in found.items()
        for name in ("wait", "ttft")
    }
    rows = []
    for ((policy, workload, load), name), true in means.items():
        p95 = round(float(true[-1]), 3)
        # A wait is a step: where most wait for nothing, more than 95 % wait no longer than p95.
        holds = p95 >= LEAST and (p95 <= MOST or name == "wait")
        target = f"{LEAST} to {MOST}" if name == "ttft" else f">= {LEAST}"
        note = f"p50 {true[LEVELS.index(0.5)]:.2f}"
        rows.append(judged(f"{policy}, {workload}, {load}: {name} p95", p95, target, holds, note))
    _plot(means)
    detail = {"levels": LEVELS, "seeds": SEEDS, "requests": REQUESTS}
    return Report(name="quotes", rows=rows, detail=detail)


def _plot(means: dict[tuple[Cell, str], Any]) -> None:
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, len(POLICIES), figsize=(9, 4.2), sharey=True)
    for axis, policy in zip(axes, POLICIES, strict=True):
        axis.plot([0, 1], [0, 1], color="0.7", linewidth=1)
        for load in LOADS:
            of_load = [
                values
                for (cell, name), values in means.items()
                if cell[0] == policy and cell[2] == load and name == "ttft"
            ]
            axis.plot(LEVELS, np.mean(of_load, axis=0), marker="o", label=f"{load} of the knee")
        axis.set(title=f"Time to first token, {policy}", xlabel="quoted quantile")
    axes[0].set_ylabel("share of requests that took no longer")
    axes[0].legend(loc="upper left")
    figure.tight_layout()
    figure.savefig(PLOT, dpi=110)
    plt.close(figure)
