"""Workers that an admin adds and removes at run time. Part of the composition root."""

from collections.abc import Sequence

from gateway.adapters.engines.rotation import CONFIGURED, Rotation
from gateway.errors import BadRequest, Conflict, NotFound
from gateway.policy.model_runtime import ModelRuntime
from gateway.records.discovery import FoundEngine
from gateway.settings import Config
from gateway.settings.fleet.discovery import is_source
from gateway.web.control.surface import NewWorker

ADMIN = "an admin"


class Workers:
    """The WorkerService of the admin routes."""

    def __init__(self, config: Config, models: Sequence[ModelRuntime], rotation: Rotation) -> None:
        self.config = config
        self._models = models
        self._rotation = rotation

    def add(self, asked: NewWorker) -> str:
        model = next((m for m in self.config.models if m.name == asked.model), None)
        names = [] if model is None else list(model.pools)
        if model is None or asked.pool not in names:
            raise NotFound(
                f"No pool '{asked.pool}' of a model '{asked.model}'. GET /admin/pools lists them.",
                reason="pool_not_found",
            )
        like = model.pools[asked.pool].workers[0]
        found = FoundEngine(urls=(asked.url,), model=asked.served_model, ranks=asked.ranks)
        try:
            if is_source(asked.url):
                raise ValueError("a source of engines, not an engine")
            engine = like.found(found)
        except ValueError as error:
            raise BadRequest(
                f"url: {error}. Write it as http://host:port.", reason="bad_request", param="url"
            ) from None
        name = engine[0].id.partition("#")[0]
        for pool, served in ((p, s) for s in self._models for p in range(len(s.fleet.pools))):
            here = served.name == asked.model and pool == names.index(asked.pool)
            if not here and name in self._rotation.sources(served.name, pool):
                raise Conflict(
                    f"Worker {name} is in a pool already: its slots would count twice.",
                    reason="worker_exists",
                )
        if not self._rotation.add(asked.model, names.index(asked.pool), ADMIN, engine):
            raise Conflict(
                f"Worker {name} is in this pool with another key, model or number of ranks.",
                reason="worker_exists",
            )
        return name

    def remove(self, worker: str) -> int:
        hits = 0
        for served in self._models:
            for pool in range(len(served.fleet.pools)):
                sources = self._rotation.sources(served.name, pool).get(worker)
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
                    self._rotation.remove(served.name, pool, source, worker)
        return hits
