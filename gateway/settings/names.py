"""Names: which are unique among which, and which name something that exists.

A place is a pattern of keys, `models.*.name`: `*` is any item of a list or mapping, `@` the key of
any item.
"""

import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, Final

from pydantic import SecretStr

from gateway.settings.config import Config
from gateway.settings.source import KEY, Document, KeyPath, nearest

Problems = Iterator[tuple[KeyPath, str, str]]
"""Problems: place, message and fix."""

_NEW_KEY: Final = "make another with `sluice hash-key --new`"
_OWN_KEY_NAME: Final = "give every key a name of its own"
_OWN_MODEL_NAME: Final = "give every model, alias and LoRA adapter a name of its own"
_LORA_FIX: Final = "remove it here: an adapter is a model's name by itself, and is never rewritten"
_ONE_POOL: Final = (
    "give every pool engines of its own; data-parallel ranks behind one URL are one worker with "
    "`ranks`"
)
_SAME_KEY: Final = "the same key as on line {line}"
_TAKEN: Final = "`{name}` is taken on line {line}"
_UNIQUE: Final[tuple[tuple[str, str, dict[str, str]], ...]] = (
    # Within each of what, the message, and where -> the fix there; "" where none is reported.
    (
        "",
        _TAKEN,
        {
            "models.*.name": _OWN_MODEL_NAME,
            "models.*.loras.*": _OWN_MODEL_NAME,
            "models.*.aliases.*": _OWN_MODEL_NAME,
            "aliases.*.name": "give every model and alias a name of its own",
        },
    ),
    ("", _TAKEN, {"entitlements.*.name": "give every entitlement a name of its own"}),
    ("", _TAKEN, {"tenants.*.name": "give every tenant a name of its own"}),
    ("tenants.*", _TAKEN, {"keys.*.name": _OWN_KEY_NAME}),
    ("", _TAKEN, {"server.admin_keys.*.name": _OWN_KEY_NAME}),
    ("", _TAKEN, {"auth.jwt.*.issuer": "list an issuer once"}),
    (
        "",
        _SAME_KEY,
        {
            "entitlements.*.api_keys.*": f"a key belongs to one entitlement: {_NEW_KEY}",
            "tenants.*.keys.*.sha256": "list a key once: under `tenants` it opens several models",
        },
    ),
    (
        "",
        _SAME_KEY,
        {"server.admin_key": "", "server.viewer_key": "", "server.admin_keys.*.sha256": _NEW_KEY},
    ),
)
_REFERENCES: Final = (
    # Where a name stands, what it names, and the message.
    ("models.*.fallbacks.*", ("models.*.name",), "no model is named `{}`"),
    ("aliases.*.split.@", ("models.*.name",), "no model is named `{}`"),
    (
        "auth.jwt.*.tenants.*",
        ("tenants.*.name", "entitlements.*.tenant"),
        "no tenant is named `{}`",
    ),
)
_PATTERN_FIX: Final = {
    "models": "give a name, and put the pattern in a model's `aliases`",
    "aliases": "write each name, or put the pattern in a model's `aliases`",
}
_THIS_HOST: Final = frozenset({"localhost", "localhost.", "127.0.0.1", "::1", "0.0.0.0", "::"})  # noqa: S104
"""Names of the loopback interface, and addresses that connect to it."""


def at(root: object, pattern: str) -> list[tuple[KeyPath, Any]]:
    """Every value that a pattern names, with its path; absent ones are left out."""
    values: list[tuple[KeyPath, Any]] = [((), root)]
    for step in pattern.split(".") if pattern else ():
        if step == "@":
            values = [((*path, key), key) for path, value in values for key, _ in _items(value)]
        elif step == "*":
            values = [((*path, key), item) for path, value in values for key, item in _items(value)]
        else:
            values = [
                ((*path, step), v.get(step) if isinstance(v, Mapping) else getattr(v, step, None))
                for path, v in values
            ]
    return [(path, value) for path, value in values if value is not None]


def _items(value: Any) -> Iterable[tuple[str | int, Any]]:
    if isinstance(value, Mapping):
        return value.items()
    return enumerate(value) if isinstance(value, tuple) else ()


def check_names(document: Document, root: Mapping[str, object]) -> Problems:
    """Names that are taken. `root`: those sections of the file that are valid."""
    for within, message, fixes in _UNIQUE:
        for above, scope in at(root, within):
            places = [
                ((*above, *path), name, fix)
                for pattern, fix in fixes.items()
                for path, name in at(scope, pattern)
            ]
            places_of: dict[str, KeyPath] = {}
            for path, value, fix in places:
                name = str(value)
                if isinstance(value, SecretStr):
                    digest = hashlib.sha256(value.get_secret_value().encode()).hexdigest()
                    name = f"sha256:{digest}"
                if path[0] in _PATTERN_FIX and "*" in name and path[2] != "aliases":
                    yield path, f"`{name}` is a pattern of names", _PATTERN_FIX[str(path[0])]
                    continue
                first = places_of.setdefault(name, path)
                if first == path or not fix:
                    continue
                line = document.place(first).line
                if path[0] == "models" and first[2] == "loras":
                    yield path, f"`{name}` is a LoRA adapter, named on line {line}", _LORA_FIX
                else:
                    yield path, message.format(name=name, line=line), fix


def check_references(root: Mapping[str, object]) -> Problems:
    """Names of nothing. Where a section is invalid, it would seem to be one that nobody has."""
    for index, model in at(root, "models.*"):
        for place, name in at(model, "fallbacks.*"):
            if name == model.name:
                fix = "name another model, or remove it"
                yield (*index, *place), "the model itself", fix
    for pattern, names, message in _REFERENCES:
        existing = dict.fromkeys(str(name) for place in names for _, name in at(root, place))
        yield from unknown(at(root, pattern), existing, message)


def unknown(named: Iterable[tuple[KeyPath, str]], names: Collection[str], message: str) -> Problems:
    """A problem for each name that is none of those known."""
    for path, name in named:
        if name not in names:
            place = (*path, KEY) if path[-1] == name else path
            yield place, message.format(name), nearest(name, names)


def check_engines(document: Document, root: Mapping[str, object]) -> Problems:
    """Each engine belongs to one pool of one model; otherwise its slots would count twice."""
    first_places: dict[str, KeyPath] = {}
    names = dict(at(root, "models.*.name"))
    workers = (
        ((*index, *place, "workers", number), worker)
        for index, model in at(root, "models.*")
        for place, engines in model.written
        for number, worker in enumerate(engines.workers)
    )
    for path, worker in workers:
        address = worker.address()
        engine = address.id
        if address.host in _THIS_HOST:  # whatever it is called
            engine = f"this host:{address.port}{address.path_prefix}"
        first = first_places.setdefault(worker.discover or engine, path)
        line = document.place(first).line
        if first == path:
            continue
        if worker.discover is not None:
            fix = "let each source belong to one pool"
            yield path, f"{worker.discover} is a source on line {line} already", fix
        elif first[:-1] == path[:-1]:
            yield path, f"worker {worker.id} is listed twice, first on line {line}", "remove one"
        else:
            there = f"pool `{first[3]}` of `{names[*first[:2], 'name']}` too, on line {line}"
            yield path, f"worker {worker.id} is in {there}: its slots would count twice", _ONE_POOL


def check_tenants(config: Config) -> Problems:
    """Tenants against their entitlements: what their keys may open."""
    loras = {model.name: model.loras for model in config.models}
    own: dict[str, dict[str, str]] = {}
    for entitlement in config.entitlements:
        own.setdefault(entitlement.tenant, {})[entitlement.name] = entitlement.model
    for index, tenant in enumerate(config.tenants):
        path: KeyPath = ("tenants", index)
        models = own.get(tenant.name, {})
        if tenant.keys and not models:
            yield (
                (*path, "keys"),
                f"no entitlement names the tenant `{tenant.name}`, so its keys open nothing",
                f"add an entitlement with `tenant: {tenant.name}` for each model",
            )
            continue
        keys = [((*path, "keys", number), key) for number, key in enumerate(tenant.keys)]
        lists = [(path, tenant.entitlements), *((where, key.entitlements) for where, key in keys)]
        for where, listed in lists:
            named = [((*where, "entitlements", at), name) for at, name in enumerate(listed or ())]
            yield from unknown(named, models, "this tenant has no entitlement `{}`")
        for where, key in keys:
            choices = (key.entitlements, tenant.entitlements, tuple(models))
            used = next(listed for listed in choices if listed is not None)
            bases = {models[name] for name in used if name in models}
            opened = bases.union(*(loras.get(base, ()) for base in bases))
            for at, model in enumerate(key.models or ()):
                if model not in opened:
                    yield (
                        (*where, "models", at),
                        f"no entitlement that this key uses is for `{model}`",
                        nearest(model, sorted(opened)) if opened else "give it an entitlement",
                    )
