"""Experiment 2 of the token-pools paper (section 5.3): three elastic entitlements, lost capacity.

Two engines of 8 slots; one takes no new requests from 30 s to 120 s. `elastic-copilot` (500 ms)
and `elastic-synth` (30 s) are there all along, `elastic-reports` (5 s) from 210 s to 300 s, each
with 5 slots, as five threads that ask again as soon as they are answered. l_bar stays at
15,250 ms, as in the paper. What the paper does not give follows from its counts:

- Lengths (32 to 176 tokens) by tenant: 5 threads with 700 answers in 300 s take 2.14 s each,
  which is 16 tokens out. Half in and half out, 5 slots use 75 tokens/s. Likewise the others.
- lambda_e: with 8 slots copilot keeps its 75 tokens/s and synth gets 45; the published debts of
  .607 and .775 are 1 - 75/lambda_e and 1 - 45/lambda_e for 191 and 200. We take 200, and beside
  it 75, which is what 5 of 16 slots make, and no rate at all: debt is then owed in slots.
- On a 429 a thread waits as told, but no longer than `wait_cap_s`: 317 denials in 90 s of about
  two waiting threads are one every half second, the first backoff of the official clients.

Answers and synth's debt therefore agree with the paper because they were used. Not chosen are
who is denied, what the outage takes from whom, and how debts rise and fall.
"""

from collections.abc import Callable, Iterable, Iterator
from random import Random
from typing import Final

import msgspec

from bench.common.report import Bar, Row, above, at_most, equals, no_bar, over_seeds
from bench.token_pools.lab import RETRY_AFTER_S, Lab, PoolMoment, Thread, spark
from gateway.admission.terms import Terms
from gateway.records.entitlement import PROFILES, Entitlement

END_S = 300.0
OUTAGE = (30.0, 120.0)
JOINS_S = 210.0
SETTLED_S = 175.0
MEAN_SLO_MS = 15_250.0
WAIT_CAP_S = 0.5
IMPLIED_TOKENS_PER_S, SOLD_TOKENS_PER_S, IN_SLOTS = 200.0, 75.0, 0.0
COPILOT, SYNTH, REPORTS = TENANTS = ("elastic-copilot", "elastic-synth", "elastic-reports")
_SLO_MS: Final = {COPILOT: 500, SYNTH: 30_000, REPORTS: 5_000}
_LENGTHS: Final = {COPILOT: (32, 32), SYNTH: (40, 64), REPORTS: (64, 176)}
"""Tokens in and out together, uniform; half of them each way."""
_THREADS = 5
_POOL_TOKENS_PER_S = 240.0
_PUBLISHED: Final = {
    COPILOT: (700, 0, 0.607),
    SYNTH: (381, 317, 0.775),
    REPORTS: (60, 22, 0.414),
}


class SharingOutcome(msgspec.Struct, kw_only=True):
    """One seed. Mappings by tenant."""

    ok: dict[str, int]
    low_priority: dict[str, int]
    overshoot: dict[str, int]
    """Denied because the pool was full beyond what outranking traffic may take."""
    other: dict[str, int]
    peak_debt: dict[str, float]
    settled_debt: dict[str, float]
    """Greatest debt from SETTLED_S until reports joins."""
    least_debt: dict[str, float]
    most_inflight: int


def contract(tenant: str, created: int, tokens_per_s: float) -> Entitlement:
    """5 slots, and a token rate unless `IN_SLOTS`; only the pool limits its concurrency."""
    return Entitlement(
        name=tenant,
        model="m",
        service_class="elastic",
        slo_ms=_SLO_MS[tenant],
        baseline=(5,),
        tokens_per_s=tokens_per_s,
        created=created,
    )


def experiment(
    profile: str,
    seed: int,
    *,
    wait_cap_s: float = WAIT_CAP_S,
    tokens_per_s: float = IMPLIED_TOKENS_PER_S,
    owes_all: bool = False,
) -> SharingOutcome:
    """Run one seed. `owes_all`: see Lab."""
    terms = Terms(slots=(16,), tokens_per_s=_POOL_TOKENS_PER_S, profile=PROFILES[profile])
    tenants = [contract(COPILOT, 1, tokens_per_s), contract(SYNTH, 2, tokens_per_s)]
    engines = [spark(8), spark(8)]
    lab = Lab(terms, engines, seed, tenants=tenants, mean_slo_ms=MEAN_SLO_MS, owes_all=owes_all)
    lab.at(OUTAGE[0], lambda: lab.resize_pool(8, up=1))
    lab.at(OUTAGE[1], lambda: lab.resize_pool(16, up=2))
    lab.at(JOINS_S, lambda: lab.join(contract(REPORTS, 3, tokens_per_s)))
    for tenant in TENANTS:
        draw = _lengths(tenant, seed)
        for _ in range(_THREADS):
            thread = Thread(lab, tenant, draw, until_s=END_S, wait_cap_s=wait_cap_s)
            first_s = JOINS_S if tenant == REPORTS else 0.0
            lab.at(first_s + lab.random.uniform(0, 1), thread.ask)
    lab.run(END_S)
    return _outcome(lab)


def _lengths(tenant: str, seed: int) -> Callable[[], tuple[int, int]]:
    random, (low, high) = Random(f"{tenant}/{seed}"), _LENGTHS[tenant]

    def draw() -> tuple[int, int]:
        half = random.randint(low, high) // 2
        return half, half

    return draw


def _outcome(lab: Lab) -> SharingOutcome:
    def refused(tenant: str, *reasons: str) -> int:
        return sum(lab.count(tenant, reason) for reason in reasons)

    def debts(tenant: str, samples: Iterable[PoolMoment]) -> list[float]:
        return [s.debt[tenant] for s in samples if tenant in s.debt]

    calm = [s for s in lab.samples if SETTLED_S <= s.at_s < JOINS_S]
    return SharingOutcome(
        ok={t: sum(j.tenant == t and j.done_s >= 0 for j in lab.jobs) for t in TENANTS},
        low_priority={t: refused(t, "low priority") for t in TENANTS},
        overshoot={t: refused(t, "overshoot") for t in TENANTS},
        other={t: refused(t, "headroom", "tokens", "concurrency", "kv") for t in TENANTS},
        peak_debt={t: max(debts(t, lab.samples)) for t in TENANTS},
        settled_debt={t: max(debts(t, calm), default=0.0) for t in TENANTS},
        least_debt={t: min(debts(t, lab.samples)) for t in TENANTS},
        most_inflight=max(sum(s.inflight.values()) for s in lab.samples),
    )


_OWES_ALL: Final = "paper, debt without denial"
_WAYS: Final = {
    "paper": ("paper", WAIT_CAP_S, IMPLIED_TOKENS_PER_S),
    "default": ("default", WAIT_CAP_S, IMPLIED_TOKENS_PER_S),
    _OWES_ALL: ("paper", WAIT_CAP_S, IMPLIED_TOKENS_PER_S),
    "paper, waits as told": ("paper", RETRY_AFTER_S, IMPLIED_TOKENS_PER_S),
    "paper, 75 tokens/s": ("paper", WAIT_CAP_S, SOLD_TOKENS_PER_S),
    "default, 75 tokens/s": ("default", WAIT_CAP_S, SOLD_TOKENS_PER_S),
    "paper, in slots": ("paper", WAIT_CAP_S, IN_SLOTS),
    "default, in slots": ("default", WAIT_CAP_S, IN_SLOTS),
}
"""Profile, cap of waits, lambda_e. Those that were sold 200 tokens/s stand beside the paper."""


def rows(seeds: range, bar: Bar = no_bar) -> list[Row]:
    """Both profiles, waits as told, the rate that 5 slots make, and terms in slots alone."""
    out: list[Row] = []
    step = bar("sharing", len(seeds) * len(_WAYS))
    for name, (profile, cap_s, rate) in _WAYS.items():
        found = []
        for seed in seeds:
            one = experiment(
                *(profile, seed),
                wait_cap_s=cap_s,
                tokens_per_s=rate,
                owes_all=name == _OWES_ALL,
            )
            found.append(one)
            step()
        if rate == IMPLIED_TOKENS_PER_S:
            out += _published(f"Exp. 2, {name}", found)
        out += _asked(f"Exp. 2, {name}", found)
    return out


def _published(name: str, seeds: list[SharingOutcome]) -> Iterator[Row]:
    for tenant in TENANTS:
        ok, low, debt = _PUBLISHED[tenant]
        short = tenant.removeprefix("elastic-")
        denials = [o.low_priority[tenant] for o in seeds]
        yield over_seeds(f"{name}: answers to {short}", [o.ok[tenant] for o in seeds], ok)
        yield over_seeds(f"{name}: low-priority denials of {short}", denials, low)
        peaks = [o.peak_debt[tenant] for o in seeds]
        yield over_seeds(f"{name}: peak debt of {short}", peaks, debt)
    full = [o.overshoot[SYNTH] for o in seeds]
    said = "outranks somebody, but the pool is at its most beyond capacity"
    yield over_seeds(f"{name}: denials of synth for want of slots", full, note=said)


def _asked(name: str, seeds: list[SharingOutcome]) -> Iterator[Row]:
    copilot = max(o.low_priority[COPILOT] for o in seeds)
    synth = min(o.low_priority[SYNTH] for o in seeds)
    apart = min(o.peak_debt[SYNTH] - o.peak_debt[COPILOT] for o in seeds)
    left = max(max(o.settled_debt[t] for t in (COPILOT, SYNTH)) for o in seeds)
    every = f"in each of {len(seeds)} seeds"
    yield equals(f"{name}: low-priority denials of copilot, worst seed", copilot, 0)
    yield above(f"{name}: low-priority denials of synth, least", synth, 0, every)
    yield above(f"{name}: synth's peak debt above copilot's, least", apart, 0, every)
    metric = f"{name}: greatest debt of both from {SETTLED_S:g} s on"
    yield at_most(metric, left, 0.03, f"until reports joins at {JOINS_S:g} s")
