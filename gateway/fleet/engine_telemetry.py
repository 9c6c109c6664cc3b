"""The latest readings of a pool's engines' metrics, as a struct of arrays.

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

_NEVER: Final = float("-inf")
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
_EMPTY: Final = EngineSample()


class TelemetryView:
    """Readings of one pool's workers, by index."""

    def __init__(self, workers: int) -> None:
        self.samples = [_EMPTY] * workers
        self.stamped_s = [_NEVER] * workers
        """Time of each reading, on the clock of `now_s`."""
        self.preemptions = 0.0
        """Preemptions of all workers since the gateway started; never falls."""
        self.finished = 0.0
        """Requests that they all answered since then, from any sender; never falls."""
        self.restarts = [0] * workers


def join(view: TelemetryView, worker: int) -> None:
    """A new worker took this place, which may be one more than there were."""
    if worker == len(view.samples):
        view.samples.append(_EMPTY)
        view.stamped_s.append(_NEVER)
        view.restarts.append(0)
    forget(view, worker)


def forget(view: TelemetryView, worker: int) -> None:
    """Drop a worker's readings: it is gone."""
    view.samples[worker] = _EMPTY
    view.stamped_s[worker] = _NEVER
    view.restarts[worker] = 0


def record(view: TelemetryView, worker: int, sample: EngineSample, now_s: float) -> bool:
    """Store a reading; True if the engine restarted since the previous one."""
    before = view.samples[worker]
    first = view.stamped_s[worker] == _NEVER
    began, begins = before.started_unix_s, sample.started_unix_s
    again = not first and (
        (began is not None and begins is not None and abs(begins - began) > _SAME_START_S)
        or any(
            old is not None and new is not None and new < old
            for old, new in ((getattr(before, name), getattr(sample, name)) for name in _COUNTERS)
        )
    )
    view.samples[worker] = sample
    view.stamped_s[worker] = now_s
    view.restarts[worker] += again
    if not first:
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
    if now_s - view.stamped_s[worker] > stale_s:
        return None
    return view.samples[worker].kv_usage
