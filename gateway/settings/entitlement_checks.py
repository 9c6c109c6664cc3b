"""Entitlements against their models and one another, and tenants against their entitlements.

`gateway.admission.entitlement_terms` derives the terms for the file and for the admin API, so both
mean the same. Reservations must fit the largest number of replicas; one that does not fit the
current number is pending until there are more.
"""

from collections.abc import Collection, Generator, Mapping, Sequence
from typing import Final

from gateway.admission.entitlement_terms import GIB, BadTerms, ModelShape, terms_from
from gateway.records.entitlement import Entitlement
from gateway.settings.config import Config
from gateway.settings.explain import nearest
from gateway.settings.model import ModelConfig
from gateway.settings.names import Found, unknown
from gateway.settings.source import KeyPath
from gateway.settings.tenants import EntitlementConfig, TenantConfig
from gateway.settings.token_pools import fields_of, shape_of

NO_KV_BYTES: Final = (
    "the model does not say what a token takes",
    "give the model's kv_bytes_per_token (2 x layers x KV heads x head size x bytes)",
)
_MORE: Final = "lower a baseline, or add workers"
_MOST: Final = " (max_num_seqs x most workers)"


def check_entitlements(
    entitlements: Mapping[int, EntitlementConfig],
    models: Mapping[int, ModelConfig],
    known_models: Collection[str] | None,
) -> Found:
    """Models, terms and reservations.

    `known_models` includes the names of invalid models; None if a name could not be read.
    """
    by_name = {model.name: model for model in models.values()}
    aliases = {alias: model.name for model in models.values() for alias in model.aliases}
    reserved: list[tuple[int, EntitlementConfig, Entitlement]] = []
    for index, entitlement in entitlements.items():
        path: KeyPath = ("entitlements", index)
        name = entitlement.model
        if known_models is not None and name not in known_models and name in aliases:
            yield (*path, "model"), f"`{name}` is an alias", f"write its name, `{aliases[name]}`"
        elif known_models is not None:
            known = sorted(known_models)
            yield from unknown([((*path, "model"), name)], known, "no model is named `{}`")
        terms = yield from _terms(path, entitlement, by_name.get(name))
        if terms is not None and terms.reserves:
            reserved.append((index, entitlement, terms))
    for model in by_name.values():
        own = [item for item in reserved if item[2].model == model.name]
        yield from _slots(own, shape_of(model))
        yield from _sums(own, shape_of(model))


def _terms(
    path: KeyPath, entitlement: EntitlementConfig, model: ModelConfig | None
) -> Generator[tuple[KeyPath, str, str], None, Entitlement | None]:
    """The section's terms; None after a problem. Without a model, pools go unchecked."""
    by_pool = entitlement.concurrency
    pools = tuple(by_pool) if isinstance(by_pool, Mapping) else ("",)
    shape = ModelShape(name=entitlement.model, pools=pools, slots=(1,) * len(pools))
    if model is not None:
        shape = shape_of(model)
        if isinstance(by_pool, Mapping):
            named = [((*path, "concurrency", name), name) for name in pools]
            wrong = list(unknown(named, model.pools, f"model `{model.name}` has no pool `{{}}`"))
            yield from wrong
            if wrong:
                return None
        for field in ("kv_cache_gib", "max_kv_cache_gib"):
            if model.kv_bytes_per_token is None and getattr(entitlement, field) is not None:
                yield (*path, field), *NO_KV_BYTES
    try:
        return terms_from(fields_of(entitlement), shape, 0)
    except BadTerms as error:
        where = (*path, error.field, error.part) if error.part else (*path, error.field)
        yield where, error.message, error.fix
        return None


def _slots(
    reserved: Sequence[tuple[int, EntitlementConfig, Entitlement]], shape: ModelShape
) -> Found:
    """Reserved baselines must fit the slots: over all pools, then in each pool as split."""
    total, slots = 0, sum(shape.max_slots)
    by_pool = [0] * len(shape.pools)
    reported: set[int] = set()
    for index, entitlement, terms in reserved:
        path: KeyPath = ("entitlements", index, "concurrency")
        total += sum(terms.baseline)
        if total > slots:
            sums = f"baselines reserved on `{shape.name}` add up to {total} with this one"
            yield path, f"{sums}, but its pools have {slots} slots{_MOST}", _MORE
            return
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
                (*path, name) if named else path,
                f"{sums}, but it has {shape.max_slots[pool]} slots{_MOST}",
                _MORE if named else "give concurrency by pool, lower it, or add workers",
            )


def _sums(
    reserved: Sequence[tuple[int, EntitlementConfig, Entitlement]], shape: ModelShape
) -> Found:
    """Reserved KV must fit the pools' (if unstated, all slots when full), and so must rates."""
    kv, rates = shape.max_kv_bytes / GIB, shape.max_tokens_per_s
    kv_sum = rate_sum = 0.0
    for index, _, terms in reserved:
        before, kv_sum = kv_sum, kv_sum + terms.kv_bytes / GIB
        if 0 < kv < kv_sum and before <= kv:
            sums = f"KV cache reserved on `{shape.name}` adds up to {kv_sum:g} GiB with this one"
            most = f"its pools have {kv:.1f} GiB (per worker x most workers)"
            path: KeyPath = ("entitlements", index, "kv_cache_gib")
            yield path, f"{sums}, but {most}", "lower kv_cache_gib, or add workers"
        before, rate_sum = rate_sum, rate_sum + terms.tokens_per_s
        if 0 < rates < rate_sum and before <= rates:
            sums = f"token rates reserved on `{shape.name}` add up to {rate_sum:g} with this one"
            most = f"its pools have {rates:g} (per worker x most workers)"
            path = ("entitlements", index, "tokens_per_second")
            yield path, f"{sums}, but {most}", "lower tokens_per_second, or add workers"


def check_tenants(config: Config) -> Found:
    """Tenants against their entitlements: what their keys may open."""
    loras = {model.name: model.loras for model in config.models}
    own: dict[str, dict[str, str]] = {}
    for entitlement in config.entitlements:
        own.setdefault(entitlement.tenant, {})[entitlement.name] = entitlement.model
    for index, tenant in enumerate(config.tenants):
        models = own.get(tenant.name, {})
        if not tenant.keys or models:
            yield from _tenant(("tenants", index), tenant, models, loras)
            continue
        yield (
            ("tenants", index, "keys"),
            f"no entitlement names the tenant `{tenant.name}`, so its keys open nothing",
            f"add an entitlement with `tenant: {tenant.name}` for each model",
        )


def _tenant(
    path: KeyPath,
    tenant: TenantConfig,
    models: Mapping[str, str],
    loras: Mapping[str, Sequence[str]],
) -> Found:
    """`models`: those of its entitlements; `loras`: the adapters that keys for a model may name."""
    for where, listed in (
        ((*path, "entitlements"), tenant.entitlements),
        *(((*path, "keys", n, "entitlements"), k.entitlements) for n, k in enumerate(tenant.keys)),
    ):
        named = [((*where, at), name) for at, name in enumerate(listed or ())]
        yield from unknown(named, models, "this tenant has no entitlement `{}`")
    for number, key in enumerate(tenant.keys):
        lists = (key.entitlements, tenant.entitlements, tuple(models))
        used = next(listed for listed in lists if listed is not None)
        bases = {models[name] for name in used if name in models}
        opened = bases.union(*(loras.get(base, ()) for base in bases))
        for at, model in enumerate(key.models or ()):
            if model not in opened:
                yield (
                    (*path, "keys", number, "models", at),
                    f"no entitlement that this key uses is for `{model}`",
                    nearest(model, sorted(opened)) if opened else "give it an entitlement",
                )
