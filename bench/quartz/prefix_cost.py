"""Cost of prefix locality: CPU of digests and index, and the index's memory.

    python -m bench.quartz.prefix_cost
    python -m bench.quartz.prefix_cost --prompts 1000000

Times are CPU microseconds, the best of several rounds. Bodies are chats of ten messages as
clients send them. `--prompts` distinct prompts of 40 KB are inserted to see the index's largest
size.
"""

import argparse
import json
import random
import sys
import time
import tracemalloc
from collections.abc import Callable

import msgspec
from rich.console import Console
from rich.progress import track

from gateway.fleet.engine_metrics import read_page
from gateway.payload.members import by_name, locate
from gateway.scheduling.prefix_digests import Points, digests, points_of
from gateway.scheduling.prefix_index import DEFAULT_ENTRIES, PrefixIndex

_WORDS = ("the", "policy", "of", "a", "gateway", "is", "to", "remember", "conversations", "begun")
_ROUNDS = 9
_BODIES = 32
_LONG_PROMPT_BYTES = 40_000


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """CPU microseconds of the steps for one request."""

    body_bytes: int
    points: int
    points_us: float
    locate_us: float
    """Finding the members alone, by `members.locate`: what `points_of` does without."""
    match_us: float
    insert_us: float


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--entries", type=int, default=DEFAULT_ENTRIES)
    parser.add_argument("--prompts", type=int, default=50_000)
    asked = parser.parse_args()
    for size in (2_000, 40_000, 200_000):
        cost = request_cost(size, asked.workers)
        print(
            f"{cost.body_bytes:>8,} bytes: {cost.points} points {cost.points_us:.1f} us "
            f"(locate alone {cost.locate_us:.1f}), match {cost.match_us:.1f} us, "
            f"insert {cost.insert_us:.1f} us"
        )
    entries, size = memory(asked.prompts, asked.entries, asked.workers)
    print(
        f"{asked.prompts:,} distinct prompts: {entries:,} entries of at most {asked.entries:,}, "
        f"{size / 1e6:.1f} MB, {size / entries:.0f} bytes each"
    )
    page = _page()
    print(f"a metrics page of {len(page):,} bytes: {_cpu_us(lambda: read_page(page)):.0f} us")


def request_cost(size: int, workers: int) -> Cost:
    """Digests of a body of so many bytes, and its way through an index that is in use."""
    rng = random.Random(size)
    bodies = [_chat(rng, size) for _ in range(_BODIES)]
    body = bodies[0]
    found = [by_name(each) for each in bodies]
    all_points = [points_of("chat", each, size) for each in found]
    index = PrefixIndex(workers)
    for n in range(2_000):
        index.insert(_other(n), n % workers)
    for worker, points in enumerate(all_points):
        index.insert(points, worker % workers)
    return Cost(
        body_bytes=len(body),
        points=len(all_points[0]),
        points_us=_cpu_us(lambda: [points_of("chat", each, size) for each in found]) / _BODIES,
        locate_us=_cpu_us(lambda: [locate(each) for each in bodies]) / _BODIES,
        match_us=_cpu_us(lambda: [index.match(points, 0.25) for points in all_points]) / _BODIES,
        insert_us=_cpu_us(lambda: [index.insert(points, 0, 0.25) for points in all_points])
        / _BODIES,
    )


def memory(prompts: int, entries: int, workers: int) -> tuple[int, int]:
    """Entries and bytes of an index after so many distinct prompts."""
    steps = range(prompts)
    if sys.stderr.isatty():
        steps = track(steps, "prompts", console=Console(stderr=True))  # type: ignore[assignment]
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    index = PrefixIndex(workers, max_entries=entries)
    for n in steps:
        index.insert(_other(n), n % workers, 0.25)
    size = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    return len(index), size


def _other(n: int) -> Points:
    """Points of a prompt that no other has, without the work of digesting it."""
    return digests(_FILLER, (_LONG_PROMPT_BYTES,), n)


_FILLER = bytes(_LONG_PROMPT_BYTES)


def _chat(rng: random.Random, size: int) -> bytes:
    messages = []
    for n in range(10):
        text = " ".join(rng.choices(_WORDS, k=size // 62))
        messages.append({"role": ("user", "assistant")[n % 2], "content": text})
    return json.dumps({"model": "m", "messages": messages, "stream": True}).encode()


def _page() -> bytes:
    """As long as a vLLM's page, most of it histograms."""
    head = 'vllm:num_requests_running{engine="0",model_name="m"} 3.0\n'
    line = 'vllm:request_prefill_time_seconds_bucket{engine="0",le="%d",model_name="m"} 7.0\n'
    return (head + "".join(line % n for n in range(600))).encode()


def _cpu_us(work: Callable[[], object]) -> float:
    """CPU time of one call: best of several rounds of at least 10 ms."""
    best = float("inf")
    for _ in range(_ROUNDS):
        calls, began_s = 0, time.process_time()
        while (spent_s := time.process_time() - began_s) < 0.01 or not calls:
            work()
            calls += 1
        best = min(best, spent_s / calls)
    return best * 1e6


if __name__ == "__main__":
    main()
