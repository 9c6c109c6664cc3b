"""What the settings of a file, or of its valid sections, must agree on, and what may surprise.

Each check yields (path, problem, fix); those of a model and a pool have paths within it. An
entitlement's terms come from `gateway.admission.entitlement_terms`, for the file as for the admin
API. Reservations must fit the largest number of replicas; one that does not fit the current number
is pending until there are more.
"""

import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from importlib.util import find_spec
from ipaddress import ip_address
from itertools import chain, pairwise
from pathlib import Path
from typing import Final, TypeVar

from pydantic import ValidationError

from gateway.admission.entitlement_terms import GIB, BadTerms, ModelShape, terms_from
from gateway.fleet.model_runtime import PRIORITY_FLAGS
from gateway.records.entitlement import BACKFILL, Entitlement
from gateway.settings.config import Config
from gateway.settings.model import EnginesConfig, ModelConfig
from gateway.settings.names import (
    Problems,
    check_engines,
    check_names,
    check_references,
    check_tenants,
    unknown,
)
from gateway.settings.server import unfit_engine_tls, unfit_pem
from gateway.settings.source import KEY, Document, KeyPath, install
from gateway.settings.tenants import EntitlementConfig
from gateway.settings.token_pools import (
    every_limit,
    fields_of,
    limits_tenants,
    managed,
    shape_of,
    tenant_keys,
    terms_of,
)
from gateway.settings.types import Section
from predictor.artifact import ArtifactError, load
from predictor.online import PrefillPredictor

_S = TypeVar("_S", bound=Section)
_Reserved = tuple[KeyPath, EntitlementConfig, Entitlement]

MAX_PORT: Final = 65_535
_OTLP: Final = "opentelemetry.exporter.otlp.proto.http"
"""Of the extra `otel`; its API alone is installed with many packages."""
_NO_KV_BYTES: Final = (
    "the model does not say what a token takes",
    "give the model's kv_bytes_per_token (2 x layers x KV heads x head size x bytes)",
)
_MORE: Final = "lower a baseline, or add workers"
_MOST: Final = " (max_num_seqs x most workers)"
ONE_SERVES: Final = "some thousand requests/s a core (docs/performance.md)"


def check_relations(document: Document, config: Config | None) -> None:
    """Note what settings disagree on; without a configuration, in its valid sections."""
    root: dict[str, object] = {}
    if config is not None:  # all sections are valid; validating again would double the time
        root = {name: getattr(config, name) for name in Config.model_fields}
        models, entitlements = dict(enumerate(config.models)), dict(enumerate(config.entitlements))
    else:
        models = _valid(document, "models", ModelConfig)
        entitlements = _valid(document, "entitlements", EntitlementConfig)
    root |= {"models": models, "entitlements": entitlements}
    problems = [*check_names(document, root), *check_engines(document, root)]
    for index, model in models.items():
        at = ("models", index)
        is_list = isinstance(document.value((*at, "boundary", "b_short")), list)
        of_pools = (_below(place, _pool(document, pool)) for place, pool in model.written)
        of_model = chain(
            _windows(model),
            _boundary(model, is_list=is_list),
            _engines(document, model),
            *of_pools,
            _capacity_and_prices(model),
        )
        problems += _below(at, of_model)
    # Names of all models, including invalid ones.
    items = document.value(("models",))
    names = [
        item.get("name") if isinstance(item, dict) else None
        for item in (items if isinstance(items, list) else [None])
    ]
    readable_names = {str(name) for name in names if isinstance(name, str)}
    readable = len(readable_names) == len(set(map(repr, names)))
    problems += _entitlements(entitlements, models, readable_names if readable else None)
    if config is not None:  # where an entitlement is invalid, lists would seem to name nothing
        problems += [*check_references(root), *_server(document, config), *_auth(document, config)]
        if config.state.controller is None:  # else a cluster may grant what is not there
            problems += check_tenants(config)
    for problem in problems:
        document.add(*problem)


def _below(path: KeyPath, problems: Problems) -> Problems:
    """Problems of a part, by their paths in the file."""
    for inner, message, fix in problems:
        yield (*path, *inner), message, fix


def _valid(document: Document, key: str, section: type[_S]) -> dict[int, _S]:
    """The items of a list that are valid by themselves, by their indices."""
    items = document.value((key,))
    sections = {}
    for index, item in enumerate(items if isinstance(items, list) else []):
        try:
            sections[index] = section.model_validate(item)
        except ValidationError:
            continue
    return sections


def _server(document: Document, config: Config) -> Problems:
    """The server's own sections, and what they ask of the machine."""
    server, health = config.server, config.health
    if health.max_eject_s < health.eject_s:
        least = f"{health.eject_s:g}"
        yield ("health", "max_eject_s"), f"below eject_s ({least})", f"give at least {least}"
    held_bytes = (server.max_held_body_bytes or sys.maxsize) // server.workers
    if held_bytes < server.max_body_bytes:
        yield (
            ("server", "max_held_body_bytes"),
            f"{held_bytes:,} bytes for each replica, below max_body_bytes",
            f"give at least {server.max_body_bytes * server.workers}",
        )
    unfit = {
        ("server", "workers"): unfit_workers(config),
        ("state", "url"): unfit_limits(config) if limits_tenants(config) else None,
        ("server", "management_port"): unfit_ports(config),
        ("state", "controller"): (
            "a controller publishes through Redis, and state.url names none",
            "set state.url to redis://HOST:6379/0, the controller's, or remove the section",
        )
        if config.state.controller is not None and not config.state.shared
        else None,
    }
    yield from ((path, *problem) for path, problem in unfit.items() if problem is not None)
    if server.viewer_key is not None and server.viewer_key == server.admin_key:
        yield ("server", "viewer_key"), "the same as admin_key", "give another key"
    try:
        loopback = ip_address(server.host).is_loopback
    except ValueError:
        loopback = server.host.rstrip(".") == "localhost"
    if server.open_dashboard and not loopback:
        yield (
            ("server", "open_dashboard"),
            f"everybody who reaches {server.host} could read the dashboard",
            "set server.host to 127.0.0.1, or leave it out and give server.viewer_key",
        )
    tls = server.tls
    if tls is not None and not document.sent:
        wrong = unfit_pem(cert=tls.cert, key=tls.key, client_ca=tls.client_ca)
        yield from ((("server", "tls", name), message, fix) for name, message, fix in wrong)
    if tls is not None and config.state.shared and not server.management_port:
        yield (
            ("server", "tls"),
            "replicas ask one another over plain HTTP, and the clients' port would speak TLS only",
            "set server.management_port, and keep that port internal",
        )
    if config.telemetry.otlp and not _installed(_OTLP):
        yield ("telemetry", "otlp"), "the exporter is not installed", install("otel")


def unfit_limits(config: Config) -> tuple[str, str] | None:
    """Why no tenant and no key may have limits of its own: (problem, fix)."""
    if not config.state.address.startswith("redis+cluster://"):
        return None
    return (
        "a limit of a tenant or a key counts over all models, which a cluster spreads over servers",
        "use one server (redis:// or redis+sentinel://), or give budgets to entitlements",
    )


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


def _installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # nor is a package around it
        return False


def _auth(document: Document, config: Config) -> Problems:
    """Issuers of tokens: what checks them is installed, and their files can be read."""
    issuers = config.auth.jwt
    if issuers and not (_installed("jwt") and _installed("cryptography")):
        yield ("auth", "jwt"), "PyJWT is not installed", install("jwt")
    for index, issuer in enumerate(issuers if not document.sent else ()):
        jwks = None if issuer.jwks.startswith(("https:", "http:")) else issuer.jwks
        ca_file = None if issuer.ca_file is None else str(issuer.ca_file)
        for name, file in (("jwks", jwks), ("ca_file", ca_file)):
            path: KeyPath = ("auth", "jwt", index, name)
            try:
                if file is not None:
                    Path(file).open("rb").close()
            except OSError as error:
                yield path, f"cannot read the file: {error.strerror}", "check the path"
            else:
                if name == "ca_file":
                    wrong = unfit_pem(ca_file=file)
                    yield from ((path, message, fix) for _, message, fix in wrong)


def _windows(model: ModelConfig) -> Problems:
    names: dict[int, str] = {}
    for name, pool in model.pools.items():
        other = names.setdefault(pool.max_model_len, name)
        if other != name:
            yield (
                ("pools", name, "max_model_len"),
                f"pool `{other}` has the same window, {pool.max_model_len}",
                f"put the workers of both into `{other}`, or give different windows",
            )
    short, long = model.pools.get("short"), model.pools.get("long")
    if short is not None and long is not None and long.max_model_len < short.max_model_len:
        yield (
            ("pools", "long", "max_model_len"),
            f"below the window of pool `short`, {short.max_model_len}",
            f"give more than {short.max_model_len}, or swap the pools' names",
        )


def _boundary(model: ModelConfig, *, is_list: bool) -> Problems:
    """Boundaries within their pools' windows, their limits, and the planned distribution.

    `is_list`: `b_short` is given as a list.
    """
    asked, wanted = model.boundary, len(model.pools) - 1
    given, least, start = asked.b_short, asked.b_short_min, model.boundaries
    if given is not None and len(given) != wanted and (is_list or wanted > 0):
        pools = ", ".join(model.pools)
        many = f"{wanted} {'number' if wanted == 1 else 'numbers'}"
        yield (
            ("boundary", "b_short"),
            f"{len(given)} given for {wanted + 1} {'pools' if wanted else 'pool'} ({pools})",
            f"give {many}, one for each pool but the last" if wanted else "remove it",
        )
    elif given is not None:
        if list(given) != sorted(set(given)):
            fix = "order the boundaries as the pools' windows"
            yield ("boundary", "b_short"), "not ascending", fix
        pairs = zip(given, list(model.pools.items())[:-1], strict=False)
        for position, (bound, (name, pool)) in enumerate(pairs):
            most = pool.max_model_len
            if bound > most:
                over = f"{bound} is over the window of pool `{name}`, {most}"
                yield ("boundary", "b_short", position), over, f"give at most {most}"
    if asked.auto and len(model.pools) == 1:
        yield ("boundary", "auto"), "one pool has no boundary to move", "give a second pool"
    if least is not None and len(least) != len(start):
        yield (
            ("boundary", "b_short_min"),
            f"{len(least)} given for {len(model.pools)} pools",
            "give one for each pool but the last",
        )
    elif least is not None and any(low > high for low, high in zip(least, start, strict=True)):
        fix = "give at most b_short"
        yield ("boundary", "b_short_min"), "over the boundary it belongs to", fix
    if any(b[0] <= a[0] or b[1] < a[1] for a, b in pairwise(asked.planned or ())):
        fix = "order the points by tokens; shares never fall"
        yield ("boundary", "planned"), "not ascending", fix


def _engines(document: Document, model: ModelConfig) -> Problems:
    """Ranks can be balanced, and a prompt cut: policy bfio balances ranks behind one barrier."""
    for (place, pool), policy in zip(model.written, model.policies(), strict=True):
        if policy == "bfio" and place[-1] == "prefill":
            yield (
                (*place, "scheduling", "policy"),
                "policy bfio balances ranks that decode, and these engines compute prompts",
                "choose quartz, or leave it out",
            )
            continue
        single = next((at for at, worker in enumerate(pool.workers) if worker.ranks == 1), None)
        if policy == "bfio" and single is not None:
            yield (
                (*place, "workers", single),
                "policy bfio balances data-parallel ranks, and this worker has none",
                "give its `ranks` (2 or more), or choose policy quartz for independent replicas",
            )
    asked = model.compression
    if asked.enabled and len(model.pools) == 1:
        fix = "give a second pool"
        yield ("compression", "enabled"), "one pool has no boundary to fit under", fix
    if asked.enabled and asked.tokenizer is not None:
        where = ("compression", "tokenizer")
        if not _installed("tokenizers"):
            yield where, "the reader is not installed", install("exact")
        if not document.sent and not _is_file(str(asked.tokenizer)):
            yield where, "no such file", "give the path of tokenizer.json"
    if model.scheduling.predictor is not None:
        yield from _predictor(document, model, model.scheduling.predictor)


def _predictor(document: Document, model: ModelConfig, predictor: Path) -> Problems:
    """A trained predictor is one for a pool of this model."""
    where = ("scheduling", "predictor")
    if not model.predicts:
        fix = "set policy: quartz, or shadow: true beside another policy, or leave it out"
        yield where, "no pool is predicted", fix
        return
    if document.sent:
        return
    try:
        artifact = load(predictor)
    except ArtifactError as error:
        yield where, str(error), error.fix
        return
    sections = [artifact.section(model.name, pool) for pool in model.all_pools]
    if not any(sections):
        names = ", ".join(section.name for section in artifact.sections[:8])
        yield (
            where,
            f"{predictor} has no section for a pool of this model; it has {names}",
            f"train on requests of {model.name} in {', '.join(model.all_pools)}",
        )
    for section in filter(None, sections):
        try:
            PrefillPredictor(section, workers=1)
        except ValueError as error:
            yield where, f"{section.name}: {error}", "train again with --alpha 0.95"


def _pool(document: Document, pool: EnginesConfig) -> Problems:
    """A pool's certificates, and the bounds of its size."""
    for index, worker in enumerate(pool.workers):
        if worker.ca_file is None:
            continue
        where = ("workers", index, "ca_file")
        if worker.plain_http:
            yield where, "a CA for a worker without TLS", "use an https URL, or drop it"
        elif not document.sent and not _is_file(worker.ca_file):
            fix = "give the path of a PEM file, absolute or from the working directory"
            yield where, "no such file", fix
    if pool.tls is not None and all(worker.plain_http for worker in pool.workers):
        yield ("tls",), "TLS for a pool without an https worker", "use https URLs, or drop it"
    elif pool.tls is not None:
        wrong = unfit_engine_tls(pool.tls, read=not document.sent)
        yield from ((("tls", name), message, fix) for name, message, fix in wrong)
    (fewest, most), listed = pool.replica_bounds, pool.worker_count
    if most < listed:
        fix = f"give at least {listed}, or list fewer"
        yield ("replicas", "max"), f"{most} is below the {listed} workers listed", fix
    elif fewest > most:
        yield ("replicas", "min"), f"{fewest} is over max, {most}", f"give at most {most}"


def _capacity_and_prices(model: ModelConfig) -> Problems:
    """What all pools of a model state, or none: a rate of tokens, a price by the hour."""
    named = list(zip(model.all_pools, model.written, strict=True))
    rated = [name for name, (_, pool) in named if pool.tokens_per_second is not None]
    silent = [place for name, (place, _) in named if name not in rated]
    if rated and silent:
        yield (
            (*silent[0], KEY),
            f"no tokens_per_second here, but in pool `{rated[0]}`",
            "give it for every pool of a model, or for none",
        )
    by_hour = [(name, place) for name, (place, pool) in named if pool.gpu_hour is not None]
    unpriced = [place for _, (place, pool) in named if pool.gpu_hour is None]
    if by_hour and model.price is not None:
        yield (
            (*by_hour[0][1], "gpu_hour"),
            "the model has list prices as well, so a request would have two costs",
            "remove `price` at the model, or `gpu_hour` at its pools",
        )
    elif by_hour and unpriced:
        yield (
            unpriced[0],
            f"pool `{by_hour[0][0]}` has a price by the hour, and this one has none",
            "give `gpu_hour` at every pool of the model, or at none",
        )
    for place, pool in model.written:
        if model.kv_bytes_per_token is None and pool.kv_cache_gib is not None:
            yield (*place, "kv_cache_gib"), *_NO_KV_BYTES
        if pool.gpu_hour is None and pool.gpus != 1:
            yield (
                (*place, "gpus"),
                "counts for `gpu_hour` only, which this pool has not",
                "give `gpu_hour`, or remove `gpus`",
            )
    yield from _transfers(model)


def _transfers(model: ModelConfig) -> Problems:
    """What only one kind of transfer has."""
    for name, pool in model.pools.items():
        if (transfer := pool.transfer) is None:
            continue
        wrong, message, fix = (
            *("bootstrap_port", f"kind {transfer.kind} has no such port"),
            "remove it, or choose kind sglang",
        )
        if transfer.kind == "sglang":
            wrong, message = "skip_below_tokens", "decode engines of SGLang compute no prompts"
            fix = "remove it, or give short prompts a pool of their own"
        if wrong in transfer.model_fields_set and getattr(transfer, wrong):
            yield ("pools", name, "transfer", wrong), message, fix


def _is_file(name: str) -> bool:
    """Whether a file of this name exists; False for names that no file can have."""
    try:
        return Path(name).is_file()
    except (OSError, ValueError):
        return False


def _entitlements(
    entitlements: Mapping[int, EntitlementConfig],
    models: Mapping[int, ModelConfig],
    known_models: Collection[str] | None,
) -> Problems:
    """Models, terms and reservations.

    `known_models` includes the names of invalid models; None if a name could not be read.
    """
    by_name = {model.name: model for model in models.values()}
    aliases = {alias: model.name for model in models.values() for alias in model.aliases}
    reserved: dict[str, list[_Reserved]] = {name: [] for name in by_name}
    for index, entitlement in entitlements.items():
        path: KeyPath = ("entitlements", index)
        name = entitlement.model
        if known_models is not None and name not in known_models and name in aliases:
            yield (*path, "model"), f"`{name}` is an alias", f"write its name, `{aliases[name]}`"
        elif known_models is not None:
            names = sorted(known_models)
            yield from unknown([((*path, "model"), name)], names, "no model is named `{}`")
        # Without a model, pools go unchecked.
        by_pool = entitlement.concurrency
        pools = tuple(by_pool) if isinstance(by_pool, Mapping) else ("",)
        shape = ModelShape(name=name, pools=pools, slots=(1,) * len(pools))
        if (model := by_name.get(name)) is not None:
            shape = shape_of(model)
            named = [((*path, "concurrency", pool), pool) for pool in pools if pool]
            wrong = list(unknown(named, model.pools, f"model `{name}` has no pool `{{}}`"))
            yield from wrong
            if wrong:
                continue
            for field in ("kv_cache_gib", "max_kv_cache_gib"):
                if model.kv_bytes_per_token is None and getattr(entitlement, field) is not None:
                    yield (*path, field), *_NO_KV_BYTES
        try:
            terms = terms_from(fields_of(entitlement), shape, 0)
        except BadTerms as error:
            where = (*path, error.field, error.part) if error.part else (*path, error.field)
            yield where, error.message, error.fix
            continue
        if model is not None and terms.reserves:
            reserved[name].append((path, entitlement, terms))
    for name, own in reserved.items():
        yield from _reservations(own, shape_of(by_name[name]))


def _reservations(reserved: Sequence[_Reserved], shape: ModelShape) -> Problems:
    """Reserved baselines must fit the slots: over all pools, then in each pool as split.

    Reserved KV must fit the pools' (if unstated, all slots when full), and so must token rates.
    """
    total, slots = 0, sum(shape.max_slots)
    by_pool = [0] * len(shape.pools)
    reported: set[int] = set()
    for path, entitlement, terms in reserved:
        where: KeyPath = (*path, "concurrency")
        total += sum(terms.baseline)
        if total > slots:
            sums = f"baselines reserved on `{shape.name}` add up to {total} with this one"
            yield where, f"{sums}, but its pools have {slots} slots{_MOST}", _MORE
            break
        for pool, name in enumerate(shape.pools):
            by_pool[pool] += terms.baseline_of(pool)
            if by_pool[pool] <= shape.max_slots[pool] or pool in reported:
                continue
            reported.add(pool)
            named = isinstance(entitlement.concurrency, Mapping)
            sums = f"baselines reserved in pool `{name}` add up to {by_pool[pool]} with this one"
            if not named:
                sums += f", split {'/'.join(map(str, terms.baseline))} over the pools"
            yield (
                (*where, name) if named else where,
                f"{sums}, but it has {shape.max_slots[pool]} slots{_MOST}",
                _MORE if named else "give concurrency by pool, lower it, or add workers",
            )
    kv, rate = shape.max_kv_bytes / GIB, shape.max_tokens_per_s
    kvs = [(path, terms.kv_bytes / GIB) for path, _, terms in reserved]
    rates = [(path, terms.tokens_per_s) for path, _, terms in reserved]
    for field, most, amounts, what, unit, has in (
        ("kv_cache_gib", kv, kvs, "KV cache reserved on `{}` adds", " GiB", f"{kv:.1f} GiB"),
        ("tokens_per_second", rate, rates, "token rates reserved on `{}` add", "", f"{rate:g}"),
    ):
        held = 0.0
        for path, amount in amounts:
            before, held = held, held + amount
            if 0 < most < held and before <= most:
                sums = f"{what.format(shape.name)} up to {held:g}{unit} with this one"
                fits = f"its pools have {has} (per worker x most workers)"
                yield (*path, field), f"{sums}, but {fits}", f"lower {field}, or add workers"


# -- notices


def remarks(config: Config) -> list[str]:
    """One line for each setting of a valid configuration that may surprise."""
    lines = []
    if not config.entitlements and not config.auth.jwt and config.state.controller is None:
        lines.append("no entitlements: the gateway is open to any key, or none")
    if not config.administered:
        reads = config.server.viewer_key is not None or config.server.admin_keys
        closed = "entitlements cannot be changed" if reads else "the admin routes are closed"
        lines.append(f"no server.admin_key: {closed}")
    for model in config.models:
        about = f"model {model.name}"
        if len(model.pools) == 1 and model.boundary.b_short:
            lines.append(f"{about}: boundary.b_short has no effect with one pool")
        if model.engine_priority != "none":
            lines.append(
                f"{about}: engine_priority: {model.engine_priority} has no effect unless every "
                f"engine is started with {PRIORITY_FLAGS[model.engine_priority]}; some versions "
                "refuse each request instead"
            )
        if config.entitlements and not managed(config, model):
            lines.append(
                f"{about}: no entitlement states a service_class or a limit, so keys are checked "
                "and nobody is refused for load"
            )
    return [*lines, *_about_entitlements(config)]


def _about_entitlements(config: Config) -> Iterator[str]:
    """Budgets of what has no price, then what opens, reserves or serves less than it seems to."""
    spenders = {
        limit.name.partition("/")[0] if limit.scope == "key" else limit.name
        for limit in every_limit(config)
        if limit.unit == "money"
    }
    by_name = {model.name: model for model in config.models}
    priced = {m.name for m in config.models if m.price or any(p.gpu_hour for p in m.pools.values())}
    used = {name for key in tenant_keys(config) for name in key.entitlements}
    for entitlement in config.entitlements:
        if entitlement.model not in priced and spenders & {entitlement.tenant, entitlement.name}:
            yield (
                f"entitlement {entitlement.name}: a budget is in money, and the model "
                f"{entitlement.model} has no price, so that its use is free"
            )
    for entitlement in config.entitlements:
        about = f"entitlement {entitlement.name}"
        if not config.auth.jwt and not entitlement.api_keys and entitlement.name not in used:
            yield f"{about}: no api_keys, so nobody can use it"
        if entitlement.service_class in BACKFILL and entitlement.concurrency is not None:
            yield (
                f"{about}: {entitlement.service_class} reserves nothing: concurrency only says "
                "where its burst begins"
            )
        if entitlement.service_class == "guaranteed":
            pools = by_name[entitlement.model].pools
            baseline = terms_of(entitlement, by_name[entitlement.model]).baseline
            none = [name for name, part in zip(pools, baseline, strict=True) if not part]
            if none:
                pools_named = ", ".join(none)
                yield f"{about}: no baseline in {pools_named}, so what belongs there is refused"
