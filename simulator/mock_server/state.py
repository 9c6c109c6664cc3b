"""The engine's state as Prometheus text under vLLM's names, plus `mock_*`; or under SGLang's."""

from collections.abc import Callable
from typing import Final

from simulator.engine.engine import Engine
from simulator.mock_server.driver import Driver
from simulator.mock_server.metrics import Exposition, MockHistogram, RankMetrics

_GAUGES: tuple[tuple[str, str, str, Callable[[Engine], float]], ...] = (
    (
        "vllm:num_requests_running",
        "gauge",
        "Number of requests in model execution batches.",
        lambda e: e.running,
    ),
    (
        "vllm:num_requests_waiting",
        "gauge",
        "Number of requests waiting to be processed.",
        lambda e: e.waiting,
    ),
    (
        "vllm:kv_cache_usage_perc",
        "gauge",
        "KV-cache usage. 1 means 100 percent usage.",
        lambda e: e.kv_usage,
    ),
    (
        "vllm:prefix_cache_queries_total",
        "counter",
        "Prefix cache queries, in tokens.",
        lambda e: e.prefix_queries_total,
    ),
    (
        "vllm:prefix_cache_hits_total",
        "counter",
        "Prefix cache hits, in tokens.",
        lambda e: e.prefix_hits_total,
    ),
    (
        "vllm:external_prefix_cache_hits_total",
        "counter",
        "External prefix cache hits from KV connector cross-instance cache sharing, in tokens.",
        lambda e: e.remote_hits_total,
    ),
    (
        "vllm:num_preemptions_total",
        "counter",
        "Cumulative number of preemptions.",
        lambda e: e.preemptions_total,
    ),
    (
        "vllm:prompt_tokens_total",
        "counter",
        "Number of prefill tokens processed.",
        lambda e: e.prompt_tokens_total,
    ),
    (
        "vllm:generation_tokens_total",
        "counter",
        "Number of generation tokens processed.",
        lambda e: e.generation_tokens_total,
    ),
)


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def render_metrics(driver: Driver, loras: tuple[str, float] | None = None) -> bytes:
    """All metrics, each rank under its own `engine` label; `loras`: labels and value."""
    model = _escape(driver.config.model)
    labels = [f'engine="{i}",model_name="{model}"' for i in range(len(driver.ranks))]
    ranks = list(zip(labels, driver.ranks, strict=True))
    text = Exposition()
    for name, kind, help_text, value in _GAUGES:
        text.add(name, kind, help_text, [(label, value(r.engine)) for label, r in ranks])
    text.add(
        "vllm:request_success_total",
        "counter",
        "Count of processed requests.",
        [
            (f'{label},finished_reason="{reason}"', number)
            for label, rank in ranks
            for reason, number in rank.metrics.success.items()
        ],
    )
    profile = driver.config.profile
    caching = profile.prefix_cache_tokens != 0
    blocks = (
        f'block_size="{profile.block_tokens}",enable_prefix_caching="{caching}",'
        f'num_gpu_blocks="{profile.kv_blocks}"'
    )
    text.add(
        "vllm:cache_config_info",
        "gauge",
        "Information of the LLMEngine CacheConfig.",
        [(f'{blocks},engine="{index}"', 1.0) for index in range(len(ranks))],
    )
    if loras is not None:
        text.add("vllm:lora_requests_info", "gauge", "Running stats on lora requests.", [loras])
    by_rank = [rank.metrics.histograms for rank in driver.ranks]
    for same in zip(*by_rank, strict=True):
        text.add_histogram(list(zip(labels, same, strict=True)))
    text.add(
        "mock_barrier_wait_seconds_total",
        "counter",
        "Model seconds that a rank waited for the slowest one.",
        list(zip(labels, driver.group.waited_s, strict=True)),
    )
    _add_own(text, driver, f'model_name="{model}"')
    return text.render()


def _add_own(text: Exposition, driver: Driver, label: str) -> None:
    text.add_histogram([(label, driver.lag.histogram)])
    p50, p99 = driver.lag.quantiles()
    for quantile, value in (("p50", p50), ("p99", p99)):
        text.add(
            f"mock_lag_{quantile}_seconds",
            "gauge",
            f"The {quantile} of mock_lag_seconds over the last 4,096 writes.",
            [(label, value)],
        )
    text.add(
        "mock_aborted_total",
        "counter",
        "Sequences dropped because the client left.",
        [(label, driver.aborted_total)],
    )
    for name, text_, value in (
        ("num_kv_expired_reqs", "KV that expired before it was fetched.", driver.kv.expired),
        ("num_notifications_after_expiry", "Fetches of expired KV.", driver.kv.late),
        ("num_failed_transfers", "Number of failed NIXL KV cache transfers.", driver.kv.failed),
    ):
        text.add(f"vllm:nixl_{name}_total", "counter", text_, [(f'engine="0",{label}', value)])


_SGLANG_VALUES: Final[tuple[tuple[str, str, str, Callable[[Engine], float]], ...]] = (
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


_SGLANG_HISTOGRAMS: Final[
    tuple[tuple[str, str, str, Callable[[RankMetrics], MockHistogram]], ...]
] = (
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
    model = _escape(driver.config.model)
    for name, kind, help_text, value in _SGLANG_VALUES:
        text.add(
            f"sglang:{name}",
            kind,
            help_text,
            [
                (f'dp_rank="{index}",model_name="{model}"', value(rank.engine))
                for index, rank in enumerate(driver.ranks)
            ],
        )
    for name, label, help_text, histogram in _SGLANG_HISTOGRAMS:
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
