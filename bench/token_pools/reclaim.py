"""How long a returning guaranteed client waits for its slots.

16 slots; backfill asks for more than all of them, in requests of 8.5 s. Every 40 to 60 s a
guaranteed tenant that had nothing in flight sends six requests at once, its whole baseline.
They are admitted at once, and wait in the engine for borrowed slots to be freed; that wait is
measured. Then the same with preemptible backfill, which gives way after `reclaim_s`: the gateway
cancels it upstream, which takes `CANCEL_S`. Last a dedicated tenant, whose slots stay free.
"""

from functools import partial
from random import Random
from statistics import mean
from typing import Final

import msgspec

from bench.common.report import Bar, Row, at_most, equals, judged, no_bar, quantile
from bench.token_pools.lab import ITERATION_S, SLOTS, AdmittedJob, Lab, Thread, spark
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


def rows(seeds: range, bar: Bar = no_bar) -> list[Row]:
    """Lending with headroom 0, 1, 3, to preemptible backfill that is evicted, and not at all."""
    out, denied = [], 0
    step = bar("reclaim", len(seeds) * len(_WAYS))
    for way, (lent_to, headroom, owner_class, limit_s, note) in _WAYS.items():
        found = Returns()
        for seed in seeds:
            one = experiment(lent_to, headroom, seed, owner_class=owner_class)
            for figure in Returns.__struct_fields__:
                setattr(found, figure, getattr(found, figure) + getattr(one, figure))
            step()
        name, denied = f"Reclaim, {way}", denied + found.denied
        metric, p99_s = f"{name}: P99 wait of six returning, s", quantile(found.waits_s, 0.99)
        said = f"mean {mean(found.waits_s):.2f} s, {len(found.waits_s)} requests; {note}"
        out.append(at_most(metric, p99_s, limit_s, said) if limit_s else Row(metric, p99_s, said))
        used = 100 * mean(found.utilisation)
        out.append(Row(f"{name}: utilisation while lent, %", used))
        if lent_to == "preemptible":
            metric, each = f"{name}: evictions for each returning request", found.evicted
            holds = found.in_vain == 0
            out.append(judged(metric, each / len(found.waits_s), "<= 1", holds))
    return [*out, equals("Reclaim: returning requests refused, all ways", denied, 0)]


_WAYS: Final[dict[str, tuple[ServiceClass, int, ServiceClass, float, str]]] = {
    "spot lent all but 0": ("spot", 0, "guaranteed", 0.0, ""),
    "spot lent all but 1": ("spot", 1, "guaranteed", 0.0, ""),
    "spot lent all but 3": ("spot", 3, "guaranteed", 0.0, ""),
    "dedicated, not lent": ("spot", 0, "dedicated", ITERATION_S, "the iteration in progress"),
    "preemptible evicted": (
        *("preemptible", 1, "guaranteed", RECLAIM_S + CANCEL_S + ITERATION_S),
        f"reclaim {RECLAIM_S:g} s, then a cancellation and the iteration in progress",
    ),
}
"""Who borrows, the headroom, the owner, the longest wait asked for."""
