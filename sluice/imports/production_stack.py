"""values.yaml of vLLM's production-stack -> sluice.yaml."""

import hashlib
import re
from typing import Any, Final
from urllib.parse import quote

from gateway.settings.source import Document, KeyPath
from sluice.imports.fleet import Engine, Model, closed
from sluice.imports.litellm_rows import whole
from sluice.imports.report import Report
from sluice.imports.sections import Row

_POD: Final = "Sluice starts no engines; the chart still does"
_UNITS: Final = {"": 1, "k": 10**3, "K": 2**10, "m": 10**6, "M": 2**20, "g": 10**9, "G": 2**30}
"""Of the engines' own numbers, as in `--max-model-len 32k`."""
_ROUTER: Final = {
    "routingLogic": "Sluice schedules by load and prefix cache: scheduling.policy",
    "sessionKey": "Sluice follows the prefix cache without a session header",
    "engineScrapeInterval": "Sluice reads the engines' metrics by itself",
    "requestStatsWindow": "Sluice reads the engines' metrics by itself",
    "replicaCount": "see server.workers and deploy",
}


def convert(document: Document, report: Report) -> dict[str, Any]:
    """The sections of sluice.yaml; empty if no backend is usable."""
    data = document.data if isinstance(document.data, dict) else {}
    router, serving = _mapping(data, "routerSpec"), _mapping(data, "servingEngineSpec")
    static = router.get("serviceDiscovery") == "static"
    if static:
        models = _models(router, report)
        shapes = _shapes(serving, models, report)
        for name in ("serviceDiscovery", "staticBackends", "staticModels"):
            report.part_of(("routerSpec", name))
    else:
        models = _discovered(serving, report)
        shapes = set(models)
        report.part_of(("routerSpec", "serviceDiscovery"))
    _router_arguments(router, models, report)
    for name, reason in _ROUTER.items():
        if router.get(name) is not None:
            report.left_out(("routerSpec", name), reason)
    tenancy = _key_of_clients(serving, router, models, report)
    for name, path in ((n, ("routerSpec", "staticModels")) for n in models if n not in shapes):
        report.approximated(
            path, f"`{name}`: window and sequences are not given, so they are assumed"
        )
    report.rest(data)
    if not models:
        return {}
    return {
        "version": 1,
        "server": Row(host="0.0.0.0", port=8001),  # noqa: S104 - as the chart's router listens
        "models": [model.section() for model in models.values()],
        **tenancy,
    }


def _key_of_clients(
    serving: dict[str, Any], router: dict[str, Any], models: dict[str, Model], report: Report
) -> dict[str, Any]:
    """Tenancy that opens the models to the engines' key alone, which clients sent until now."""
    where = "servingEngineSpec" if serving.get("vllmApiKey") else "routerSpec"
    key = serving.get("vllmApiKey") or router.get("vllmApiKey")
    if key is None or not models:
        return {}
    for engine in (engine for model in models.values() for engine in model.engines):
        engine.api_key = "${VLLM_API_KEY}"
    note = "api_key of every worker: set VLLM_API_KEY to this secret"
    sections: dict[str, Any] = {"entitlements": closed(models.values())}
    if isinstance(key, str):
        digest = hashlib.sha256(key.encode()).hexdigest()
        own = Row(name="vllm-api-key", sha256=f"sha256:{digest}")
        sections["tenants"] = [{"name": "imported", "keys": [own]}]
        note += "; clients go on sending it"
    else:
        report.left_out(
            (where, "vllmApiKey"),
            "the secret's value is not known, so no client has a key: add a key of the tenant "
            "`imported` with the hash that `sluice hash-key` gives for it",
        )
    report.approximated((where, "vllmApiKey"), note)
    return sections


def _mapping(data: dict[str, Any], name: str) -> dict[str, Any]:
    found = data.get(name)
    return found if isinstance(found, dict) else {}


def _models(router: dict[str, Any], report: Report) -> dict[str, Model]:
    path: KeyPath = ("routerSpec", "staticBackends")
    urls = _parts(router.get("staticBackends"))
    names = _parts(router.get("staticModels"))
    if len(urls) != len(names):
        report.left_out(path, f"{len(urls)} backends, but {len(names)} models: give one for each")
        return {}
    models: dict[str, Model] = {}
    for url, name in zip(urls, names, strict=True):
        base = url.rstrip("/").removesuffix("/v1").rstrip("/")
        models.setdefault(name, Model(name)).engines.append(Engine(base, name))
        report.taken(path, f"{base} is a worker of the model `{name}`")
    return models


def _parts(text: object) -> list[str]:
    return [part.strip() for part in str(text or "").split(",") if part.strip()]


def _shapes(serving: dict[str, Any], models: dict[str, Model], report: Report) -> set[str]:
    """Windows and sequences from the engines that the chart starts; the models that have both."""
    known = set()
    specs = serving.get("modelSpec")
    for index, spec in enumerate(specs if isinstance(specs, list) else []):
        path: KeyPath = ("servingEngineSpec", "modelSpec", index)
        names = [*_names(spec), spec.get("name")] if isinstance(spec, dict) else []
        model = next((models[name] for name in names if name in models), None)
        if model is None:
            report.left_out(path, "no static backend serves it")
            continue
        window, sequences = _shape(spec)
        for engine in model.engines:
            engine.window, engine.sequences = window, sequences
        if window is not None and sequences is not None:
            known.add(model.name)
        report.approximated(
            path,
            f"max_model_len {window or 'assumed'} and max_num_seqs {sequences or 'assumed'} of "
            f"`{model.name}`; {_POD}",
        )
        report.part_of(path)
    return known


def _discovered(serving: dict[str, Any], report: Report) -> dict[str, Model]:
    """The models whose pods the chart starts, each with a source that finds them."""
    models: dict[str, Model] = {}
    labels = _mapping(serving, "labels")
    port = whole(serving.get("containerPort")) or 8000
    specs = serving.get("modelSpec")
    for index, spec in enumerate(specs if isinstance(specs, list) else []):
        path: KeyPath = ("servingEngineSpec", "modelSpec", index)
        given = spec if isinstance(spec, dict) else {}
        names = _names(given)
        if not names or not given.get("name") or given.get("raySpec"):
            report.left_out(path, "no name and modelURL, or a Ray cluster: write its workers")
            continue
        chosen = {"model": given["name"], **labels}
        selector = quote(",".join(f"{key}={value}" for key, value in chosen.items()), safe=",")
        engine = Engine(f"k8s://pods?selector={selector}&port={port}", names[0])
        engine.window, engine.sequences = _shape(given)
        model = models.setdefault(names[0], Model(names[0]))
        model.engines.append(engine)
        model.aliases += [name for name in names[1:] if name not in model.aliases]
        report.approximated(
            path,
            f"`{model.name}`: its pods, by label, in the gateway's own namespace (else add "
            f"&namespace=NAME); max_model_len {engine.window or 'assumed'}, max_num_seqs "
            f"{engine.sequences or 'assumed'}; {_POD}",
        )
    report.part_of(("servingEngineSpec", "labels"))
    report.part_of(("servingEngineSpec", "containerPort"))
    return models


def _names(spec: dict[str, Any]) -> list[str]:
    """Names that an engine answers to, its own first."""
    served = _arguments(_mapping(spec, "vllmConfig").get("extraArgs")).get("served-model-name")
    url = spec.get("modelURL")
    return served or ([str(url)] if url else [])


def _router_arguments(router: dict[str, Any], models: dict[str, Model], report: Report) -> None:
    """Aliases of the router's own arguments; the others are named and left out."""
    path: KeyPath = ("routerSpec", "extraArgs")
    given = _arguments(router.get("extraArgs"))
    for pair in _parts(",".join(given.pop("static-aliases", ()))):
        alias, _, name = pair.partition(":")
        taken = {known for model in models.values() for known in (model.name, *model.aliases)}
        if name not in models or alias in taken:
            report.left_out((*path, alias), "its model was not imported, or a model has this name")
            continue
        models[name].aliases.append(alias)
        report.taken((*path, alias), f"an alias of `{name}`")
    if given:
        report.left_out(path, f"the router's own arguments: {', '.join(given)}")
    report.part_of(path)


def _shape(spec: dict[str, Any]) -> tuple[int | None, int | None]:
    """(window, sequences); as for the engine, arguments go before settings."""
    config = _mapping(spec, "vllmConfig")
    extra = _arguments(config.get("extraArgs"))
    window = _number(extra.get("max-model-len")) or whole(config.get("maxModelLen"))
    return window, _number(extra.get("max-num-seqs")) or whole(config.get("maxNumSeqs"))


def _number(values: list[str] | None) -> int | None:
    """A number as vLLM reads it; None for `auto`."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmMgG]?)", values[0]) if values else None
    return None if found is None else int(float(found[1]) * _UNITS[found[2]])


def _arguments(given: object) -> dict[str, list[str]]:
    """Values by name, of `--name`, `--name=VALUE`, or `--name VALUE VALUE`."""
    found: dict[str, list[str]] = {}
    name = ""
    for text in map(str, given if isinstance(given, list) else ()):
        if text.startswith("--"):
            name, _, value = text.removeprefix("--").partition("=")
            name = name.replace("_", "-")
            found[name] = [value] if value else []
        else:
            found.setdefault(name, []).append(text)
    return found
