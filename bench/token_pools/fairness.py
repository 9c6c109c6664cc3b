"""Constant overload: every elastic entitlement with a baseline must be admitted repeatedly.

A guaranteed tenant that fills its 4 slots, elastic tenants whose SLOs lie three orders of
magnitude apart, each with twice as many threads as baseline slots, and a flood of spot share
16 slots; all clients wait as told. The bench measures the longest time that an elastic tenant
goes without an admission, in ticks of 5 s, and each tenant's share of its baseline.
"""

from itertools import pairwise, product
from random import Random
from statistics import mean
from typing import Final

import msgspec

from bench.common.report import Bar, Row, at_most, no_bar, quantile, without_target
from bench.token_pools.lab import RETRY_AFTER_S, SLOTS, Lab, Thread, spark
from gateway.admission.terms import Terms
from gateway.records.entitlement import PROFILES, Entitlement

MAX_TICKS = 20
"""The longest drought asked for. Seven ticks take a debt above .9; and who asks again may have
been told to wait for a minute, twelve ticks."""
_SLO_MS: Final = {"urgent": 200, "quick": 2_000, "patient": 20_000, "careless": 200_000}
_TOKENS_PER_S = 240.0
_LENGTH_S = 900.0
_WARM_S = 60.0


class Shares(msgspec.Struct, kw_only=True):
    """One seed. Mappings by elastic tenant."""

    drought_ticks: dict[str, float]
    rate: dict[str, float]
    """Tokens/s settled, as a share of lambda_e."""
    peak_debt: dict[str, float]
    over: int
    """Most sequences in flight."""
    use: float
    """Mean share of the slots that run."""


def experiment(
    profile: str, seed: int, *, baseline: int = 4, length_s: float = _LENGTH_S
) -> Shares:
    """Run one seed; the elastic baselines add up to 4 x `baseline` of 12 slots."""
    lab = _lab(profile, seed, baseline, length_s)
    lab.run(length_s)
    tick_s = PROFILES[profile].tick_s
    drought, rate = {}, {}
    for name in _SLO_MS:
        jobs = [j for j in lab.jobs if j.tenant == name]
        times = [_WARM_S, *(j.asked_s for j in jobs if j.asked_s > _WARM_S), length_s]
        drought[name] = max(b - a for a, b in pairwise(times)) / tick_s
        tokens = sum(j.prompt_tokens + j.emitted for j in jobs if j.done_s > _WARM_S)
        rate[name] = tokens / (length_s - _WARM_S) / (_TOKENS_PER_S * baseline / SLOTS)
    warm = [s for s in lab.samples if s.at_s >= _WARM_S]
    return Shares(
        drought_ticks=drought,
        rate=rate,
        peak_debt={name: max(s.debt[name] for s in warm) for name in _SLO_MS},
        over=max(sum(s.inflight.values()) for s in warm),
        use=mean(s.running for s in warm) / SLOTS,
    )


def _lab(profile: str, seed: int, baseline: int, length_s: float) -> Lab:
    elastic = [
        Entitlement(
            name=name,
            model="m",
            slo_ms=slo_ms,
            baseline=(baseline,),
            tokens_per_s=_TOKENS_PER_S * baseline / SLOTS,
            created=2 + n,
        )
        for n, (name, slo_ms) in enumerate(_SLO_MS.items())
    ]
    firm = Entitlement(name="firm", model="m", service_class="guaranteed", baseline=(4,), created=1)
    spot = Entitlement(name="flood", model="m", service_class="spot", created=9)
    terms = Terms(slots=(SLOTS,), tokens_per_s=_TOKENS_PER_S, profile=PROFILES[profile])
    lab = Lab(terms, [spark()], seed, tenants=[firm, *elastic, spot])
    draw = Random(f"fairness/{seed}")

    def lengths() -> tuple[int, int]:
        half = draw.randint(16, 88)
        return half, half

    for tenant in [firm, *elastic, spot]:
        for _ in range(4 if tenant is firm else 2 * max(baseline, 8)):
            thread = Thread(lab, tenant.name, lengths, until_s=length_s, wait_cap_s=RETRY_AFTER_S)
            lab.at(lab.random.uniform(0, 5), thread.ask)
    return lab


def rows(seeds: range, bar: Bar = no_bar) -> list[Row]:
    """Both profiles, baselines that fit into the slots left and that are oversold.

    Profile `paper` is shown as published; the target is for `default`.
    """
    out: list[Row] = []
    step = bar("overload", 2 * len(BASELINES) * len(seeds))
    for profile, baseline in product(("paper", "default"), BASELINES):
        found = []
        for seed in seeds:
            found.append(experiment(profile, seed, baseline=baseline))
            step()
        name = f"Overload, {profile}, baselines {4 * baseline} of {SLOTS - 4} slots"
        worst = [max(s.drought_ticks.values()) for s in found]
        rates = {t: 100 * mean(s.rate[t] for s in found) for t in _SLO_MS}
        use = f"{100 * mean(s.use for s in found):.1f} % of the slots in use"
        said = f"middle of {len(found)} seeds {quantile(worst, 0.5):.3g}; {use}"
        row = at_most(f"{name}: longest drought, ticks", max(worst), MAX_TICKS, said)
        out.append(without_target(row) if profile == "paper" else row)
        metric = f"{name}: least of lambda_e that a tenant gets, %"
        out.append(
            Row(metric, min(rates.values()), ", ".join(f"{t} {r:.0f}" for t, r in rates.items()))
        )
    return out


BASELINES = (3, 4, 12)
