"""Experiment 1 of the token-pools paper (section 5.2): guaranteed traffic beside a flood of spot.

16 slots; `guaranteed-a` sells 6, `spot-b` asks for 10, `guaranteed-c` sells 6 and is there from
30 s to 60 s. Requests come at random (Poisson), as many as fill those slots on average, and a
refused one is not sent again. 64 tokens in, 64 out: 8.5 s each. At random, six slots' worth of
requests find six slots taken one time in four (Erlang), whatever the system; so token pools are
also shown with evenly spaced requests, as a client with six threads sends them.
Four systems see the same arrivals:

- nothing: every request enters;
- static limits "as sold": each tenant may use tokens/s in proportion to the slots it was sold,
  of the pool's nominal 240 (90, 150, 90), as an operator would set from the contracts;
- static limits "that always fit": the same scaled to add up to 240 (65, 109, 65);
- token pools.

Both kinds of limits are the shipped token buckets (10 s deep) without a pool behind them.
"""

from collections.abc import Iterable, Iterator
from functools import partial
from random import Random
from statistics import mean

import msgspec

from bench.common.report import Bar, Row, equals, no_bar, over_seeds, quantile
from bench.token_pools.lab import ITERATION_S, SLOTS, Lab, spark
from gateway.admission.terms import Terms
from gateway.records.entitlement import PROFILES, Entitlement

SYSTEMS = ("no admission", "limits as sold", "limits that fit", "token pools")
PHASES = ((0.0, 30.0), (30.0, 60.0), (60.0, 90.0))
END_S = 90.0
TOKENS_PER_S = 240.0
_SLOTS_OF = {"guaranteed-a": 6, "spot-b": 10, "guaranteed-c": 6}
_PRESENT = {"guaranteed-a": (0.0, 90.0), "spot-b": (0.0, 90.0), "guaranteed-c": (30.0, 60.0)}
GUARANTEED = ("guaranteed-a", "guaranteed-c")
SPOT = "spot-b"
_PROMPT = _OUTPUT = 64
_SERVICE_S = _OUTPUT * ITERATION_S
_DRAIN_S = 60.0
_EVEN_GAP = 1.05
"""Even arrivals leave a slot free for a moment, as a client does that reads the answer first."""


class ProtectionOutcome(msgspec.Struct, kw_only=True):
    """One system, one seed."""

    most_waiting: int
    p99_ttft_s: list[float]
    """Of guaranteed requests let in, by phase in which they asked."""
    late_ttft_s: float
    """P99 of guaranteed requests asked in the last 10 s of the overload."""
    spot_throttled: float
    """Share of spot's requests refused in phase 2."""
    denied_on_priority: int
    """Guaranteed requests that the pool refused."""
    denied_own: float
    """Share of guaranteed requests refused for their own limit."""
    utilisation: float
    """Mean share of the slots that ran, by the pool's own count, over the 90 s."""


def arrivals(seed: int, *, even: bool = False) -> Iterator[tuple[float, str]]:
    """(time, tenant) of every request, in order of tenants."""
    for tenant, (start_s, end_s) in _PRESENT.items():
        draw = Random(f"{tenant}/{seed}")
        rate = _SLOTS_OF[tenant] / _SERVICE_S
        every_s = _EVEN_GAP / rate
        at_s = start_s + (draw.uniform(0, every_s) if even else draw.expovariate(rate))
        while at_s < end_s:
            yield at_s, tenant
            at_s += every_s if even else draw.expovariate(rate)


def experiment(system: str, seed: int, *, even: bool = False) -> ProtectionOutcome:
    """Run one system against the arrivals of a seed."""
    lab = _lab(system, seed)
    asked = sorted(arrivals(seed, even=even))
    for at_s, tenant in asked:
        lab.at(at_s, partial(_offer, lab, tenant))
    if system == "token pools":
        contract = _contract("guaranteed-c", 3)
        lab.at(PHASES[1][0], lambda: lab.join(contract))
        gone = msgspec.structs.replace(contract, suspended=True)
        lab.at(PHASES[1][1], lambda: lab.join(gone))
    lab.run(END_S + _DRAIN_S)
    return _outcome(lab, asked)


def _offer(lab: Lab, tenant: str) -> None:
    lab.offer(tenant, _PROMPT, _OUTPUT)


def _lab(system: str, seed: int) -> Lab:
    if system == "no admission":
        return Lab(None, [spark()], seed)
    if system == "token pools":
        terms = Terms(slots=(SLOTS,), profile=PROFILES["default"])
        return Lab(
            terms, [spark()], seed, tenants=[_contract("guaranteed-a", 1), _contract(SPOT, 2)]
        )
    sold = sum(_SLOTS_OF.values()) if system == "limits that fit" else SLOTS
    limits = [
        Entitlement(
            name=name,
            model="m",
            tokens_per_s=TOKENS_PER_S * slots / sold,
            tokens_per_s_limit=TOKENS_PER_S * slots / sold,
            limit=slots * 4,
        )
        for name, slots in _SLOTS_OF.items()
    ]
    # No pool behind them: slots without end, and nothing to borrow.
    return Lab(Terms(slots=(1 << 20,)), [spark()], seed, tenants=limits)


def _contract(name: str, created: int) -> Entitlement:
    if name == SPOT:
        return Entitlement(
            name=name, model="m", service_class="spot", limit=_SLOTS_OF[name], created=created
        )
    baseline = (_SLOTS_OF[name],)
    return Entitlement(
        name=name, model="m", service_class="guaranteed", baseline=baseline, created=created
    )


def _outcome(lab: Lab, asked: Iterable[tuple[float, str]]) -> ProtectionOutcome:
    jobs = [j for j in lab.jobs if j.tenant in GUARANTEED]
    by_phase = [[j.ttft_s for j in jobs if a <= j.asked_s < b] for a, b in PHASES]
    start_s, end_s = PHASES[1]
    spot = sum(tenant == SPOT and start_s <= at_s < end_s for at_s, tenant in asked)
    throttled = sum(r.tenant == SPOT and start_s <= r.at_s < end_s for r in lab.refused)
    refused = [r for r in lab.refused if r.tenant in GUARANTEED]
    own = sum(r.reason in ("concurrency", "tokens") for r in refused)
    total = sum(tenant in GUARANTEED for _, tenant in asked)
    within = [s for s in lab.samples if s.at_s <= END_S]
    return ProtectionOutcome(
        most_waiting=max(s.waiting for s in within),
        p99_ttft_s=[quantile(times, 0.99) for times in by_phase],
        late_ttft_s=quantile([j.ttft_s for j in jobs if end_s - 10 <= j.asked_s < end_s], 0.99),
        spot_throttled=throttled / spot,
        denied_on_priority=len(refused) - own,
        denied_own=own / total,
        utilisation=mean(s.running for s in within if s.at_s >= _SERVICE_S) / SLOTS,
    )


def rows(seeds: range, bar: Bar = no_bar) -> list[Row]:
    """All systems over these seeds, middle of the seeds and their range."""
    found: dict[str, list[ProtectionOutcome]] = {system: [] for system in SYSTEMS}
    step = bar("protection", len(seeds) * len(SYSTEMS))
    for seed in seeds:
        for system in SYSTEMS:
            found[system].append(experiment(system, seed))
            step()
    found["token pools, even arrivals"] = [
        experiment("token pools", seed, even=True) for seed in seeds
    ]
    return [row for system, outcomes in found.items() for row in _rows_of(system, outcomes)]


def _rows_of(system: str, seeds: list[ProtectionOutcome]) -> Iterator[Row]:
    ours, none = system == "token pools", system == "no admission"
    name = f"Exp. 1, {system}"
    waiting = [o.most_waiting for o in seeds]
    published = 34 if none else 0 if ours else None
    metric = f"{name}: most requests waiting in the engine"
    yield over_seeds(metric, waiting, published, (25, 52) if none else None)
    for phase in range(len(PHASES)):
        yield over_seeds(
            f"{name}: guaranteed P99 TTFT in phase {phase + 1}, s",
            [o.p99_ttft_s[phase] for o in seeds],
            1.2 if ours else 19 if none and phase == 1 else None,
            (0, 1.95) if ours else (12, 15) if none and phase == 1 else None,
        )
    spot = [100 * o.spot_throttled for o in seeds]
    within = (38, 49) if ours else None
    yield over_seeds(f"{name}: spot refused in phase 2, %", spot, 47 if ours else None, within)
    yield over_seeds(f"{name}: pool utilisation, %", [100 * o.utilisation for o in seeds])
    own = [100 * o.denied_own for o in seeds]
    yield over_seeds(f"{name}: guaranteed refused for their own limit, %", own)
    if ours:
        denied = sum(o.denied_on_priority for o in seeds)
        note = f"{len(seeds)} seeds together"
        yield equals(f"{name}: guaranteed denied on priority", denied, 0, note)
