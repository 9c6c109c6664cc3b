"""The engine's state as Prometheus text under SGLang's names."""

from collections.abc import Callable
from typing import Final

from simulator.engine.engine import Engine
from simulator.mock_server.driver import Driver
from simulator.mock_server.metrics import Exposition, MockHistogram, RankMetrics

_VALUES: Final[tuple[tuple[str, str, str, Callable[[Engine], float]], ...]] = (
    ("num_running_reqs", "gauge", "The number of running requests.", lambda e: e.running),
    (
        "num_queue_reqs",
        "gauge",
        "The number of requests in the waiting queue.",
        lambda e: e.waiting,
    ),
    ("token_usage", "gauge", "The token usage.", lambda e: e.kv_usage),
    (
        "cache_hit_rate",
        "gauge",
        "The prefix cache hit rate.",
        lambda e: e.prefix_hits_total / max(1, e.prefix_queries_total),
    ),
    (
        "prompt_tokens_total",
        "counter",
        "Number of prefill tokens processed.",
        lambda e: e.prompt_tokens_total,
    ),
    (
        "generation_tokens_total",
        "counter",
        "Number of generation tokens processed.",
        lambda e: e.generation_tokens_total,
    ),
    (
        "cached_tokens_total",
        "counter",
        "Number of cached prompt tokens.",
        lambda e: e.prefix_hits_total,
    ),
    (
        "num_retracted_requests_total",
        "counter",
        "Number of retracted requests.",
        lambda e: e.preemptions_total,
    ),
)


_HISTOGRAMS: Final[tuple[tuple[str, str, str, Callable[[RankMetrics], MockHistogram]], ...]] = (
    ("queue_time_seconds", "", "Histogram of queueing time in seconds.", lambda m: m.queue_s),
    (
        "per_stage_req_latency_seconds",
        ',stage="prefill_forward"',
        "The latency of each stage of requests.",
        lambda m: m.prefill_s,
    ),
)


def render_sglang(driver: Driver) -> bytes:
    """SGLang's page under --enable-metrics, each rank under its own `dp_rank` label."""
    text = Exposition()
    model = driver.config.model.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    for name, kind, help_text, value in _VALUES:
        text.add(
            f"sglang:{name}",
            kind,
            help_text,
            [
                (f'dp_rank="{index}",model_name="{model}"', value(rank.engine))
                for index, rank in enumerate(driver.ranks)
            ],
        )
    for name, label, help_text, histogram in _HISTOGRAMS:
        text.add_histogram(
            [
                (
                    f'dp_rank="{index}",model_name="{model}"{label}',
                    histogram(rank.metrics).named(f"sglang:{name}", help_text),
                )
                for index, rank in enumerate(driver.ranks)
            ]
        )
    return text.render()
