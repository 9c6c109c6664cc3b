"""Metrics of each model's estimator, boundaries and schedulers."""

from collections.abc import Iterator, Sequence
from typing import Final

from gateway.control.exposition import Family, gauge
from gateway.fleet.model_runtime import ModelRuntime
from gateway.scheduling.scheduler import PRIORITY_CLASS_NAMES

BY_POOL: Final = ("model", "pool")
MAX_SHOWN: Final = 1000
"""Most adapters of a model with a row of their own."""


def learned(models: Sequence[ModelRuntime]) -> Iterator[Family]:
    """Values that estimators learned, and usage reports that they ignored."""
    yield gauge(
        "sluice_bytes_per_token",
        "Learned ratio.",
        ("model", "category"),
        [
            ((served.name, category), state["mean"])
            for served in models
            for category, state in served.estimator.snapshot()["categories"].items()
        ],
    )
    yield Family(
        name="sluice_usage_ignored",
        help="Parts of usage reports that taught nothing.",
        labels=("model", "reason"),
        rows=[
            ((served.name, reason), times)
            for served in models
            for reason, times in served.estimator.ignored.items()
        ],
        type="counter",
    )


def boundaries(models: Sequence[ModelRuntime]) -> Iterator[Family]:
    """Positions of boundaries, and the figures that move them."""
    yield gauge(
        "sluice_boundary_tokens",
        "Totals up to this belong to the pool.",
        BY_POOL,
        [
            ((served.name, shape.name), shape.boundary_tokens)
            for served in models
            for shape in served.routing.pools
            if shape.boundary_tokens is not None
        ],
    )
    yield gauge(
        "sluice_pool_beyond_window_tokens",
        "Most tokens served in one sequence beyond the configured window; 0: none.",
        BY_POOL,
        [
            ((served.name, pool.name), pool.beyond_window_tokens)
            for served in models
            for pool in served.fleet.pools
        ],
    )
    compressing = [(m.name, m.compression) for m in models if m.compression is not None]
    yield gauge(
        "sluice_gamma",
        "Totals up to gamma x boundary may be compressed.",
        ("model",),
        [((name,), compression.rules.gamma) for name, compression in compressing],
    )
    yield gauge(
        "sluice_compression_success_ratio",
        "Of the latest prompts in the compression window, those that were cut (p_c).",
        ("model",),
        [
            ((name,), compression.success)
            for name, compression in compressing
            if compression.success is not None
        ],
    )
    watched = [(served, served.watch) for served in models if served.watch is not None]
    yield gauge(
        "sluice_boundary_error_ratio",
        "Preempted, rescued and overrun requests of all, where boundaries move.",
        BY_POOL,
        [
            ((served.name, pool.name), share)
            for served, watch in watched
            for pool, share in zip(served.fleet.pools, watch.shares, strict=False)
        ],
    )
    yield gauge(
        "sluice_length_drift",
        "Largest distance between live and planned shares of requests by length.",
        ("model",),
        [
            ((served.name,), watch.drift.distance)
            for served, watch in watched
            if watch.drift is not None and watch.drift.distance is not None
        ],
    )


def adapters(models: Sequence[ModelRuntime], now_s: float) -> Iterator[Family]:
    """Workers for each LoRA adapter."""
    yield gauge(
        "sluice_lora_workers",
        "Workers in the rotation that have the LoRA adapter.",
        ("model", "adapter"),
        [
            ((served.name, name), served.adapters.ready(name, served.fleet.pools, now_s))
            for served in models
            for name in served.adapters.names[:MAX_SHOWN]
        ],
    )


def schedulers(models: Sequence[ModelRuntime]) -> Iterator[Family]:
    """Queue depths, accuracy of prefill predictions, preemptions by engines."""
    by_name = [
        ((served.name, pool.name), scheduler)
        for served in models
        for pool, scheduler in zip(served.fleet.pools, served.scheduling.schedulers, strict=False)
        if scheduler is not None
    ]
    yield gauge(
        "sluice_queue_depth",
        "Requests that wait in the gateway for a worker.",
        (*BY_POOL, "band"),
        [
            ((*names, priority_class), waiting)
            for names, scheduler in by_name
            for priority_class, waiting in zip(PRIORITY_CLASS_NAMES, scheduler.waiting, strict=True)
        ],
    )
    yield gauge(
        "sluice_predictor_coverage",
        "Share of recent prefills within their predicted quantile.",
        BY_POOL,
        [
            (names, coverage)
            for names, scheduler in by_name
            if (coverage := scheduler.coverage) is not None
        ],
    )
    yield Family(
        name="sluice_preemptions",
        help="Sequences that engines lost their memory for, as they say.",
        labels=BY_POOL,
        rows=[
            ((served.name, pool.name), view.preemptions)
            for served in models
            for pool, view in zip(served.fleet.pools, served.fleet.telemetry, strict=False)
        ],
        type="counter",
    )
