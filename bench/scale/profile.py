"""`bench overhead profile`: what each stage of a request costs, called hot in this process.

One request with a chat body of some 2 KB after the other passes the shipped stages with every one
on, policy `quartz`, 4 workers (`bench.scale.workers`). Sockets, the event loop and cold caches are
left out, which the rest of `bench overhead` includes.
"""

import timeit
from typing import Final

from bench.common.report import Report, Row
from bench.common.steps import scaled
from bench.scale.traffic import Size
from bench.scale.workers import STAGES, Loaded
from gateway.payload.sse import StreamMeter
from gateway.records.endpoint import CHAT

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
