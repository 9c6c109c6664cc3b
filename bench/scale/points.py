"""One point of `bench scale` in a process of its own: `python -m bench.scale.points KIND SIZE`.

SIZE is JSON; the figures go to stdout as JSON. Each point gets a fresh process, so that its
memory is its own and no point affects the next.
"""

import gc
import sys
import timeit
import tracemalloc
from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from bench.common.report import Report, Row, scaled
from bench.scale.entitlements import entitlement_point, lease_point, tenant_point
from bench.scale.redis import redis_point
from bench.scale.traffic import (
    INFLIGHT_EACH,
    STAGES,
    ChatBodies,
    Loaded,
    Size,
    calm,
    collection_ms,
    pauses,
    quantile,
    resident_bytes,
    watched,
)
from gateway.control.metrics_page import MetricsPage, write
from gateway.fleet import fleet
from gateway.payload.members import by_name
from gateway.payload.sse import StreamMeter
from gateway.records.endpoint import CHAT
from gateway.scheduling.prefix_index import PrefixIndex, points_of
from gateway.settings import SchedulingConfig

# -- `bench overhead profile`: what each stage of a request costs, called hot in this process


_REQUESTS: Final = scaled(20_000, 2_000)
_TIMES: Final = 2_000
_CHUNK: Final = (
    b'data: {"id":"chatcmpl-0","object":"chat.completion.chunk","created":1,"model":"m","choices":'
    b'[{"index":0,"delta":{"content":" word"},"logprobs":null,"finish_reason":null}]}\n\n'
)


def run() -> Report:
    """CPU-us of each stage for one request, and of a streamed chunk."""
    loaded = Loaded(Size(workers=4), turns=2)
    loaded.run(2_000)
    loaded.cpu.clear()
    loaded.run(_REQUESTS)
    cpu = loaded.cpu
    rows = [
        Row(
            f"{stage}, us",
            cpu.quantile_us(part, 0.5),
            f"mean {cpu.mean_us(part):.1f}, p99 {cpu.quantile_us(part, 0.99):.1f}",
        )
        for part, stage in STAGES.items()
    ]
    rows.append(Row("all of them, us", sum(cpu.quantile_us(part, 0.5) for part in STAGES)))
    meter = StreamMeter(CHAT, strip_usage=True)
    best_s = min(timeit.repeat(lambda: meter.feed(_CHUNK), number=_TIMES, repeat=7)) / _TIMES
    rows.append(Row("9 one streamed chunk, us", best_s * 1e6))
    return Report(name="overhead profile", rows=rows)


Figures = dict[str, float]


def workers(size: Size) -> Figures:
    """One pool under load: a request's parts, its decision, memory, one worker ejected."""
    resident = resident_bytes()
    loaded = Loaded(size)
    calm()
    found: Figures = {"build_ms": loaded.build_ms, "idle_bytes": resident_bytes() - resident}
    cpu = loaded.cpu
    with pauses() as collected_ms:
        loaded.run(int(1.25 * INFLIGHT_EACH * size.workers) + 2_000)
        found["resident_bytes"] = resident_bytes() - resident
        cpu.clear()
        loaded.ticks_us.clear()
        loaded.run(size.requests)
    found["pause_ms"] = max(collected_ms, default=0.0)
    for part in (*STAGES, "name"):
        found[f"{part}_us"] = cpu.mean_us(part)
    found["bind_us"] += found.pop("name_us")
    found["request_us"] = sum(found[f"{part}_us"] for part in STAGES)
    found["request_p50_us"] = sum(cpu.quantile_us(part, 0.5) for part in STAGES)
    for name, share in (("p50", 0.5), ("p99", 0.99), ("most", 1.0)):
        found[f"bind_{name}_us"] = cpu.quantile_us("bind", share)
    found["tick_us"] = quantile(loaded.ticks_us, 0.5)
    found["tick_most_us"] = max(loaded.ticks_us, default=0.0)
    found["entries"] = 0 if loaded.pool.prefixes is None else len(loaded.pool.prefixes)
    page = MetricsPage(loaded.metrics, [loaded.served], lambda: 0, loaded.clock)
    text, found["page_ms"], found["page_hold_ms"] = watched(lambda: write(page.collect()))
    found["page_bytes"] = len(text)
    found["collection_ms"] = collection_ms()
    _away(loaded, size, found)
    found["idle_bytes_each"] = found["idle_bytes"] / size.workers
    found["used_kib"] = found["resident_bytes"] / size.workers / 1024
    return found


def _away(loaded: Loaded, size: Size, found: Figures) -> None:
    """The same with one worker ejected, as in a large fleet one nearly always is."""
    pool, rules, worker = loaded.pool, loaded.served.fleet.health, 1
    for _ in range(rules.eject_after):
        fleet.failed(pool, worker, rules, loaded.now_s)
    pool.engine_of[worker].ejected_until_s = pool.last_ejection_end_s = loaded.now_s + 1e6
    loaded.run(100)
    loaded.cpu.clear()
    loaded.run(size.requests // 4)
    found["bind_ejected_p50_us"] = loaded.cpu.quantile_us("bind", 0.5)
    found["ejected_times"] = found["bind_ejected_p50_us"] / found["bind_p50_us"]


def index_point(size: Size) -> Figures:
    """Memory of a prefix index that so many prompts of conversations went through."""
    talk, facts = ChatBodies(8 * size.workers), 4_000
    index = PrefixIndex(size.workers, max_entries=SchedulingConfig().prefix_entries)
    bodies = (talk.body() for _ in range(size.requests))
    gc.collect()
    tracemalloc.start()
    for number, body in enumerate(bodies):
        index.insert(points_of("chat", by_name(body), facts), number % size.workers, 0.25)
    size_bytes = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return {"entries": len(index), "bytes": size_bytes, "bytes_each": size_bytes / len(index)}


KINDS: Final[Mapping[str, Callable[[Size], Figures]]] = {
    "workers": workers,
    "entitlements": entitlement_point,
    "leases": lease_point,
    "index": index_point,
    "redis": redis_point,
    "tenants": tenant_point,
}


def main() -> None:
    """Measure one point and print its figures."""
    _, kind, size = sys.argv
    figures = KINDS[kind](msgspec.json.decode(size, type=Size))
    sys.stdout.write(msgspec.json.encode(figures).decode() + "\n")


if __name__ == "__main__":
    main()
