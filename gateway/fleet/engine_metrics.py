"""Read an engine's pages: its metrics, the models that it serves, its KV cache, its sleep.

Rules for /metrics, where vLLM and SGLang have names of their own for the same metrics:
- One C pass over the page finds the wanted lines; most of a page is histograms.
- Samples of one name are summed over their labels (an engine lists each data-parallel rank);
  shares are averaged. Of several names for one metric, the first of `ALIASES` on the page counts.
- A value that is not a finite number >= 0 is ignored.
- Readings only supplement `PoolState`, which counts the requests that this gateway has in flight
  and is authoritative between two readings. No decision waits for a reading.
- No pattern takes more than linear time, whatever an engine writes: pages may have megabytes.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import msgspec

STALE_S: Final = 5.0

_SAME_START_S: Final = 1.0


@dataclass(frozen=True, kw_only=True)
class EngineSample:
    """One reading of an engine, summed over its data-parallel ranks; None if not reported."""

    running: float | None = None
    """Sequences in its batches."""
    waiting: float | None = None
    """Sequences in its queues."""
    kv_usage: float | None = None
    """Share of the KV cache in use, 0 to 1; the mean over its ranks."""
    prefix_queries_total: float | None = None
    """Tokens looked up in the prefix cache."""
    prefix_hits_total: float | None = None
    """Tokens found in the prefix cache."""
    hit_rate: float | None = None
    """Share of tokens found, 0 to 1; for engines that report no counters."""
    preemptions_total: float | None = None
    prompt_tokens_total: float | None = None
    generation_tokens_total: float | None = None
    finished_total: float | None = None
    """Requests that it answered, from any sender."""
    started_unix_s: float | None = None
    """Start time of its process, in Unix seconds."""
    engine: str = ""
    """The engine whose metrics its page has: vllm or sglang; empty if it has neither."""


_COUNTERS: Final = (
    "prefix_queries_total",
    "prompt_tokens_total",
    "generation_tokens_total",
    "preemptions_total",
)


class TelemetryView:
    """The latest readings of one pool's workers, by place, where there are any."""

    def __init__(self) -> None:
        self.samples: dict[int, EngineSample] = {}
        self.stamped_s: dict[int, float] = {}
        """Time of each reading, on the clock of `now_s`."""
        self.preemptions = 0.0
        """Preemptions of all workers since the gateway started; never falls."""
        self.finished = 0.0
        """Requests that they all answered since then, from any sender; never falls."""

    def fresh(self, worker: int, now_s: float, stale_s: float = STALE_S) -> EngineSample | None:
        """A worker's reading; None if it is stale, or if there is none."""
        sample = self.samples.get(worker)
        return None if sample is None or now_s - self.stamped_s[worker] > stale_s else sample

    def forget(self, worker: int) -> None:
        """Drop a worker's reading: it is gone."""
        self.samples.pop(worker, None)
        self.stamped_s.pop(worker, None)


def record(view: TelemetryView, worker: int, sample: EngineSample, now_s: float) -> bool:
    """Store a reading; True if the engine restarted since the previous one."""
    before = view.samples.get(worker)
    view.samples[worker], view.stamped_s[worker] = sample, now_s
    if before is None:
        return False
    began, begins = before.started_unix_s, sample.started_unix_s
    again = (began is not None and begins is not None and abs(begins - began) > _SAME_START_S) or (
        any(
            old is not None and new is not None and new < old
            for old, new in ((getattr(before, name), getattr(sample, name)) for name in _COUNTERS)
        )
    )
    view.preemptions += _rise(before.preemptions_total, sample.preemptions_total, again)
    view.finished += _rise(before.finished_total, sample.finished_total, again)
    return again


def _rise(before: float | None, now: float | None, again: bool) -> float:  # noqa: FBT001
    """How much a counter rose; `again`: it began anew."""
    since = 0.0 if again else before
    return 0.0 if now is None or since is None else max(0.0, now - since)


def kv_usage(
    view: TelemetryView, worker: int, now_s: float, stale_s: float = STALE_S
) -> float | None:
    """Share of a worker's KV cache in use, 0 to 1; None if stale or not reported."""
    sample = view.fresh(worker, now_s, stale_s)
    return None if sample is None else sample.kv_usage


ALIASES: Final[Mapping[str, tuple[str, ...]]] = {
    "running": ("vllm:num_requests_running", "sglang:num_running_reqs"),
    "waiting": ("vllm:num_requests_waiting", "sglang:num_queue_reqs"),
    "kv_usage": (
        "vllm:kv_cache_usage_perc",
        "vllm:gpu_cache_usage_perc",
        "sglang:token_usage",
    ),
    "prefix_queries_total": (
        "vllm:prefix_cache_queries_total",
        "vllm:prefix_cache_queries",
        "vllm:gpu_prefix_cache_queries_total",
        "vllm:gpu_prefix_cache_queries",
    ),
    "prefix_hits_total": (
        "vllm:prefix_cache_hits_total",
        "vllm:prefix_cache_hits",
        "vllm:gpu_prefix_cache_hits_total",
        "vllm:gpu_prefix_cache_hits",
        "sglang:cached_tokens_total",
    ),
    "hit_rate": ("sglang:cache_hit_rate", "vllm:gpu_prefix_cache_hit_rate"),
    "preemptions_total": (
        "vllm:num_preemptions_total",
        "vllm:num_preemptions",
        "sglang:num_retracted_requests_total",
        "sglang:num_retracted_reqs_total",
    ),
    "prompt_tokens_total": (
        "vllm:prompt_tokens_total",
        "vllm:prompt_tokens",
        "sglang:prompt_tokens_total",
    ),
    "generation_tokens_total": (
        "vllm:generation_tokens_total",
        "vllm:generation_tokens",
        "sglang:generation_tokens_total",
    ),
    "finished_total": (
        "vllm:request_success_total",
        "vllm:request_success",
        "sglang:num_requests_total",
    ),
    "started_unix_s": ("process_start_time_seconds",),
}
"""Field of `EngineSample` -> names of the metric, current ones first."""

NEEDED: Final = ("running", "waiting", "kv_usage")
"""Fields that every engine is expected to report."""

_ENGINES: Final = ("vllm", "sglang")
_SHARES: Final = frozenset({"kv_usage", "hit_rate"})
_ADAPTERS: Final = b"vllm:lora_requests_info{"
_ADAPTER_LINE: Final = re.compile(
    rb"(?m)^vllm:lora_requests_info\{([^\n]{0,65536})\}[ \t]+(\S{1,32})"
)
_KV: Final = "vllm:cache_config_info{"
_KV_LINE: Final = re.compile(rb"^%b[^\r\n]{0,4096}" % _KV.encode(), re.MULTILINE)
"""The metric has some 25 short labels; what is longer is cut off."""
_KV_LABEL: Final = re.compile(r'(?<!\w)(\w{1,64})="((?:[^"\\]|\\.){0,256})"')
"""Begins where a word begins, else a long word would take time in the square of its length."""
_MAX_TOKENS: Final = 1 << 40
_NAMES_SHOWN: Final = 5
"""Most names in a message."""
_LABEL: Final = re.compile(rb'(?<!\w)(\w{1,64})="([^"]*)"')
_MAX_DIGITS: Final = 6
_RANK: Final = re.compile(rb'[{,](?:engine|dp_rank)="(\d{1,6})"')


def _pattern() -> re.Pattern[bytes]:
    """Matches a line of a wanted metric.

    Grouping names by family and starting with the previous line's end makes it ten times faster.
    """
    families: dict[str, list[str]] = {}
    named = [name for names in ALIASES.values() for name in names]
    for name in named:
        family, _, rest = name.rpartition(":")
        families.setdefault(family + ":" if family else "", []).append(rest)
    wanted = "|".join(f"{family}(?:{'|'.join(rests)})" for family, rests in families.items())
    return re.compile(rb"\n(%b)(\{[^\n]*\})?[ \t]+([^\s]{1,32})(?=\s|\Z)" % wanted.encode())


_LINE: Final = _pattern()


def read_page(page: bytes, rank: int | None = None) -> EngineSample:
    """The reading of an engine, or of one data-parallel `rank`, from its /metrics page.

    Fields that the page lacks are None. Samples without a rank label count for every rank.
    Raises nothing.
    """
    values: dict[str, list[float]] = {}
    for name, labels, text in _LINE.findall(b"\n" + page):
        reported = None if rank is None else _RANK.search(labels)
        if reported is None or int(reported[1]) == rank:
            try:
                value = float(text)
            except ValueError:
                continue
            if 0 <= value < math.inf:
                values.setdefault(name.decode(), []).append(value)
    reading: dict[str, float] = {}
    for field, names in ALIASES.items():
        samples = next((values[name] for name in names if values.get(name)), None)
        if samples is None:
            continue
        total = math.fsum(samples)
        reading[field] = min(1.0, total / len(samples)) if field in _SHARES else total
    engine = next((e for e in _ENGINES if any(name.startswith(f"{e}:") for name in values)), "")
    return EngineSample(engine=engine, **reading)


class RunningAdapters(NamedTuple):
    """The LoRA adapters that an engine runs, or is about to."""

    names: frozenset[str]
    most: int
    """So many at once; 0 if unknown."""


def read_adapters(page: bytes) -> RunningAdapters | None:
    """An engine's adapters from its /metrics page; None if it reports none. Raises nothing.

    vLLM writes the names into labels and the time into the value, so that each change leaves a
    sample behind: the latest counts.
    """
    if _ADAPTERS not in page:
        return None
    latest, newest = -1.0, b""
    for labels, text in _ADAPTER_LINE.findall(page):
        try:
            at_s = float(text)
        except ValueError:
            continue
        if at_s > latest:
            latest, newest = at_s, labels
    named = dict(_LABEL.findall(newest))
    names = b",".join(
        (named.get(b"running_lora_adapters", b""), named.get(b"waiting_lora_adapters", b""))
    )
    most = named.get(b"max_lora", b"")
    return RunningAdapters(
        frozenset(name.strip() for name in names.decode(errors="replace").split(",")) - {""},
        int(most) if most.isdigit() and len(most) < _MAX_DIGITS else 0,
    )


def read_kv_tokens(page: bytes, rank: int | None = None) -> int:
    """Tokens in the KV cache of an engine, or of one `rank`, from its /metrics page.

    0 if any of the ranks does not report them, as while an engine is still measuring.
    """
    total = 0
    for raw in _KV_LINE.findall(page):
        labels = dict(_KV_LABEL.findall(raw.decode("utf-8", "replace")))
        if rank is not None and labels.get("engine") != str(rank):
            continue
        blocks, size = labels.get("num_gpu_blocks", ""), labels.get("block_size", "")
        if not (blocks.isascii() and blocks.isdigit() and size.isascii() and size.isdigit()):
            return 0
        tokens = int(blocks[:16]) * int(size[:16])
        if not 0 < tokens <= _MAX_TOKENS:
            return 0
        total += tokens
    return total


class EngineModel(NamedTuple):
    """One name that an engine serves."""

    name: str
    window_tokens: int | None
    parent: str | None
    """The base model of a LoRA adapter; None for a model of its own."""


def read_models(body: bytes) -> list[EngineModel]:
    """The listed models; [] if the body is not such a list."""
    try:
        reported: Any = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return []
    cards: Any = reported.get("data") if isinstance(reported, dict) else None
    models = []
    for card in cards if isinstance(cards, list) else ():
        name: Any = card.get("id") if isinstance(card, dict) else None
        if isinstance(name, str):
            window, parent = card.get("max_model_len"), card.get("parent")
            models.append(
                EngineModel(
                    name,
                    window if isinstance(window, int) else None,
                    parent if isinstance(parent, str) and parent != name else None,
                )
            )
    return models


def not_served(models: Sequence[EngineModel], name: str) -> str:
    """Why an engine with these models cannot serve `name`; "" if it can or lists nothing."""
    names = [model.name for model in models]
    if not names or name in names:
        return ""
    shown = ", ".join(f"'{listed[:80]}'" for listed in names[:_NAMES_SHOWN])
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return f"it serves {shown}{more}, not '{name}': set the worker's `model`"


def is_asleep(body: bytes) -> bool:
    """Whether an engine's /is_sleeping page says that it sleeps (vLLM's sleep mode)."""
    try:
        reported: Any = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return False
    return isinstance(reported, dict) and reported.get("is_sleeping") is True
