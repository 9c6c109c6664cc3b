"""Whether a refused burst completes: the official client's retry rules on the shipped waits.

One entitlement with a token bucket; a burst of requests at one moment asks for 1.5 to 5 times
the bucket's content. Refused requests follow openai-python 3: two retries, after
`retry-after-ms`, else `retry-after` (both up to two minutes, beyond that none at all), else
.5 s x 2^n up to 8 s less up to a quarter. A second variant has no promises: the gateway forgets
the waits that it told earlier refusals.
"""

from collections.abc import Mapping
from heapq import heappop, heappush
from random import Random
from statistics import mean

from bench.common.report import Bar, Row, judged, no_bar, without_target
from bench.token_pools.lab import EPOCH_S
from gateway.admission import admission
from gateway.admission.denials import retry_after_s
from gateway.admission.terms import AdmissionRequest, Denial, Terms
from gateway.admission.token_pool import BUCKET_S, TokenPool
from gateway.records.entitlement import Entitlement

BURSTS = (1.5, 2.0, 3.0, 5.0)
RETRIES = 2
MAX_RETRY_AFTER_S = 120.0
_FIRST_S, _MAX_S, _SPREAD = 0.5, 8.0, 0.25
_RATE = 1_000.0
_TOKENS = 100
_FITS = int(BUCKET_S * _RATE) // _TOKENS
"""Requests that a full bucket pays."""


def client_wait_s(headers: Mapping[str, str], retry: int, jitter: float) -> float | None:
    """Seconds before retry number `retry` (from 0) of a 429, `jitter` in [0, 1]; None: no retry."""
    for name, unit in (("retry-after-ms", 1_000), ("retry-after", 1)):
        if name not in headers:
            continue
        wait_s = float(headers[name]) / unit
        if wait_s > MAX_RETRY_AFTER_S:
            return None
        if wait_s > 0:
            return wait_s
        break
    return min(_FIRST_S * 2.0**retry, _MAX_S) * (1 - _SPREAD * jitter)


def burst(times: float, seed: int, *, promises: bool) -> float:
    """Share of a burst that completes within the client's retries."""
    draw = Random(f"retries/{times}/{seed}")
    token_pool = TokenPool(Terms(slots=(1 << 20,)))
    account = token_pool.define(
        Entitlement(
            name="e",
            model="m",
            tokens_per_s=_RATE,
            tokens_per_s_limit=_RATE,
            limit=_FITS // 2,
            created=1,
        )
    )
    count = round(times * _FITS)
    waiting = [(0.0, n, 0) for n in range(count)]
    completed = 0
    while waiting:
        at_s, n, retry = heappop(waiting)
        if not promises:
            account.promised = 0.0
        request = AdmissionRequest(
            lease_id=f"{n}/{retry}", entitlement="e", pool=0, estimate_tokens=_TOKENS
        )
        found = admission.admit(token_pool, request, EPOCH_S + at_s, observe=False)
        if not isinstance(found, Denial):
            admission.settle(token_pool, request.lease_id, _TOKENS, EPOCH_S + at_s)
            completed += 1
            continue
        wait = retry_after_s(found.wait_s, draw.random())
        headers = {"retry-after": f"{wait}", "retry-after-ms": f"{wait * 1_000}"}
        wait_s = client_wait_s(headers, retry, draw.random())
        if wait_s is not None and retry < RETRIES:
            heappush(waiting, (at_s + wait_s, n, retry + 1))
    return completed / count


def rows(seeds: range, bar: Bar = no_bar) -> list[Row]:
    """Completion of each burst, with promises and without."""
    out: list[Row] = []
    step = bar("retries", len(BURSTS))
    for times in BURSTS:
        told = [100 * burst(times, seed, promises=True) for seed in seeds]
        same = [100 * burst(times, seed, promises=False) for seed in seeds]
        name = f"Retry-After, burst of {times:g} x the bucket"
        note = f"worst of {len(seeds)} seeds {min(told):.4g} %"
        row = judged(f"{name}: completed, %", mean(told), "= 100", min(told) == 100, note)
        out.append(row if times <= 3.0 else without_target(row))
        note = "(depth + what two seconds refill) / burst"
        out.append(Row(f"{name}: completed were all told the same, %", mean(same), note))
        step()
    return out
