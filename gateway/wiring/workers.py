"""Workers that an admin adds and removes at run time. Part of the composition root."""

from collections.abc import Collection, Sequence

from pydantic import SecretStr

from gateway.control.surface import NewWorker
from gateway.errors import BadRequest, Conflict, NotFound
from gateway.fleet.model_runtime import ModelRuntime
from gateway.fleet.rotation import ADMIN, CONFIGURED, Rotation
from gateway.records.attempt import FoundEngine, WorkerAddress
from gateway.settings import Config
from gateway.settings.model import EnginesConfig
from gateway.settings.worker import WorkerConfig, is_source


class Workers:
    """Workers at run time, as the admin routes change them."""

    def __init__(self, config: Config, models: Sequence[ModelRuntime], rotation: Rotation) -> None:
        self.config = config
        self._models = models
        self._rotation = rotation

    def add(self, asked: NewWorker) -> str:
        model = next((m for m in self.config.models if m.name == asked.model), None)
        names = [] if model is None else list(model.all_pools)
        if model is None or asked.pool not in names:
            raise NotFound(
                f"No pool '{asked.pool}' of a model '{asked.model}'. GET /admin/pools lists them.",
                reason="pool_not_found",
            )
        served = next(s for s in self._models if s.name == asked.model)
        pool, state = model.all_pools[asked.pool], served.fleet.pools[names.index(asked.pool)]
        candidate = FoundEngine(urls=(asked.url,), model=asked.served_model, ranks=asked.ranks)
        try:
            if is_source(asked.url):
                raise ValueError("a source of engines, not an engine")
            address = pool.workers[0].addresses_for(candidate)[0]
            name = address.id.partition("#")[0]
            like = _like(pool, address, self._rotation.sources(state).get(name, ()))
            if asked.api_key is not None:
                like = like.model_copy(update={"api_key": SecretStr(asked.api_key)})
            engine = like.addresses_for(candidate)
        except ValueError as error:
            raise BadRequest(
                f"url: {error}. Write it as http://host:port.", reason="bad_request", param="url"
            ) from None
        for other in (pool for m in self._models for pool in m.fleet.pools):
            if other is not state and name in self._rotation.sources(other):
                raise Conflict(
                    f"Worker {name} is in a pool already: its slots would count twice.",
                    reason="worker_exists",
                )
        if not self._rotation.add(served, state, ADMIN, engine):
            raise Conflict(
                f"Worker {name} is in this pool with another key, model or number of ranks.",
                reason="worker_exists",
            )
        return name

    def remove(self, worker: str) -> int:
        hits = 0
        for served in self._models:
            for pool in served.fleet.pools:
                sources = self._rotation.sources(pool).get(worker)
                if sources is None:
                    continue
                if others := sorted(sources - {ADMIN, CONFIGURED}):
                    raise Conflict(
                        f"{others[0]} names worker {worker}, and would bring it back. Remove it "
                        "there, or drain it here.",
                        reason="worker_discovered",
                    )
                hits += 1
                for source in sources:
                    self._rotation.remove(served, pool, source, worker)
        return hits


def _like(pool: EnginesConfig, address: WorkerAddress, sources: Collection[str]) -> WorkerConfig:
    """The file's worker at this address, or whose source names it, with its key; else the first.

    That one is without its key: a secret of the file goes to addresses of the file.
    """
    for worker in pool.workers:
        if worker.discover in sources or (
            worker.url and _origin(worker.address()) == _origin(address)
        ):
            return worker
    return pool.workers[0].model_copy(update={"api_key": None})


def _origin(address: WorkerAddress) -> tuple[str, str, int]:
    return address.scheme, address.host, address.port
