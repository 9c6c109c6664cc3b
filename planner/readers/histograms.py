"""Workloads from vLLM's own histograms; only running engines are needed.

`vllm:request_prompt_tokens`, `vllm:request_generation_tokens` and
`vllm:request_params_max_tokens` count requests by length. They do not say which prompt had which
answer, so lengths are taken as independent and limits as growing with answers. Requests are
spread evenly over a bucket. A log with both lengths is more accurate.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec
import numpy as np

from planner.errors import PlanError
from planner.workload.workload import Floats, Workload, from_lengths

PROMPTS: Final = "vllm:request_prompt_tokens"
ANSWERS: Final = "vllm:request_generation_tokens"
LIMITS: Final = "vllm:request_params_max_tokens"
CACHE_QUERIES: Final = "vllm:prefix_cache_queries_total"
CACHE_HITS: Final = "vllm:prefix_cache_hits_total"
PREEMPTIONS: Final = "vllm:num_preemptions_total"
HISTOGRAMS: Final = (PROMPTS, ANSWERS, LIMITS)
COUNTERS: Final = (CACHE_QUERIES, CACHE_HITS, PREEMPTIONS)

_LINE: Final = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)")
_LE: Final = re.compile(r'(?:^|,)\s*le="([^"]+)"')
_PARTS: Final = 4
_INDEPENDENT: Final = (
    "histograms do not say which prompt had which answer: they are taken as independent; plan "
    "from a request log when there is one"
)
_FIX: Final = "point it at vLLM engines that have served requests"


class Counts(msgspec.Struct, frozen=True):
    """Cumulative requests by upper edge (tokens), and counters; summed over engines."""

    buckets: Mapping[str, Mapping[float, float]]
    counters: Mapping[str, float]


def parse_metrics(texts: Iterable[str]) -> Counts:
    """Read pages of /metrics, summed over engines and pages."""
    buckets: dict[str, dict[float, float]] = {name: {} for name in HISTOGRAMS}
    counters: dict[str, float] = {}
    for text in texts:
        for line in text.splitlines():
            match = _LINE.match(line)
            if match is None:
                continue
            name, labels, value = match.groups()
            histogram = name.removesuffix("_bucket")
            edge = _LE.search(labels or "")
            if edge is not None and histogram in buckets:
                _add(buckets[histogram], float(edge[1]), float(value))
            elif name in COUNTERS:
                counters[name] = counters.get(name, 0.0) + float(value)
    return Counts(buckets, counters)


def parse_prometheus(answers: Mapping[str, Any]) -> Counts:
    """Read answers of Prometheus' /api/v1/query by metric, `sum by (le)` for histograms."""
    buckets: dict[str, dict[float, float]] = {name: {} for name in HISTOGRAMS}
    counters: dict[str, float] = {}
    for name, answer in answers.items():
        for series in answer.get("data", {}).get("result", []):
            value = float(series["value"][1])
            if name in buckets:
                _add(buckets[name], float(series["metric"].get("le", "inf")), value)
            else:
                counters[name] = counters.get(name, 0.0) + value
    return Counts(buckets, counters)


def from_counts(counts: Counts, *, name: str = "metrics") -> Workload:
    """A workload of independent prompt and answer lengths; raises PlanError without requests."""
    for needed in (PROMPTS, ANSWERS):
        if max(counts.buckets.get(needed, {}).values(), default=0.0) <= 0:
            raise PlanError(f"{name} has no requests in {needed}", _FIX)
    prompts, prompt_mass = _cells(counts.buckets[PROMPTS])
    answers, answer_mass = _cells(counts.buckets[ANSWERS])
    total = counts.buckets[PROMPTS]
    requests = max(total.values())
    limits = counts.buckets.get(LIMITS, {})
    asked = None
    if max(limits.values(), default=0.0) > 0:
        asked = np.tile(_matched(limits, answers, answer_mass), prompts.size)
    queries = counts.counters.get(CACHE_QUERIES, 0.0)
    preempted = counts.counters.get(PREEMPTIONS)
    workload = from_lengths(
        np.repeat(prompts, answers.size),
        np.tile(answers, prompts.size),
        name=name,
        source=f"vLLM histograms of {requests:.0f} requests",
        weights=np.outer(prompt_mass, answer_mass).ravel(),
        asked=asked,
        cached_share=counts.counters.get(CACHE_HITS, 0.0) / queries if queries else None,
        notes=(_INDEPENDENT,),
    )
    share = None if preempted is None else preempted / requests
    return msgspec.structs.replace(workload, preempted_share=share)


def _add(buckets: dict[float, float], edge: float, value: float) -> None:
    if np.isfinite(value):
        buckets[edge] = buckets.get(edge, 0.0) + value


def _cells(buckets: Mapping[float, float]) -> tuple[Floats, Floats]:
    """Lengths and shares: each bucket is cut in _PARTS; the tail counts at the last edge."""
    edges = np.array(sorted(buckets))
    mass = np.diff(np.maximum.accumulate([buckets[e] for e in edges]), prepend=0.0)
    finite = np.isfinite(edges)
    top = edges[finite][-1] if finite.any() else 1.0
    highs = np.where(finite, edges, top)
    lows = np.concatenate(([0.0], highs[:-1]))
    steps = (np.arange(_PARTS) + 0.5) / _PARTS
    lengths = (lows[:, None] + (highs - lows)[:, None] * steps).ravel()
    shares = np.repeat(mass / mass.sum() / _PARTS, _PARTS)
    positive = shares > 0
    return np.maximum(np.ceil(lengths[positive]), 1.0), shares[positive]


def _matched(limits: Mapping[float, float], answers: Floats, mass: Floats) -> Floats:
    """A limit for each answer, matched by rank and never below the answer."""
    asked, asked_mass = _cells(limits)
    order = np.argsort(answers, kind="stable")
    rank = np.empty(answers.size)
    rank[order] = np.cumsum(mass[order]) - mass[order] / 2
    by_rank = asked[np.searchsorted(np.cumsum(asked_mass), rank).clip(max=asked.size - 1)]
    return np.asarray(np.maximum(by_rank, answers))
