"""What a type cannot say: names that must differ, windows in order, sums that must fit.

Each check looks at what is valid by itself and adds its problems to the document, so one bad
section does not hide the others' problems. Positions in the file are the items' indices.
"""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from gateway.settings.config import Config, EntitlementConfig
from gateway.settings.explain import nearest
from gateway.settings.fleet import ModelConfig, PoolConfig
from gateway.settings.problems import KeyPath
from gateway.settings.source import Document

GIB = 1 << 30

Models = Sequence[tuple[int, ModelConfig]]
Entitlements = Sequence[tuple[int, EntitlementConfig]]


def check_config(document: Document, config: Config) -> None:
    """Relations between the server's own sections."""
    if config.health.max_eject_s < config.health.eject_s:
        document.add(
            ("health", "max_eject_s"),
            f"below eject_s ({config.health.eject_s:g})",
            f"give at least {config.health.eject_s:g}",
        )


def check_models(document: Document, models: Models) -> None:
    """Names, windows, boundaries and workers of the valid models."""
    _check_names(document, models)
    for index, model in models:
        path: KeyPath = ("models", index)
        _check_windows(document, path, model)
        _check_boundary(document, path, model)
        for name, pool in model.pools.items():
            _check_workers(document, (*path, "pools", name, "workers"), pool)


def check_entitlements(
    document: Document,
    entitlements: Entitlements,
    models: Models,
    known_models: Collection[str] | None,
) -> None:
    """Names, keys and reservations. `known_models`: of invalid models too; None: unknown."""
    _check_entitlement_names(document, entitlements)
    _check_keys(document, entitlements)
    by_name = {model.name: model for _, model in models}
    aliases = {alias: model.name for _, model in models for alias in model.aliases}
    for index, entitlement in entitlements:
        path: KeyPath = ("entitlements", index)
        name = entitlement.model
        if known_models is not None and name not in known_models:
            fix = f"write its name, `{aliases[name]}`" if name in aliases else None
            document.add(
                (*path, "model"),
                f"no model is named `{name}`" if fix is None else f"`{name}` is an alias",
                fix or nearest(name, sorted(known_models)),
            )
        _check_limits(document, path, entitlement, by_name.get(name))
    for model in by_name.values():
        reserved = [(i, e) for i, e in entitlements if e.reserves and e.model == model.name]
        _check_slots(document, reserved, model)
        _check_kv(document, reserved, model)


def _check_names(document: Document, models: Models) -> None:
    seen: dict[str, KeyPath] = {}
    names = [(("models", i, "name"), m.name) for i, m in models]
    aliases = [
        (("models", i, "aliases", n), alias) for i, m in models for n, alias in enumerate(m.aliases)
    ]
    path: KeyPath
    for path, name in [*names, *aliases]:
        if path[-1] == "name" and name == "*":
            document.add(path, "`*` is no name", "give a name, and put `*` in its aliases")
            continue
        first = seen.setdefault(name, path)
        if first != path:
            document.add(
                path,
                f"`{name}` is taken on line {document.place(first).line}",
                "every name and alias may stand once",
            )


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


def _check_workers(document: Document, path: KeyPath, pool: PoolConfig) -> None:
    seen: dict[str, int] = {}
    for index, worker in enumerate(pool.workers):
        where = (*path, index)
        first = seen.setdefault(worker.id, index)
        if first != index:
            document.add(
                where,
                f"worker {worker.id} is listed twice, first on line "
                f"{document.place((*path, first)).line}",
                "remove one",
            )
        if worker.ca_file is None:
            continue
        if worker.url.startswith("http://"):
            document.add(
                (*where, "ca_file"), "a CA for a worker without TLS", "use an https URL, or drop it"
            )
        elif not _is_file(worker.ca_file):
            document.add(
                (*where, "ca_file"),
                "no such file",
                "give the path of a PEM file, absolute or from the working directory",
            )


def _is_file(name: str) -> bool:
    try:
        return Path(name).is_file()
    except (OSError, ValueError):
        return False


def _check_entitlement_names(document: Document, entitlements: Entitlements) -> None:
    seen: dict[str, int] = {}
    for index, entitlement in entitlements:
        first = seen.setdefault(entitlement.name, index)
        if first != index:
            line = document.place(("entitlements", first, "name")).line
            document.add(
                ("entitlements", index, "name"),
                f"`{entitlement.name}` is taken on line {line}",
                "give every entitlement a name of its own",
            )


def _check_keys(document: Document, entitlements: Entitlements) -> None:
    seen: dict[str, KeyPath] = {}
    for index, entitlement in entitlements:
        for position, key in enumerate(entitlement.api_keys):
            path = ("entitlements", index, "api_keys", position)
            first = seen.setdefault(key, path)
            if first != path:
                document.add(
                    path,
                    f"the same key as on line {document.place(first).line}",
                    "a key belongs to one entitlement: make another with `sluice hash-key --new`",
                )


def _check_limits(
    document: Document, path: KeyPath, entitlement: EntitlementConfig, model: ModelConfig | None
) -> None:
    limit = entitlement.max_concurrency
    if limit is not None and limit < entitlement.baseline:
        document.add(
            (*path, "max_concurrency"),
            f"{limit} is below the baseline, {entitlement.baseline}",
            "raise max_concurrency or lower concurrency",
        )
    if model is not None and isinstance(entitlement.concurrency, Mapping):
        for name in entitlement.concurrency:
            if name not in model.pools:
                document.add(
                    (*path, "concurrency", name),
                    f"model `{model.name}` has no pool `{name}`",
                    nearest(name, model.pools),
                    key=True,
                )


def _check_slots(document: Document, reserved: Entitlements, model: ModelConfig) -> None:
    """Reserved baselines against slots: over all pools, and pool by pool where one is named."""
    total = 0
    by_pool = dict.fromkeys(model.pools, 0)
    told: set[str] = set()
    for index, entitlement in reserved:
        path: KeyPath = ("entitlements", index, "concurrency")
        total += entitlement.baseline
        if total > model.slots and "" not in told:
            told.add("")
            document.add(
                path,
                f"baselines reserved on `{model.name}` add up to {total} with this one, but its "
                f"pools have {model.slots} slots (max_num_seqs x workers)",
                "lower a baseline, or add workers",
            )
        if not isinstance(entitlement.concurrency, Mapping):
            continue
        for name, amount in entitlement.concurrency.items():
            if name not in by_pool:
                continue
            by_pool[name] += amount
            slots = model.pools[name].slots
            if by_pool[name] > slots and name not in told:
                told.add(name)
                document.add(
                    (*path, name),
                    f"baselines reserved in pool `{name}` add up to {by_pool[name]} with this "
                    f"one, but it has {slots} slots (max_num_seqs x workers)",
                    "lower a baseline, or add workers",
                )


def _check_kv(document: Document, reserved: Entitlements, model: ModelConfig) -> None:
    """Reserved KV against what every slot filled to its window would take: a ceiling."""
    if model.kv_bytes_per_token is None:
        return
    tokens = sum(pool.slots * pool.max_model_len for pool in model.pools.values())
    ceiling_gib = tokens * model.kv_bytes_per_token / GIB
    total_gib = 0.0
    for index, entitlement in reserved:
        total_gib += entitlement.kv_cache_gib or 0.0
        if total_gib > ceiling_gib:
            document.add(
                ("entitlements", index, "kv_cache_gib"),
                f"KV cache reserved on `{model.name}` adds up to {total_gib:g} GiB with this one, "
                f"but all its slots filled take {ceiling_gib:.1f} GiB",
                "lower kv_cache_gib, or add workers",
            )
            return
