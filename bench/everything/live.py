"""The trace through a real gateway before mock engines, in real time."""

import asyncio
import tempfile
from pathlib import Path
from typing import Final

import numpy as np

from bench.common.fleet import Fleet
from bench.common.timed_load import TimedAnswer, TimedLoad, TimedRequest, lag_s, write_profile
from bench.everything.scene import (
    ENGINE,
    RANKS,
    REPLICAS,
    SLOTS,
    TENANTS,
    WINDOW_TOKENS,
    RunFigures,
    TraceRequest,
    figures,
)
from bench.everything.systems import Switches, config_of

_BUSY: Final = ("vllm:request_prefill_time_seconds_sum", "vllm:request_decode_time_seconds_sum")


def live(switches: Switches, requests: list[TraceRequest]) -> RunFigures:
    """One system with fresh engines and a fresh gateway."""
    with tempfile.TemporaryDirectory() as folder:
        profile = ("--profile-file", str(write_profile(Path(folder), ENGINE)))
        shape = {"short_window": WINDOW_TOKENS, "short_slots": SLOTS}
        fleet = Fleet(short=REPLICAS + 1, long=0, mock=profile, **shape)  # type: ignore[arg-type]
        fleet.engines[-1].command += ["--dp-ranks", str(RANKS)]
        urls = [engine.url for engine in fleet.engines]
        config = config_of(switches, urls[:REPLICAS], urls[REPLICAS:], RANKS)
        fleet.replicas[0].config = {**config, "server": {"host": "127.0.0.1", "port": fleet.port}}
        with fleet:
            load = TimedLoad([fleet.url])
            asks = [
                TimedRequest(at_s=r.at_s, client=TENANTS[r.tenant].name, body=r.body)
                for r in requests
            ]
            asyncio.run(load.open_loop(asks))
            engines = [engine.metrics() for engine in fleet.engines]
    seen = sorted(load.seen, key=lambda answer: answer.ask.at_s)
    series = [pair for page in engines for pair in page.items()]
    return figures(
        requests,
        np.array([_ttft_s(answer) for answer in seen]),
        busy_s=sum(value for name, value in series if name.startswith(_BUSY)),
        length_s=max(answer.sent_s + answer.ended_s for answer in seen if answer.status == 200),
        workers=REPLICAS + RANKS,
        compressed=sum(_compressed(answer.head) for answer in seen),
        lag_s=lag_s(engines),
    )


def _ttft_s(answer: TimedAnswer) -> float:
    """Since the request was due; NaN where it was not served."""
    if answer.status != 200 or answer.first_s is None:
        return float("nan")
    return answer.sent_s + answer.first_s - answer.ask.at_s


def _compressed(head: bytes) -> bool:
    _, told, value = head.partition(b"x-sluice-compressed: ")
    return bool(told) and not value.startswith(b"none")
