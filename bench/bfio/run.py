"""`python -m bench bfio`: BF-IO's Table 1, Figures 4, 6 and 7, its theorems, and what is online.

Published figures: arXiv:2601.17855, "A Universal Load Balancing Principle and Its Application to
Large Language Model Serving". Ours come from the gateway's own solver
(gateway.scheduling.rank_solver) in a simulated group that steps behind a barrier
(simulator.barrier.group); nothing is started. The last rows send requests through the gateway's
scheduler for ranks.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from bench.bfio import online, solver, table, theory
from bench.common.report import Bar, Report, Row, at_least, at_most, bars, equals
from gateway.fleet import fleet
from gateway.fleet.fleet import PoolState
from gateway.scheduling import rank_solver
from gateway.scheduling.rank_group import RankGroup, RankRules
from gateway.scheduling.scheduler import Job, Scheduler
from gateway.scheduling.schedulers import make_scheduler
from simulator.engine.engine import EngineProfile, EngineRequest
from simulator.engine.rank_group import RankGroupEngine

# -- data-parallel ranks in virtual time: the gateway's schedulers before the mock's engine model


RANKS: Final = 8
SLOTS: Final = 32
CLIENTS: Final = RANKS * SLOTS + 128
PROFILE: Final = EngineProfile(
    name="bfio-ranks",
    w_s=0.004,
    h_s_per_token=1.07e-7,
    timing="kv",
    prefix_cache_tokens=0,
    max_num_batched_tokens=1 << 17,
    max_model_len=32_768,
    kv_blocks=1 << 18,
    max_num_seqs=SLOTS,
)
_REQUESTS: Final = 100_000
TARGETED_ONE_IN: Final = 8
TARGET_S: Final = 0.5
"""To the first token. Three quarters of a second go by in the line on average."""
_EXPECTED_OUTPUT: Final = 250
"""All that a scheduler is told of an answer's length."""

MakeScheduler = Callable[[PoolState], Scheduler]

SCHEDULERS: Final[dict[str, MakeScheduler]] = {
    "bfio": lambda pool: RankGroup(pool, rank_solver.assign),
    "least-KV, late": lambda pool: RankGroup(
        pool, rank_solver.assign, rules=RankRules(per_slot=0, spare=1)
    ),
    "least-loaded, at once": lambda pool: make_scheduler("least-loaded", pool),
    "round-robin": lambda pool: make_scheduler("round-robin", pool),
}


class RankWork(msgspec.Struct, frozen=True, kw_only=True):
    """Requests in order: prompt and output, in tokens."""

    prompts: Sequence[int]
    outputs: Sequence[int]


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """One run, after its warm-up."""

    tokens_per_s: float
    step_s: float
    imbalance_tokens: float
    """Sum over ranks of how far each is below the fullest, averaged over steps."""
    longest_wait_steps: float
    """In the gateway, of requests that arrived after the warm-up."""
    kept: float
    """Share of the requests with a target, of those, that kept it."""
    others_wait_s: float
    """Mean time to first token of the requests without a target."""
    most_waiting: int
    lost: int
    """Requests that were neither sent nor waiting at the end."""


def work(seed: int, mean_output: float = 250.0, count: int = _REQUESTS) -> RankWork:
    """B-like: prompts lognormal of mean 870 and deviation 1,060, outputs geometric."""
    random = np.random.default_rng(seed)
    spread = np.log(1 + (1060 / 870) ** 2)
    prompts = random.lognormal(np.log(870) - spread / 2, np.sqrt(spread), count)
    outputs = np.minimum(random.geometric(1 / mean_output, count), 4096)
    return RankWork(
        prompts=np.clip(prompts, 1, 16_000).astype(int).tolist(), outputs=outputs.tolist()
    )


def measure(
    make: MakeScheduler,
    seed: int,
    *,
    steps: int = 4000,
    warm_up: int = 1200,
    tell_targets: bool = False,
) -> Measured:
    """Saturate the group through this scheduler; one in `TARGETED_ONE_IN` requests has a target."""
    run = _RankRun(make, work(seed), tell_targets=tell_targets)
    for _ in range(warm_up):
        run.step()
    run.clear()
    for _ in range(steps - warm_up):
        run.step()
    return run.measured()


class _RankRun:
    """Clients, scheduler and engine, step by step."""

    def __init__(self, make: MakeScheduler, asked: RankWork, *, tell_targets: bool) -> None:
        names = tuple(f"engine#{rank}" for rank in range(RANKS))
        self._pool = PoolState("ranks", names, SLOTS, [range(RANKS)])
        self._scheduler = make(self._pool)
        self._engine = RankGroupEngine(PROFILE, RANKS)
        self._work = asked
        self._tell_targets = tell_targets
        self._sent: dict[str, Job] = {}
        self._streamed: dict[str, int] = {}
        self._coming: list[Job] = []
        self._now_s = 0.0
        self._asked = 0
        self.clear()
        for _ in range(CLIENTS):
            self._ask()
        self._arrive()

    def clear(self) -> None:
        """Count from here."""
        self._since_s, self._steps = self._now_s, 0
        self._tokens, self._lead, self._waited_s, self._most = 0, 0.0, 0.0, 0
        self._firsts_s: dict[bool, list[float]] = {False: [], True: []}

    def step(self) -> None:
        """One step of all ranks; whose answer ends asks again."""
        step = self._engine.begin(self._now_s)
        if step is None:
            raise RuntimeError("a saturated group was idle")
        self._arrive()
        self._now_s = step.end_s
        done = []
        for _, emission in self._engine.finish():
            self._streamed[emission.id] = emission.index
            self._tokens += 1
            if emission.index == 1:
                first_s = self._now_s - self._sent[emission.id].arrived_s
                self._firsts_s[_targeted(emission.id)].append(first_s)
            if emission.finished:
                done.append(emission.id)
        loads = [engine.kv_tokens for engine in self._engine.engines]
        self._lead += RANKS * max(loads) - sum(loads)
        self._steps += 1
        for name in done:
            job = self._sent.pop(name)
            fleet.finish(self._pool, job.worker, 1, job.kv_tokens)
            self._send(self._scheduler.finished(job, self._now_s))
            del self._streamed[name]
            self._ask()
        self._most = max(self._most, sum(self._scheduler.waiting))

    def measured(self) -> Measured:
        """What came of it."""
        took_s = self._now_s - self._since_s
        held = len(self._sent) + sum(self._scheduler.waiting)
        return Measured(
            tokens_per_s=self._tokens / took_s,
            step_s=took_s / self._steps,
            imbalance_tokens=self._lead / self._steps,
            longest_wait_steps=self._waited_s * self._steps / took_s,
            kept=float(np.mean([s <= TARGET_S for s in self._firsts_s[True]])),
            others_wait_s=float(np.mean(self._firsts_s[False])),
            most_waiting=self._most,
            lost=CLIENTS - held,
        )

    def _ask(self) -> None:
        number = self._asked
        self._asked += 1
        prompt = self._work.prompts[number]
        job = Job(
            owner=str(number),
            prompt_tokens=prompt,
            output_tokens=_EXPECTED_OUTPUT,
            arrived_s=self._now_s,
            kv_tokens=prompt + _EXPECTED_OUTPUT,
            slo_s=TARGET_S if self._tell_targets and _targeted(str(number)) else 0.0,
        )
        self._send(self._scheduler.submit(job, self._now_s))

    def _send(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            name: str = job.owner
            self._sent[name] = job
            self._streamed[name] = 0
            job.emitted = lambda name=name: self._streamed[name]
            if job.arrived_s >= self._since_s:
                self._waited_s = max(self._waited_s, job.sent_s - job.arrived_s)
            fleet.start(self._pool, job.worker, 1, job.kv_tokens)
            self._coming.append(job)

    def _arrive(self) -> None:
        for job in self._coming:
            self._engine.submit(
                job.worker,
                EngineRequest(
                    id=job.owner,
                    prompt_tokens=job.prompt_tokens,
                    output_tokens=self._work.outputs[int(job.owner)],
                ),
                self._now_s,
            )
        self._coming.clear()


def _targeted(name: str) -> bool:
    return int(name) % TARGETED_ONE_IN == 0


_GAIN: Final = 6.0
_ASKED: Final = ("least-KV, late", "round-robin")


def run(data: Path | None = None) -> Report:
    """All tables; `data` is a folder with the traces."""
    with bars() as bar:
        rows = [*solver.rows(), *table.rows(bar), *theory.rows(bar), *online.rows(bar)]
        rows += [*theory.trace_rows(data, bar), *ranks(bar)]
    return Report(name="bfio", rows=rows, detail={"source": "arXiv:2601.17855"})


def ranks(bar: Bar) -> list[Row]:
    """Eight ranks of 32 slots, saturated, by the schedulers that the gateway runs."""
    found = {}
    step = bar("through the gateway's scheduler", len(SCHEDULERS) + 1)
    for name, make in SCHEDULERS.items():
        found[name] = measure(make, seed=0)
        step()
    ours = found["bfio"]
    at = f"{RANKS} ranks through the gateway's scheduler"
    rows = []
    for name in list(found)[1:]:
        gain = 100 * (ours.tokens_per_s / found[name].tokens_per_s - 1)
        metric = f"{at}: tokens/s over {name}, %"
        asked = name in _ASKED
        rows.append(at_least(metric, gain, _GAIN) if asked else Row(metric, gain))
    wait = f"longest wait {ours.longest_wait_steps:.0f} steps"
    note = f"{ours.tokens_per_s:,.0f} tokens/s, {wait}, {ours.most_waiting} waiting at most"
    rows.append(equals(f"{at}: requests lost", ours.lost, 0, note))
    told = measure(SCHEDULERS["bfio"], seed=0, tell_targets=True)
    step()
    targets = f"{at}, one target of {TARGET_S:g} s in {TARGETED_ONE_IN}"
    note = f"untold {100 * ours.kept:.1f} %; others' mean first token {ours.others_wait_s:.2f} s"
    note += f", then {told.others_wait_s:.2f} s"
    share = told.imbalance_tokens / ours.imbalance_tokens
    return [
        *rows,
        at_least(f"{targets}: kept, %", 100 * told.kept, 95.0, note),
        at_most(f"{targets}: imbalance over that without targets", share, 1.1),
    ]
