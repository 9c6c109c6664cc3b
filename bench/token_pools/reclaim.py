"""How long a returning guaranteed client waits for its slots.

16 slots; backfill asks for more than all of them, in requests of 8.5 s. Every 40 to 60 s a
guaranteed tenant that had nothing in flight sends six requests at once, its whole baseline.
They are admitted at once, and wait in the engine for borrowed slots to be freed; that wait is
measured. Then the same with preemptible backfill, which gives way after `reclaim_s`: the gateway
cancels it upstream, which takes `CANCEL_S`. Last a dedicated tenant, whose slots stay free.
"""

from collections.abc import Callable, Iterable
from functools import partial
from random import Random
from statistics import mean

import msgspec

from bench.common.report import Row, at_most
from bench.token_pools.clients import Thread
from bench.token_pools.lab import Lab
from bench.token_pools.records import ITERATION_S, SLOTS, AdmittedJob, quantile, spark
from gateway.admission.terms import Terms
from gateway.records.entitlement import Entitlement, ServiceClass

RECLAIM_S = 0.5
CANCEL_S = 0.02
_BASELINE = 6
_THREADS = 24
_WARM_S = 30.0
_HOUR_S = 1_200.0


class Returns(msgspec.Struct, kw_only=True):
    """One way of lending, all seeds."""

    waits_s: list[float] = []
    utilisation: list[float] = []
    evicted: int = 0
    in_vain: int = 0
    """Evictions beyond one for each returning request."""
    denied: int = 0


def experiment(
    service_class: ServiceClass,
    headroom: int,
    seed: int,
    *,
    owner_class: ServiceClass = "guaranteed",
    length_s: float = _HOUR_S,
) -> Returns:
    """Backfill of a class, lending all but `headroom` slots; a dedicated owner lends none."""
    owner = Entitlement(
        name="owner", model="m", service_class=owner_class, baseline=(_BASELINE,), created=1
    )
    backfill = Entitlement(name="backfill", model="m", service_class=service_class, created=2)
    terms = Terms(slots=(SLOTS,), headroom=headroom)
    lab = Lab(terms, [spark()], seed, tenants=[owner, backfill])
    draw = Random(f"reclaim/{seed}")

    def lengths() -> tuple[int, int]:
        return 64, draw.randint(32, 96)

    for _ in range(_THREADS):
        thread = Thread(lab, "backfill", lengths, until_s=length_s, wait_cap_s=1.0)
        lab.at(lab.random.uniform(0, 8), thread.ask)
    found = Returns()
    at_s = _WARM_S
    while at_s < length_s - 20:
        lab.at(at_s, lambda: _return(lab, found, evicts=service_class == "preemptible"))
        at_s += draw.uniform(40, 60)
    lab.run(length_s)
    return _finished(lab, found)


def _return(lab: Lab, found: Returns, *, evicts: bool) -> None:
    before = len(lab.jobs)
    for _ in range(_BASELINE):
        found.denied += lab.offer("owner", 64, 64) is not None
    if evicts:
        for job in lab.jobs[before:]:
            lab.at(lab.now_s + RECLAIM_S, partial(_waited, lab, job))


def _waited(lab: Lab, job: AdmittedJob) -> None:
    if job.first_s < 0:
        lab.reclaim(job.id, CANCEL_S)


def _finished(lab: Lab, found: Returns) -> Returns:
    owners = [j for j in lab.jobs if j.tenant == "owner"]
    found.waits_s = [j.queue_s for j in owners if j.queue_s >= 0]
    found.evicted = sum(j.evicted for j in lab.jobs)
    found.in_vain = max(0, found.evicted - len(owners))
    lent = [s for s in lab.samples if s.at_s >= _WARM_S and not s.inflight["owner"]]
    found.utilisation = [mean(s.running for s in lent) / SLOTS]
    return found


def together(
    service_class: ServiceClass,
    headroom: int,
    seeds: Iterable[int],
    step: Callable[[], None] = lambda: None,
    owner_class: ServiceClass = "guaranteed",
) -> Returns:
    """All seeds as one sample."""
    total = Returns()
    for seed in seeds:
        one = experiment(service_class, headroom, seed, owner_class=owner_class)
        total.waits_s = total.waits_s + one.waits_s
        total.utilisation = total.utilisation + one.utilisation
        total.evicted += one.evicted
        total.in_vain += one.in_vain
        total.denied += one.denied
        step()
    return total


VARIANTS = 5


def rows(seeds: Iterable[int], step: Callable[[], None] = lambda: None) -> list[Row]:
    """Lending with headroom 0, 1, 3, to preemptible backfill that is evicted, and not at all."""
    seeds = list(seeds)
    out = []
    for headroom in (0, 1, 3):
        found = together("spot", headroom, seeds, step)
        name = f"Reclaim, spot lent all but {headroom}"
        out += [
            Row(
                f"{name}: P99 wait of six returning, s",
                quantile(found.waits_s, 0.99),
                f"mean {mean(found.waits_s):.2f} s, {len(found.waits_s)} requests",
            ),
            Row(f"{name}: utilisation while lent, %", 100 * mean(found.utilisation)),
        ]
    kept = together("spot", 0, seeds, step, owner_class="dedicated")
    name = "Reclaim, dedicated, not lent"
    out += [
        at_most(
            f"{name}: P99 wait of six returning, s",
            quantile(kept.waits_s, 0.99),
            ITERATION_S,
            "the iteration in progress",
        ),
        Row(
            f"{name}: utilisation while idle, %",
            100 * mean(kept.utilisation),
            f"{SLOTS - _BASELINE} of {SLOTS} slots may be used",
        ),
    ]
    found = together("preemptible", 1, seeds, step)
    name = "Reclaim, preemptible evicted"
    limit_s = RECLAIM_S + CANCEL_S + ITERATION_S
    return [
        *out,
        at_most(
            f"{name}: P99 wait of six returning, s",
            quantile(found.waits_s, 0.99),
            limit_s,
            f"reclaim {RECLAIM_S:g} s, then a cancellation and the iteration in progress",
        ),
        Row(f"{name}: utilisation while lent, %", 100 * mean(found.utilisation)),
        Row(
            f"{name}: evictions for each returning request",
            found.evicted / len(found.waits_s),
            target="<= 1",
            holds=found.in_vain == 0,
        ),
        Row(
            "Reclaim: returning requests refused, all ways",
            found.denied + kept.denied,
            target="= 0",
            holds=found.denied + kept.denied == 0,
        ),
    ]
