"""Checks of models: what their pools, workers, scheduling and compression must agree on."""

from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Final

from gateway.settings.model import ModelConfig
from gateway.settings.name_checks import Models, check_names
from gateway.settings.pool import PoolConfig
from gateway.settings.problems import KeyPath, install
from gateway.settings.source import Document
from gateway.settings.tls import unfit_engine_tls
from gateway.settings.worker import WorkerConfig
from predictor.artifact import ArtifactError, load
from predictor.online import PrefillPredictor

NO_KV_BYTES: Final = "the model does not say what a token takes"
KV_BYTES_FIX: Final = (
    "give the model's kv_bytes_per_token (2 x layers x KV heads x head size x bytes)"
)
_THIS_HOST = frozenset({"localhost", "localhost.", "127.0.0.1", "::1", "0.0.0.0", "::"})  # noqa: S104
"""Names of the loopback interface, and those that connect to it."""


def check_models(document: Document, models: Models) -> None:
    """Names, windows, boundaries and workers of the valid models."""
    check_names(document, models)
    _check_shared_workers(document, models)
    for index, model in models:
        path: KeyPath = ("models", index)
        _check_windows(document, path, model)
        _check_boundary(document, path, model)
        _check_moving(document, path, model)
        _check_scheduling(document, path, model)
        for name, pool in model.pools.items():
            _check_workers(document, (*path, "pools", name, "workers"), pool)
            _check_tls(document, (*path, "pools", name, "tls"), pool)
            _check_replicas(document, (*path, "pools", name, "replicas"), pool)
        _check_capacity(document, path, model)
        _check_compression(document, path, model)
        _check_prices(document, path, model)


def _check_windows(document: Document, path: KeyPath, model: ModelConfig) -> None:
    seen: dict[int, str] = {}
    for name, pool in model.pools.items():
        other = seen.setdefault(pool.max_model_len, name)
        if other != name:
            document.add(
                (*path, "pools", name, "max_model_len"),
                f"pool `{other}` has the same window, {pool.max_model_len}",
                f"put the workers of both into `{other}`, or give different windows",
            )
    short, long = model.pools.get("short"), model.pools.get("long")
    if short is not None and long is not None and long.max_model_len < short.max_model_len:
        document.add(
            (*path, "pools", "long", "max_model_len"),
            f"below the window of pool `short`, {short.max_model_len}",
            f"give more than {short.max_model_len}, or swap the pools' names",
        )


def _check_boundary(document: Document, path: KeyPath, model: ModelConfig) -> None:
    given, wanted = model.boundary.b_short, len(model.pools) - 1
    if given is None:
        return
    where = (*path, "boundary", "b_short")
    as_list = isinstance(document.value(where), list)
    if len(given) != wanted and (as_list or wanted > 0):
        pools = ", ".join(model.pools)
        many = f"{wanted} {'number' if wanted == 1 else 'numbers'}"
        document.add(
            where,
            f"{len(given)} given for {wanted + 1} {'pools' if wanted else 'pool'} ({pools})",
            f"give {many}, one for each pool but the last" if wanted else "remove it",
        )
        return
    if list(given) != sorted(set(given)):
        document.add(where, "not ascending", "order the boundaries as the pools' windows")
    pairs = zip(given, list(model.pools.items())[:-1], strict=False)
    for position, (bound, (name, pool)) in enumerate(pairs):
        if bound > pool.max_model_len:
            document.add(
                (*where, position),
                f"{bound} is over the window of pool `{name}`, {pool.max_model_len}",
                f"give at most {pool.max_model_len}",
            )


def _check_moving(document: Document, path: KeyPath, model: ModelConfig) -> None:
    """Limits of moving boundaries, and the planned length distribution."""
    where = (*path, "boundary")
    asked = model.boundary
    if asked.auto and len(model.pools) == 1:
        document.add((*where, "auto"), "one pool has no boundary to move", "give a second pool")
    least, start = asked.b_short_min, model.boundaries
    if least is not None and len(least) != len(start):
        document.add(
            (*where, "b_short_min"),
            f"{len(least)} given for {len(model.pools)} pools",
            "give one for each pool but the last",
        )
    elif least is not None and any(low > high for low, high in zip(least, start, strict=True)):
        document.add(
            (*where, "b_short_min"), "over the boundary it belongs to", "give at most b_short"
        )
    points = asked.planned or ()
    if any(b[0] <= a[0] or b[1] < a[1] for a, b in pairwise(points)):
        document.add(
            (*where, "planned"), "not ascending", "order the points by tokens; shares never fall"
        )


def _check_scheduling(document: Document, path: KeyPath, model: ModelConfig) -> None:
    """A trained predictor must be usable, and ranks must be balanceable."""
    _check_ranks(document, path, model)
    predictor = model.scheduling.predictor
    if predictor is None:
        return
    where: KeyPath = (*path, "scheduling", "predictor")
    if not model.predicts:
        fix = "set policy: quartz, or shadow: true beside another policy, or leave it out"
        document.add(where, "no pool is predicted", fix)
        return
    if document.sent:
        return
    try:
        artifact = load(predictor)
    except ArtifactError as error:
        document.add(where, str(error), error.fix)
        return
    sections = [artifact.section(model.name, pool) for pool in model.pools]
    if not any(sections):
        known = ", ".join(section.name for section in artifact.sections[:8])
        document.add(
            where,
            f"{predictor} has no section for a pool of this model; it has {known}",
            f"train on requests of {model.name} in {', '.join(model.pools)}",
        )
    for section in filter(None, sections):
        try:
            PrefillPredictor(section, workers=1)
        except ValueError as error:
            document.add(where, f"{section.name}: {error}", "train again with --alpha 0.95")


def _check_ranks(document: Document, path: KeyPath, model: ModelConfig) -> None:
    """Policy bfio balances ranks behind one barrier, so every engine of its pool needs ranks."""
    for (name, pool), policy in zip(model.pools.items(), model.policies(), strict=True):
        if policy != "bfio":
            continue
        single = next((at for at, worker in enumerate(pool.workers) if worker.ranks == 1), None)
        if single is not None:
            document.add(
                (*path, "pools", name, "workers", single),
                "policy bfio balances data-parallel ranks, and this worker has none",
                "give its `ranks` (2 or more), or choose policy quartz for independent replicas",
            )


def _check_compression(document: Document, path: KeyPath, model: ModelConfig) -> None:
    asked = model.compression
    if not asked.enabled:
        return
    where = (*path, "compression")
    if len(model.pools) == 1:
        document.add(
            (*where, "enabled"), "one pool has no boundary to fit under", "give a second pool"
        )
    if asked.tokenizer is None:
        return
    if find_spec("tokenizers") is None:
        document.add(
            (*where, "tokenizer"),
            "the reader is not installed",
            install("exact"),
        )
    if not document.sent and not _is_file(str(asked.tokenizer)):
        document.add((*where, "tokenizer"), "no such file", "give the path of tokenizer.json")


def _check_capacity(document: Document, path: KeyPath, model: ModelConfig) -> None:
    """All pools of a model state a token rate, or none does; kv_cache_gib needs bytes per token."""
    stated = [name for name, pool in model.pools.items() if pool.tokens_per_second is not None]
    silent = [name for name in model.pools if name not in stated]
    if stated and silent:
        document.add(
            (*path, "pools", silent[0]),
            f"no tokens_per_second here, but in pool `{stated[0]}`",
            "give it for every pool of a model, or for none",
            key=True,
        )
    if model.kv_bytes_per_token is not None:
        return
    for name, pool in model.pools.items():
        if pool.kv_cache_gib is not None:
            document.add((*path, "pools", name, "kv_cache_gib"), NO_KV_BYTES, KV_BYTES_FIX)


def _check_prices(document: Document, path: KeyPath, model: ModelConfig) -> None:
    """List prices, or a price by the hour for each pool, or neither."""
    by_hour = [name for name, pool in model.pools.items() if pool.gpu_hour is not None]
    if by_hour and model.price is not None:
        document.add(
            (*path, "pools", by_hour[0], "gpu_hour"),
            "the model has list prices as well, so a request would have two costs",
            "remove `price` at the model, or `gpu_hour` at its pools",
        )
    elif by_hour and len(by_hour) < len(model.pools):
        without = next(name for name in model.pools if name not in by_hour)
        document.add(
            (*path, "pools", without),
            f"pool `{by_hour[0]}` has a price by the hour, and this one has none",
            "give `gpu_hour` at every pool of the model, or at none",
        )
    for name, pool in model.pools.items():
        if pool.gpu_hour is None and pool.gpus != 1:
            document.add(
                (*path, "pools", name, "gpus"),
                "counts for `gpu_hour` only, which this pool has not",
                "give `gpu_hour`, or remove `gpus`",
            )


def _check_shared_workers(document: Document, models: Models) -> None:
    """Each engine belongs to one pool of one model; otherwise its slots would count twice."""
    seen: dict[str, KeyPath] = {}
    for number, model in models:
        for name, pool in model.pools.items():
            path: KeyPath = ("models", number, "pools", name, "workers")
            for index, worker in enumerate(pool.workers):
                where = (*path, index)
                if worker.url is None:
                    first = seen.setdefault(str(worker.discover), where)
                    if first != where:
                        line = document.place(first).line
                        document.add(
                            where,
                            f"{worker.discover} is a source on line {line} already",
                            "let each source belong to one pool",
                        )
                    continue
                first = seen.setdefault(_engine(worker), where)
                if first[:-1] != path:  # _check_workers reports duplicates within one pool
                    of = next(model.name for number, model in models if number == first[1])
                    document.add(
                        where,
                        f"worker {worker.id} is in pool `{first[3]}` of `{of}` "
                        f"too, on line {document.place(first).line}: its slots would count twice",
                        "give every pool engines of its own; data-parallel ranks behind one URL "
                        "are one worker with `ranks`",
                    )


def _check_workers(document: Document, path: KeyPath, pool: PoolConfig) -> None:
    """No worker of a pool is listed twice, and its CA is a file."""
    seen: dict[str, int] = {}
    for index, worker in enumerate(pool.workers):
        where = (*path, index)
        first = index if worker.url is None else seen.setdefault(_engine(worker), index)
        if first != index:
            document.add(
                where,
                f"worker {worker.id} is listed twice, first on line "
                f"{document.place((*path, first)).line}",
                "remove one",
            )
        _check_ca(document, where, worker)


def _check_tls(document: Document, path: KeyPath, pool: PoolConfig) -> None:
    """TLS of a pool has an https worker to serve, and files that can be used."""
    if pool.tls is None:
        return
    if all((w.url or f"{w.scheme}://").startswith("http://") for w in pool.workers):
        document.add(path, "TLS for a pool without an https worker", "use https URLs, or drop it")
    elif (wrong := unfit_engine_tls(pool.tls, read=not document.sent)) is not None:
        document.add((*path, wrong[0]), *wrong[1:])


def _check_replicas(document: Document, path: KeyPath, pool: PoolConfig) -> None:
    """Bounds of a pool's size hold the listed workers."""
    fewest, most = pool.replica_bounds
    listed = pool.worker_count
    if most < listed:
        document.add(
            (*path, "max"),
            f"{most} is below the {listed} workers listed",
            f"give at least {listed}, or list fewer",
        )
    elif fewest > most:
        document.add((*path, "min"), f"{fewest} is over max, {most}", f"give at most {most}")


def _check_ca(document: Document, where: KeyPath, worker: WorkerConfig) -> None:
    if worker.ca_file is None:
        return
    if (worker.url or f"{worker.scheme}://").startswith("http://"):
        document.add(
            (*where, "ca_file"), "a CA for a worker without TLS", "use an https URL, or drop it"
        )
    elif not document.sent and not _is_file(worker.ca_file):
        document.add(
            (*where, "ca_file"),
            "no such file",
            "give the path of a PEM file, absolute or from the working directory",
        )


def _engine(worker: WorkerConfig) -> str:
    """The worker's id; all names of this host give the same one."""
    address = worker.address()
    if address.host in _THIS_HOST:
        return f"this host:{address.port}{address.path_prefix}"
    return address.id


def _is_file(name: str) -> bool:
    """Whether a file of this name exists; False for names that no file can have."""
    try:
        return Path(name).is_file()
    except (OSError, ValueError):
        return False
