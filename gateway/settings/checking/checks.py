"""Checks that types cannot express: unique names, ordered windows, sums that must fit.

Each check reads the sections that are valid by themselves and adds its problems to the document,
so one bad section does not hide problems of the others. Items are located by their index.
"""

from collections.abc import Sequence
from importlib.util import find_spec
from ipaddress import ip_address
from itertools import pairwise
from pathlib import Path

from gateway.settings.checking.price_checks import check_prices
from gateway.settings.config import Config
from gateway.settings.explain import nearest
from gateway.settings.fleet import ModelConfig, PoolConfig, WorkerConfig
from gateway.settings.problems import KeyPath
from gateway.settings.source import Document
from gateway.settings.tls import unfit_engine_tls, unfit_server_tls
from gateway.settings.token_pools import limits_tenants
from predictor.artifact import ArtifactError, load
from predictor.online import PrefillPredictor

NO_KV_BYTES = "the model does not say what a token takes"
KV_BYTES_FIX = "give the model's kv_bytes_per_token (2 x layers x KV heads x head size x bytes)"

MAX_PORT = 65_535
_OTLP = "opentelemetry.exporter.otlp.proto.http"
"""Of the extra `otel`; its API alone is installed with many packages."""
ONE_SERVES = "some thousand requests/s a core (docs/performance.md)"

_THIS_HOST = frozenset({"localhost", "localhost.", "127.0.0.1", "::1", "0.0.0.0", "::"})  # noqa: S104
"""Names of the loopback interface, and those that connect to it."""

Models = Sequence[tuple[int, ModelConfig]]


def check_config(document: Document, config: Config) -> None:
    """Relations between the server's own sections."""
    if config.health.max_eject_s < config.health.eject_s:
        document.add(
            ("health", "max_eject_s"),
            f"below eject_s ({config.health.eject_s:g})",
            f"give at least {config.health.eject_s:g}",
        )
    held_bytes = config.server.max_held_body_bytes // config.server.workers
    if held_bytes < config.server.max_body_bytes:
        document.add(
            ("server", "max_held_body_bytes"),
            f"{held_bytes:,} bytes for each replica, below max_body_bytes",
            f"give at least {config.server.max_body_bytes * config.server.workers}",
        )
    if (found := unfit_workers(config)) is not None:
        document.add(("server", "workers"), *found)
    _check_roles(document, config)
    if limits_tenants(config) and (found := unfit_limits(config)) is not None:
        document.add(("state", "url"), *found)
    if (found := unfit_ports(config)) is not None:
        document.add(("server", "management_port"), *found)
    if config.server.tls is not None and (wrong := unfit_server_tls(config.server.tls)):
        document.add(("server", "tls", wrong[0]), *wrong[1:])
    if config.server.tls is not None and config.state.shared and not config.server.management_port:
        document.add(
            ("server", "tls"),
            "replicas ask one another over plain HTTP, and the clients' port would speak TLS only",
            "set server.management_port, and keep that port internal",
        )
    if config.telemetry.otlp and not _installed(_OTLP):
        document.add(
            ("telemetry", "otlp"),
            "the exporter is not installed",
            "pip install 'sluice-gateway[otel]'",
        )


def unfit_limits(config: Config) -> tuple[str, str] | None:
    """Why no tenant and no key may have limits of its own: (problem, fix)."""
    if not config.state.url.startswith("redis+cluster://"):
        return None
    return (
        "limits of tenants and keys count over all models, which a cluster spreads",
        "use one server (redis:// or redis+sentinel://), or give budgets to entitlements",
    )


def _installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # nor is a package around it
        return False


def _check_roles(document: Document, config: Config) -> None:
    """The viewer key must be another one, and the dashboard open to this host alone."""
    server = config.server
    if server.viewer_key is not None and server.viewer_key == server.admin_key:
        document.add(("server", "viewer_key"), "the same as admin_key", "give another key")
    if server.open_dashboard and not _is_loopback(server.host):
        document.add(
            ("server", "open_dashboard"),
            f"everybody who reaches {server.host} could read the dashboard",
            "set server.host to 127.0.0.1, or leave it out and give server.viewer_key",
        )


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host.rstrip(".") == "localhost"


def unfit_ports(config: Config) -> tuple[str, str] | None:
    """(problem, fix) if `server.port` clashes with management ports, else None."""
    server = config.server
    first = server.management_port
    several = server.workers if server.workers > 1 else 0
    if not first or not first <= server.port <= first + several:
        return None
    if several:
        return (
            f"the clients' port, {server.port}, is among these {several + 1} of the replicas",
            f"give one below {max(server.port - several, 1)} or above {server.port}",
        )
    return ("the clients' port", "give another one, or 0 to have both on one port")


def unfit_workers(config: Config) -> tuple[str, str] | None:
    """(problem, fix) if several replicas on a host cannot serve this configuration, else None."""
    server = config.server
    if server.workers == 1:
        return None
    if not config.state.shared:
        return (
            "several replicas share their state through Redis, and state.url names none",
            f"set state.url to redis://HOST:6379/0, or give 1: one replica serves {ONE_SERVES}",
        )
    if not 0 < server.management_port <= MAX_PORT - server.workers:
        return (
            "each of several replicas needs a port of its own for metrics and admin routes",
            f"set server.management_port to a free port with {server.workers} free ones after it",
        )
    balanced = next((m.name for m in config.models if "bfio" in m.policies(server.workers)), None)
    if balanced is not None:
        return (
            f"the ranks of {balanced} are balanced by one replica",
            "give 1, or another policy than bfio",
        )
    return None


def check_references(document: Document, config: Config) -> None:
    """Fallbacks and split aliases name models, and no alias takes a name."""
    models = [model.name for model in config.models]
    lines: dict[str, KeyPath] = {n: ("models", at, "name") for at, n in enumerate(models)}
    for index, model in enumerate(config.models):
        lines.update(
            {a: ("models", index, "aliases", n) for n, a in enumerate(model.aliases) if a != "*"}
        )
        lines.update({a: ("models", index, "loras", n) for n, a in enumerate(model.loras)})
        for at, name in enumerate(model.fallbacks):
            path: KeyPath = ("models", index, "fallbacks", at)
            if name == model.name:
                document.add(path, "the model itself", "name another model, or remove it")
            elif name not in models:
                document.add(path, f"no model is named `{name}`", nearest(name, models))
    for index, alias in enumerate(config.aliases):
        where: KeyPath = ("aliases", index)
        first = lines.setdefault(alias.name, (*where, "name"))
        if first[:2] != where:
            document.add(
                (*where, "name"),
                f"`{alias.name}` is taken on line {document.place(first).line}",
                "give every model and alias a name of its own",
            )
        for name in alias.split:
            if name not in models:
                document.add(
                    (*where, "split", name),
                    f"no model is named `{name}`",
                    nearest(name, models),
                    key=True,
                )


def check_models(document: Document, models: Models) -> None:
    """Names, windows, boundaries and workers of the valid models."""
    _check_names(document, models)
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
        check_prices(document, path, model)


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
            "pip install 'sluice-gateway[exact]'",
        )
    if not _is_file(str(asked.tokenizer)):
        document.add((*where, "tokenizer"), "no such file", "give the path of tokenizer.json")


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


def _check_names(document: Document, models: Models) -> None:
    seen: dict[str, KeyPath] = {}
    names = [(("models", i, "name"), m.name) for i, m in models]
    aliases = [
        (("models", i, "aliases", n), alias) for i, m in models for n, alias in enumerate(m.aliases)
    ]
    loras = [(("models", i, "loras", n), lora) for i, m in models for n, lora in enumerate(m.loras)]
    path: KeyPath
    for path, name in [*names, *loras, *aliases]:
        if path[-1] == "name" and name == "*":
            document.add(path, "`*` is no name", "give a name, and put `*` in its aliases")
            continue
        first = seen.setdefault(name, path)
        if first == path:
            continue
        taken = f"`{name}` is taken on line {document.place(first).line}"
        fix = "give every model, alias and LoRA adapter a name of its own"
        if len(first) > 2 and first[2] == "loras":
            taken = f"`{name}` is a LoRA adapter, named on line {document.place(first).line}"
            fix = "remove it here: an adapter is a model's name by itself, and is never rewritten"
        document.add(path, taken, fix)


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


def _check_shared_workers(document: Document, models: Models) -> None:
    """Each engine belongs to one pool of one model; otherwise its slots would count twice."""
    seen: dict[str, KeyPath] = {}
    for number, model in models:
        for name, pool in model.pools.items():
            path: KeyPath = ("models", number, "pools", name, "workers")
            for index, worker in enumerate(pool.workers):
                if worker.url is None:
                    _check_source(document, seen, (*path, index), worker)
                    continue
                first = seen.setdefault(_engine(worker), (*path, index))
                if first[:-1] != path:  # _check_workers reports duplicates within one pool
                    document.add(
                        (*path, index),
                        f"worker {worker.id} is in pool `{first[3]}` of `{_name(models, first)}` "
                        f"too, on line {document.place(first).line}: its slots would count twice",
                        "give every pool engines of its own; data-parallel ranks behind one URL "
                        "are one worker with `ranks`",
                    )


def _check_source(
    document: Document, seen: dict[str, KeyPath], path: KeyPath, worker: WorkerConfig
) -> None:
    first = seen.setdefault(str(worker.discover), path)
    if first != path:
        document.add(
            path,
            f"{worker.discover} is a source on line {document.place(first).line} already",
            "let each source belong to one pool",
        )


def _name(models: Models, path: KeyPath) -> str:
    return next(model.name for number, model in models if number == path[1])


def _engine(worker: WorkerConfig) -> str:
    """The worker's id; all names of this host give the same one."""
    address = worker.address()
    if address.host in _THIS_HOST:
        return f"this host:{address.port}{address.path_prefix}"
    return address.id


def _check_workers(document: Document, path: KeyPath, pool: PoolConfig) -> None:
    seen: dict[str, int] = {}
    for index, worker in enumerate(pool.workers):
        where = (*path, index)
        if worker.url is None:
            _check_ca(document, where, worker)
            continue
        first = seen.setdefault(_engine(worker), index)
        if first != index:
            document.add(
                where,
                f"worker {worker.id} is listed twice, first on line "
                f"{document.place((*path, first)).line}",
                "remove one",
            )
        _check_ca(document, where, worker)


def _check_tls(document: Document, path: KeyPath, pool: PoolConfig) -> None:
    if pool.tls is None:
        return
    if all((w.url or f"{w.scheme}://").startswith("http://") for w in pool.workers):
        document.add(path, "TLS for a pool without an https worker", "use https URLs, or drop it")
    elif (wrong := unfit_engine_tls(pool.tls)) is not None:
        document.add((*path, wrong[0]), *wrong[1:])


def _check_ca(document: Document, where: KeyPath, worker: WorkerConfig) -> None:
    if worker.ca_file is None:
        return
    if (worker.url or f"{worker.scheme}://").startswith("http://"):
        document.add(
            (*where, "ca_file"), "a CA for a worker without TLS", "use an https URL, or drop it"
        )
    elif not _is_file(worker.ca_file):
        document.add(
            (*where, "ca_file"),
            "no such file",
            "give the path of a PEM file, absolute or from the working directory",
        )


def _check_replicas(document: Document, path: KeyPath, pool: PoolConfig) -> None:
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


def _is_file(name: str) -> bool:
    try:
        return Path(name).is_file()
    except (OSError, ValueError):
        return False
