"""Reads each engine's KV cache capacity from its /metrics page.

vLLM reports the number of blocks and their size as labels of `vllm:cache_config_info`, once per
data-parallel rank. Capacity in bytes is the tokens in all blocks times the model's bytes per
token: of all ranks for a worker that is the whole engine, of one rank for a worker that is that
rank. The page is read once each time a worker comes up, never on the request path. An engine
that reports nothing is asked again only after it was down; until then, KV limits apply only if
the configuration states the capacity.
"""

import logging
import re
from typing import Final

from gateway.fleet.engine_pages import MAX_PAGE_BYTES, NOT_HAD, EnginePages
from gateway.fleet.fleet import PoolState
from gateway.fleet.model_runtime import ModelRuntime
from gateway.records.attempt import WorkerAddress

_METRIC: Final = "vllm:cache_config_info{"
_LINE: Final = re.compile(rb"^%b[^\r\n]{0,4096}" % _METRIC.encode(), re.MULTILINE)
"""The metric has some 25 short labels; what is longer is cut off."""
_LABEL: Final = re.compile(r'(?<!\w)(\w{1,64})="((?:[^"\\]|\\.){0,256})"')
"""Begins where a word begins, else a long word would take time in the square of its length."""
_MAX_TOKENS: Final = 1 << 40

_log = logging.getLogger("sluice.probes")

WorkerKey = tuple[PoolState, int]
"""(pool, worker)."""


class EngineKv:
    """KV cache by worker, filled while probing."""

    def __init__(self) -> None:
        self.kv_bytes_by_worker: dict[WorkerKey, int] = {}
        """Capacities that engines reported; workers without a report are absent."""
        self._asked: set[WorkerKey] = set()

    def of(self, pool: PoolState, worker: int) -> int:
        """Bytes of a worker's KV cache; 0 if unknown."""
        return self.kv_bytes_by_worker.get((pool, worker), 0)

    def remove(self, served: ModelRuntime, pool: int, worker: int) -> None:
        """Forget a worker that is gone."""
        self._asked.discard((served.fleet.pools[pool], worker))
        self.kv_bytes_by_worker.pop((served.fleet.pools[pool], worker), None)

    async def look(
        self, served: ModelRuntime, pool: int, worker: int, pages: EnginePages, *, healthy: bool
    ) -> None:
        """Read a healthy worker's capacity, once since it came up, if KV matters. Never raises."""
        state = served.fleet.pools[pool]
        place = (state, worker)
        if not state.up[worker]:
            self._asked.discard(place)  # it may come back with another capacity
            return
        matters = served.admission.kv_bytes_per_token or served.fleet.telemetry
        if not healthy or place in self._asked or not matters:
            return
        self._asked.add(place)
        address = served.fleet.workers[pool][worker]
        try:
            tokens = await _ask(address, pages)
        except NOT_HAD:
            tokens = None
        if served.fleet.telemetry:
            served.fleet.telemetry[pool].kv_tokens[worker] = tokens
        if tokens is None or not served.admission.kv_bytes_per_token:
            self.kv_bytes_by_worker.pop(place, None)
            return
        found = tokens * served.admission.kv_bytes_per_token
        if self.kv_bytes_by_worker.get(place) != found:
            _log.info(
                "worker %s has a KV cache of %d tokens, %.1f GiB",
                address.id,
                tokens,
                found / (1 << 30),
            )
        self.kv_bytes_by_worker[place] = found


def kv_tokens(line: str) -> int | None:
    """KV cache tokens of one rank, if this line of a metrics page reports them."""
    if not line.startswith(_METRIC):
        return None
    labels = dict(_LABEL.findall(line))
    blocks, size = labels.get("num_gpu_blocks", ""), labels.get("block_size", "")
    if not (blocks.isascii() and blocks.isdigit() and size.isascii() and size.isdigit()):
        return None  # "None" while the engine is still measuring
    tokens = int(blocks[:16]) * int(size[:16])
    return tokens if 0 < tokens <= _MAX_TOKENS else None


async def _ask(address: WorkerAddress, pages: EnginePages) -> int | None:
    """Tokens over a worker's ranks; None if any of them, or the page, is missing."""
    page = await pages.get(address, "/metrics", MAX_PAGE_BYTES)
    if page is None or page.status != 200:
        return None
    total = 0
    for raw in _LINE.findall(page.body):
        line = raw.decode("utf-8", "replace")
        of = dict(_LABEL.findall(line)).get("engine")
        if address.rank is not None and of != str(address.rank):
            continue
        tokens = kv_tokens(line)
        if tokens is None:
            return None
        total += tokens
    return total or None
