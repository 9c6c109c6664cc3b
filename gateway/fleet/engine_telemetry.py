"""The latest readings of a pool's engines' metrics, by place.

Rules:
- Readings only supplement `PoolState`, which counts the requests that this gateway has in flight
  and is authoritative between two readings. No decision waits for a reading.
- A reading older than `STALE_S` is returned as None.
- An engine has restarted if a counter fell or its process start time changed. Its prefix cache
  is then empty.
"""

from typing import Final

from gateway.records.record import Record

STALE_S: Final = 5.0

_SAME_START_S: Final = 1.0


class EngineSample(Record, frozen=True, kw_only=True):
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
    """Whose metrics its page has: vllm or sglang; empty if neither's."""


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
    known = 0.0 if again else before
    return 0.0 if now is None or known is None else max(0.0, now - known)


def kv_usage(
    view: TelemetryView, worker: int, now_s: float, stale_s: float = STALE_S
) -> float | None:
    """Share of a worker's KV cache in use, 0 to 1; None if stale or not reported."""
    sample = view.fresh(worker, now_s, stale_s)
    return None if sample is None else sample.kv_usage
