"""Entitlements against one another, their models and their tenants: names, keys, terms, sums.

`gateway.admission.entitlement_terms` derives the terms for the file and for the admin API, so both
mean the same. Reservations must fit the largest number of replicas; one that does not fit the
current number is pending until there are more.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence

from gateway.admission.entitlement_terms import GIB, BadTerms, ModelShape, terms_from
from gateway.records.entitlement import Entitlement
from gateway.settings.config import EntitlementConfig
from gateway.settings.explain import nearest
from gateway.settings.model import ModelConfig
from gateway.settings.model_checks import KV_BYTES_FIX, NO_KV_BYTES
from gateway.settings.name_checks import Models, unique
from gateway.settings.problems import KeyPath
from gateway.settings.sections import TenantConfig, TenantKeyConfig
from gateway.settings.source import Document
from gateway.settings.token_pools import fields_of, shape_of

Entitlements = Sequence[tuple[int, EntitlementConfig]]
Tenants = Sequence[tuple[int, TenantConfig]]
Reserved = Sequence[tuple[int, EntitlementConfig, Entitlement]]

_MORE = "lower a baseline, or add workers"


def check_entitlements(
    document: Document,
    entitlements: Entitlements,
    models: Models,
    known_models: Collection[str] | None,
) -> None:
    """Names, keys, terms and reservations.

    `known_models` includes the names of invalid models; None if a name could not be read.
    """
    _check_digests(
        document,
        _digests((), entitlements),
        "a key belongs to one entitlement: make another with `sluice hash-key --new`",
    )
    names: dict[str, KeyPath] = {}
    by_name = {model.name: model for _, model in models}
    aliases = {alias: model.name for _, model in models for alias in model.aliases}
    found: list[tuple[int, EntitlementConfig, Entitlement]] = []
    for index, entitlement in entitlements:
        path: KeyPath = ("entitlements", index)
        fix = "give every entitlement a name of its own"
        unique(document, names, entitlement.name, (*path, "name"), fix)
        name = entitlement.model
        if known_models is not None and name not in known_models:
            alias = name in aliases
            document.add(
                (*path, "model"),
                f"`{name}` is an alias" if alias else f"no model is named `{name}`",
                f"write its name, `{aliases[name]}`"
                if alias
                else nearest(name, sorted(known_models)),
            )
        terms = _check_terms(document, path, entitlement, by_name.get(name))
        if terms is not None and terms.reserves:
            found.append((index, entitlement, terms))
    for model in by_name.values():
        shape = shape_of(model)
        reserved = [item for item in found if item[2].model == model.name]
        _check_slots(document, reserved, shape)
        _check_sums(document, reserved, shape)


def _check_terms(
    document: Document, path: KeyPath, entitlement: EntitlementConfig, model: ModelConfig | None
) -> Entitlement | None:
    """The section's terms; None after noting a problem. Without a model, pools go unchecked."""
    by_pool = entitlement.concurrency
    pools = tuple(by_pool) if isinstance(by_pool, Mapping) else ("",)
    shape = ModelShape(name=entitlement.model, pools=pools, slots=(1,) * len(pools))
    if model is not None:
        shape = shape_of(model)
        unknown = [name for name in pools if name not in model.pools] if by_pool else []
        if isinstance(by_pool, Mapping) and unknown:
            for name in unknown:
                document.add(
                    (*path, "concurrency", name),
                    f"model `{model.name}` has no pool `{name}`",
                    nearest(name, model.pools),
                    key=True,
                )
            return None
        if model.kv_bytes_per_token is None:
            for field in ("kv_cache_gib", "max_kv_cache_gib"):
                if getattr(entitlement, field) is not None:
                    document.add((*path, field), NO_KV_BYTES, KV_BYTES_FIX)
    try:
        return terms_from(fields_of(entitlement), shape, 0)
    except BadTerms as error:
        where = (*path, error.field, error.part) if error.part else (*path, error.field)
        document.add(where, error.message, error.fix)
        return None


def _check_slots(document: Document, reserved: Reserved, shape: ModelShape) -> None:
    """Reserved baselines must fit the slots: over all pools, then in each pool as split."""
    total, slots = 0, sum(shape.max_slots)
    by_pool = [0] * len(shape.pools)
    reported: set[int] = set()
    for index, entitlement, terms in reserved:
        path: KeyPath = ("entitlements", index, "concurrency")
        before, total = total, total + sum(terms.baseline)
        if total > slots:
            if before <= slots:
                document.add(
                    path,
                    f"baselines reserved on `{shape.name}` add up to {total} with this one, but "
                    f"its pools have {slots} slots (max_num_seqs x most workers)",
                    _MORE,
                )
            return
        for pool, name in enumerate(shape.pools):
            by_pool[pool] += terms.baseline_of(pool)
            if by_pool[pool] <= shape.max_slots[pool] or pool in reported:
                continue
            reported.add(pool)
            named = isinstance(entitlement.concurrency, Mapping)
            document.add(
                (*path, name) if named else path,
                f"baselines reserved in pool `{name}` add up to {by_pool[pool]} with this one"
                + ("" if named else f", split {'/'.join(map(str, terms.baseline))} over the pools")
                + f", but it has {shape.max_slots[pool]} slots (max_num_seqs x most workers)",
                _MORE if named else "give concurrency by pool, lower it, or add workers",
            )


def _check_sums(document: Document, reserved: Reserved, shape: ModelShape) -> None:
    """Reserved KV must fit the pools' (if unstated, all slots when full), and so must rates."""
    amounts = ((index, terms.kv_bytes / GIB) for index, _, terms in reserved)
    for index, total in _first_over(amounts, shape.max_kv_bytes / GIB):
        document.add(
            ("entitlements", index, "kv_cache_gib"),
            f"KV cache reserved on `{shape.name}` adds up to {total:g} GiB with this one, but its "
            f"pools have {shape.max_kv_bytes / GIB:.1f} GiB (per worker x most workers)",
            "lower kv_cache_gib, or add workers",
        )
    amounts = ((index, terms.tokens_per_s) for index, _, terms in reserved)
    for index, total in _first_over(amounts, shape.max_tokens_per_s):
        document.add(
            ("entitlements", index, "tokens_per_second"),
            f"token rates reserved on `{shape.name}` add up to {total:g} with this one, but its "
            f"pools have {shape.max_tokens_per_s:g} (per worker x most workers)",
            "lower tokens_per_second, or add workers",
        )


def _first_over(amounts: Iterator[tuple[int, float]], most: float) -> Iterator[tuple[int, float]]:
    """(index, sum) at the first running sum over `most`, if any; `most` 0 means no limit."""
    total = 0.0
    for index, amount in amounts:
        total += amount
        if 0 < most < total:
            yield index, total
            return


def check_tenants(
    document: Document,
    tenants: Tenants,
    entitlements: Entitlements,
    loras: Mapping[str, Sequence[str]],
) -> None:
    """Tenants against their entitlements: names, digests, and what a key may open.

    `loras`: the LoRA adapters of each model, which the keys for it may name.
    """
    _check_digests(
        document,
        _digests(tenants, entitlements),
        "list a key once: under `tenants` it opens several models",
        section="tenants",
    )
    own: dict[str, dict[str, str]] = {}
    for _, entitlement in entitlements:
        own.setdefault(entitlement.tenant, {})[entitlement.name] = entitlement.model
    seen: dict[str, KeyPath] = {}
    for index, tenant in tenants:
        path: KeyPath = ("tenants", index)
        unique(document, seen, tenant.name, (*path, "name"), "give every tenant a name of its own")
        models = own.get(tenant.name, {})
        if tenant.keys and not models:
            document.add(
                (*path, "keys"),
                f"no entitlement names the tenant `{tenant.name}`, so its keys open nothing",
                f"add an entitlement with `tenant: {tenant.name}` for each model",
            )
            continue
        _check_listed(document, (*path, "entitlements"), tenant.entitlements, models)
        _check_tenant_keys(document, path, tenant, models, loras)


def _check_tenant_keys(
    document: Document,
    path: KeyPath,
    tenant: TenantConfig,
    models: dict[str, str],
    loras: Mapping[str, Sequence[str]],
) -> None:
    names: dict[str, KeyPath] = {}
    for number, key in enumerate(tenant.keys):
        where: KeyPath = (*path, "keys", number)
        unique(document, names, key.name, (*where, "name"), "give every key a name of its own")
        _check_listed(document, (*where, "entitlements"), key.entitlements, models)
        bases = {models[name] for name in _used(tenant, key, models) if name in models}
        opened = bases.union(*(loras.get(base, ()) for base in bases))
        for at, model in enumerate(key.models or ()):
            if model not in opened:
                document.add(
                    (*where, "models", at),
                    f"no entitlement that this key uses is for `{model}`",
                    nearest(model, sorted(opened)) if opened else "give it an entitlement",
                )


def _used(tenant: TenantConfig, key: TenantKeyConfig, models: dict[str, str]) -> Sequence[str]:
    for listed in (key.entitlements, tenant.entitlements):
        if listed is not None:
            return listed
    return tuple(models)


def _check_listed(
    document: Document, path: KeyPath, listed: Sequence[str] | None, own: dict[str, str]
) -> None:
    for at, name in enumerate(listed or ()):
        if name not in own:
            document.add(
                (*path, at), f"this tenant has no entitlement `{name}`", nearest(name, own)
            )


def _check_digests(
    document: Document, keys: Iterator[tuple[KeyPath, str]], fix: str, section: str = "entitlements"
) -> None:
    """Each key stands once; those that a section repeats are told of."""
    seen: dict[str, KeyPath] = {}
    for path, digest in keys:
        first = seen.setdefault(digest, path)
        if first != path and path[0] == section:
            document.add(path, f"the same key as on line {document.place(first).line}", fix)


def _digests(tenants: Tenants, entitlements: Entitlements) -> Iterator[tuple[KeyPath, str]]:
    for index, entitlement in entitlements:
        for at, digest in enumerate(entitlement.api_keys):
            yield ("entitlements", index, "api_keys", at), digest
    for index, tenant in tenants:
        for number, key in enumerate(tenant.keys):
            yield ("tenants", index, "keys", number, "sha256"), key.sha256
