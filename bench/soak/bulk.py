"""The bulk of the soak's load: whole answers and streams of several lengths, by cheap C programs.

Capacity is measured first, each kind by itself in a closed loop: requests served per core used,
which does not depend on other load of the machine. A share of that rate then takes about that
share of a core; somewhat more, since an unsaturated process spends more on each request.
"""

import asyncio
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import msgspec

from bench.common.everything_on import MODEL
from bench.common.tools import Figures, HttpLoad, bodies
from bench.soak.gateway import SoakGateway

UTILISATION: Final = 0.5
"""Of the gateway's process."""
VISITORS_SHARE: Final = 0.2
"""Of that, for the clients of all sorts (`soak_visits`)."""
CAPACITY_S: Final = 3.0
CLOSED_LOOP: Final = 256
"""Requests at once when capacity is measured."""
CONNECTIONS: Final = 256


class Kind(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of request, and its share of the bulk's processor time."""

    name: str
    share: float
    tokens: int
    """Of the answer; a stream has as many chunks."""
    text_bytes: int
    stream: bool


KINDS: Final = (
    Kind(name="whole", share=0.3, tokens=64, text_bytes=1850, stream=False),
    Kind(name="whole of 20 KB", share=0.1, tokens=64, text_bytes=20_000, stream=False),
    Kind(name="16-chunk streams", share=0.2, tokens=16, text_bytes=1850, stream=True),
    Kind(name="64-chunk streams", share=0.25, tokens=64, text_bytes=1850, stream=True),
    Kind(name="400-chunk streams", share=0.15, tokens=400, text_bytes=6000, stream=True),
)


class Bulk(msgspec.Struct, frozen=True, kw_only=True):
    """A kind, and what the gateway serves of it for a core's work."""

    kind: Kind
    body: Path
    capacity_per_s: float
    cores: float
    """In use by the gateway when that was measured."""

    @property
    def rate_per_s(self) -> float:
        """Offered."""
        return self.capacity_per_s * UTILISATION * (1 - VISITORS_SHARE) * self.kind.share


def capacity(gateway: SoakGateway, tool: Path, folder: Path, kind: Kind) -> tuple[Bulk, Figures]:
    """Saturate the gateway with one kind; also what the run found."""
    found_bodies = bodies(folder, MODEL, text_bytes=kind.text_bytes, max_tokens=kind.tokens)
    body = found_bodies["stream" if kind.stream else "whole"]
    before_s = gateway.cpu_s()
    found = HttpLoad(tool, gateway.port, body).run(CLOSED_LOOP, CAPACITY_S)
    used_s = gateway.cpu_s() - before_s
    bulk = Bulk(
        kind=kind,
        body=body,
        capacity_per_s=found["requests"] / max(1e-9, used_s),
        cores=used_s / found["seconds"],
    )
    return bulk, found


async def offer(
    gateway: SoakGateway, tool: Path, bulks: list[Bulk], seconds: float
) -> list[Figures]:
    """All kinds at their rates, for so long; then to their last answer."""
    with ExitStack() as stack:
        runs = [
            stack.enter_context(
                HttpLoad(tool, gateway.port, bulk.body).start(CONNECTIONS, seconds, bulk.rate_per_s)
            )
            for bulk in bulks
        ]
        for run in runs:
            await asyncio.to_thread(run.ready)
        for run in runs:
            run.begin()
        waits: list[Callable[[], Figures]] = [run.found for run in runs]
        return list(await asyncio.gather(*map(asyncio.to_thread, waits)))
