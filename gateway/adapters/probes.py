"""Health probes: each worker's /health, its window as /v1/models reports it, its KV cache.

One task an engine, whose ranks share the verdict, and one httpx client for all. A probe changes
only whether a worker is in the rotation, never its load. A worker that refused a request's
connection is probed again at the next interval and returns by itself.
"""

import asyncio
import logging
import ssl
from collections.abc import Callable, Iterable

import httpx

from gateway.adapters.engine_kv import EngineKv
from gateway.domain import WorkerAddress
from gateway.policy import fleet
from gateway.policy.served import ServedModel

_log = logging.getLogger("sluice.probes")


class Prober:
    """Probes every worker of every model until stopped."""

    def __init__(
        self,
        models: Iterable[ServedModel],
        *,
        interval_s: float,
        timeout_s: float,
        client: Callable[[WorkerAddress], httpx.AsyncClient] | None = None,
        kv: EngineKv | None = None,
    ) -> None:
        """`client` makes the HTTP client for a worker (tests pass their own).

        `kv` is filled with what engines tell of their KV caches.
        """
        self._kv = kv
        self._models = list(models)
        self._interval_s = interval_s
        self._timeout_s = timeout_s
        self._make_client = client or self._client_for
        self._clients: dict[str | None, httpx.AsyncClient] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._warned: set[tuple[str, str]] = set()

    async def start(self) -> None:
        """Probe everything once, then go on in the background."""
        loops = [
            (served, pool, ranks[0])
            for served in self._models
            for pool, state in enumerate(served.pools)
            for ranks in state.engines
        ]
        await asyncio.gather(*(self.probe(*which) for which in loops))
        self._tasks = [asyncio.create_task(self._run(*which)) for which in loops]

    async def close(self) -> None:
        """Stop probing."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for client in self._clients.values():
            await client.aclose()

    async def probe(self, served: ServedModel, pool: int, worker: int) -> bool:
        """Probe one worker and apply the verdict to its engine, all ranks of it."""
        address = served.workers[pool][worker]
        client = self._make_client(address)
        headers = {} if address.api_key is None else {"authorization": f"Bearer {address.api_key}"}
        try:
            answer = await client.get(
                f"{address.url}/health", headers=headers, timeout=self._timeout_s
            )
            ok = answer.status_code < 500 and answer.status_code != 404
            if answer.status_code == 404:  # not every engine has /health
                answer = await client.get(
                    f"{address.url}/v1/models", headers=headers, timeout=self._timeout_s
                )
                ok = answer.status_code == 200
        except (httpx.HTTPError, OSError, ssl.SSLError):
            ok = False
        if fleet.probed(served.pools[pool], worker, ok=ok):
            level = logging.INFO if ok else logging.WARNING
            state = "is ready" if ok else "is not ready"
            _log.log(
                level, "worker %s of %s/%s %s", address.id, served.name, _name(served, pool), state
            )
        if ok:
            await self._check_window(served, pool, address, client, headers)
        if self._kv is not None:
            for rank in served.pools[pool].siblings[worker]:
                if ok:
                    await self._kv.learn(served, pool, rank, client, headers, self._timeout_s)
                else:
                    self._kv.forget(served, pool, rank)
        return ok

    async def _check_window(
        self,
        served: ServedModel,
        pool: int,
        address: WorkerAddress,
        client: httpx.AsyncClient,
        headers: dict[str, str],
    ) -> None:
        """Warn once when an engine's own window differs from the configured one."""
        if (served.name, address.id) in self._warned:
            return
        self._warned.add((served.name, address.id))
        try:
            answer = await client.get(
                f"{address.url}/v1/models", headers=headers, timeout=self._timeout_s
            )
            cards = answer.json().get("data", []) if answer.status_code == 200 else []
            windows = {c.get("max_model_len") for c in cards if isinstance(c, dict)}
        except (httpx.HTTPError, ValueError, AttributeError, OSError):
            return
        expected = served.routing.pools[pool].window_tokens
        found = {w for w in windows if isinstance(w, int)}
        if found and expected not in found:
            _log.warning(
                "worker %s reports max_model_len %s, but pool %s says %d: set it to the engine's",
                address.id,
                ", ".join(map(str, sorted(found))),
                _name(served, pool),
                expected,
            )

    async def _run(self, served: ServedModel, pool: int, worker: int) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            await self.probe(served, pool, worker)

    def _client_for(self, address: WorkerAddress) -> httpx.AsyncClient:
        client = self._clients.get(address.ca_file)
        if client is None:
            verify = ssl.create_default_context(cafile=address.ca_file)
            client = self._clients[address.ca_file] = httpx.AsyncClient(
                verify=verify, trust_env=False, follow_redirects=False
            )
        return client


def _name(served: ServedModel, pool: int) -> str:
    return served.pools[pool].name
