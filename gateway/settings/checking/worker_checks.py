"""Checks of workers: each engine once, with files that exist, within the pool's bounds."""

from pathlib import Path

from gateway.settings.checking.name_checks import Models
from gateway.settings.fleet.pool import PoolConfig
from gateway.settings.fleet.worker import WorkerConfig
from gateway.settings.problems import KeyPath
from gateway.settings.source import Document
from gateway.settings.tls import unfit_engine_tls

_THIS_HOST = frozenset({"localhost", "localhost.", "127.0.0.1", "::1", "0.0.0.0", "::"})  # noqa: S104
"""Names of the loopback interface, and those that connect to it."""


def check_shared_workers(document: Document, models: Models) -> None:
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
                if first[:-1] != path:  # check_workers reports duplicates within one pool
                    document.add(
                        where,
                        f"worker {worker.id} is in pool `{first[3]}` of `{_name(models, first)}` "
                        f"too, on line {document.place(first).line}: its slots would count twice",
                        "give every pool engines of its own; data-parallel ranks behind one URL "
                        "are one worker with `ranks`",
                    )


def check_workers(document: Document, path: KeyPath, pool: PoolConfig) -> None:
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


def check_tls(document: Document, path: KeyPath, pool: PoolConfig) -> None:
    """TLS of a pool has an https worker to serve, and files that can be used."""
    if pool.tls is None:
        return
    if all((w.url or f"{w.scheme}://").startswith("http://") for w in pool.workers):
        document.add(path, "TLS for a pool without an https worker", "use https URLs, or drop it")
    elif (wrong := unfit_engine_tls(pool.tls, read=not document.sent)) is not None:
        document.add((*path, wrong[0]), *wrong[1:])


def check_replicas(document: Document, path: KeyPath, pool: PoolConfig) -> None:
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
    elif not document.sent and not is_file(worker.ca_file):
        document.add(
            (*where, "ca_file"),
            "no such file",
            "give the path of a PEM file, absolute or from the working directory",
        )


def _name(models: Models, path: KeyPath) -> str:
    return next(model.name for number, model in models if number == path[1])


def _engine(worker: WorkerConfig) -> str:
    """The worker's id; all names of this host give the same one."""
    address = worker.address()
    if address.host in _THIS_HOST:
        return f"this host:{address.port}{address.path_prefix}"
    return address.id


def is_file(name: str) -> bool:
    """Whether a file of this name exists; False for names that no file can have."""
    try:
        return Path(name).is_file()
    except (OSError, ValueError):
        return False
