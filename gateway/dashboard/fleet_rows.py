"""Pools and workers of all models as the dashboard shows them."""

from collections.abc import Sequence
from operator import itemgetter
from typing import Any, Final

from gateway.dashboard.view import View, page_of
from gateway.fleet import members
from gateway.fleet.engine_telemetry import STALE_S, EngineSample
from gateway.fleet.model_runtime import ModelRuntime

Row = dict[str, Any]
_STATE_ORDER: Final = ("down", "ejected", "draining", "up")


def pool_rows(served: ModelRuntime, described: Row) -> list[Row]:
    """One row a pool, with its queue, the predictor's coverage and how many workers serve."""
    schedulers = served.scheduling.schedulers or (None,) * len(described["pools"])
    rows = []
    for pool, scheduler in zip(described["pools"], schedulers, strict=True):
        workers = pool["workers"]
        admission = pool["admission"] or {}
        rows.append(
            {
                "model": described["model"],
                "pool": pool["name"],
                "boundary": pool["b_short"],
                "window": pool["max_model_len"],
                "inflight": pool["inflight"],
                "slots": pool["ready_slots"],
                "kv_bytes": admission.get("kv_bytes"),
                "kv_capacity_bytes": admission.get("kv_capacity_bytes"),
                "queue": 0 if scheduler is None else sum(scheduler.waiting),
                "queue_by_class": None if scheduler is None else list(scheduler.waiting),
                "coverage": None if scheduler is None else scheduler.coverage,
                "desired": admission.get("desired_replicas") or None,
                "denied": admission.get("denied"),
                "workers": len(workers),
                "ready": sum(worker["in_rotation"] for worker in workers),
            }
        )
    return rows


def worker_rows(served: ModelRuntime, described: Row, now_s: float) -> list[Row]:
    """One row a worker, with its engine's own figures where those are read."""
    views, predictors = served.fleet.telemetry, served.scheduling.predictors
    rows = []
    for index, pool in enumerate(described["pools"]):
        view = views[index] if views else None
        predictor = predictors[index] if predictors else None
        # Workers may have left since they were described.
        places = {name: place for place, name in members.present(served.fleet.pools[index])}
        for worker in pool["workers"]:
            at, sample = places.get(worker["id"]), None
            if view is not None and at is not None and now_s - view.stamped_s[at] <= STALE_S:
                sample = view.samples[at]
            rows.append(
                {
                    "worker": worker["id"],
                    "model": described["model"],
                    "pool": pool["name"],
                    "state": _state(worker),
                    "why": worker["not_ready"],
                    "active": worker["active_sequences"],
                    "slots": pool["max_num_seqs"],
                    "tokens": worker["reserved_tokens"],
                    "kv": None if sample is None else sample.kv_usage,
                    "hit_rate": None if sample is None else _hit_rate(sample),
                    "slowness": None if predictor is None or at is None else predictor.slowness(at),
                }
            )
    return rows


def _state(worker: Row) -> str:
    if worker["draining"]:
        return "draining"
    if not worker["up"]:
        return "down"
    return "ejected" if worker["ejected_for_s"] > 0 else "up"


def _hit_rate(sample: EngineSample) -> float | None:
    """Share of looked-up tokens that the engine found in its prefix cache, since its start."""
    queries, hits = sample.prefix_queries_total, sample.prefix_hits_total
    if queries and hits is not None:
        return hits / queries
    return sample.hit_rate


def workers_page(rows: Sequence[Row], view: View) -> Row:
    """The page of workers that a viewer looks at."""
    text = view.workers
    found = [
        row
        for row in rows
        if not text or text in f"{row['model']} {row['pool']} {row['worker']} {row['state']}"
    ]
    if view.workers_order == "load":
        found.sort(key=lambda row: (-row["active"], row["worker"]))
    elif view.workers_order == "name":
        found.sort(key=itemgetter("worker"))
    else:
        found.sort(key=lambda row: (_STATE_ORDER.index(row["state"]), row["worker"]))
    return page_of(found, len(rows), view.workers_page, dict)
