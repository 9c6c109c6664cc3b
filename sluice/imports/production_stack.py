"""values.yaml of vLLM's production-stack, with static backends -> sluice.yaml."""

from typing import Any, Final

from gateway.settings.problems import KeyPath
from gateway.settings.source import Document
from sluice.imports.fleet import Engine, Model
from sluice.imports.report import Report
from sluice.imports.sections import Row

_POD: Final = "Sluice starts no engines; the chart still does"
_NOT_STATIC: Final = (
    "only static backends say where the engines are: set serviceDiscovery: static with "
    "staticBackends and staticModels, or write the workers' URLs into sluice.yaml"
)
_ROUTER: Final = {
    "routingLogic": "Sluice schedules by load and prefix cache: scheduling.policy",
    "sessionKey": "Sluice follows the prefix cache without a session header",
    "engineScrapeInterval": "Sluice reads the engines' metrics by itself",
    "requestStatsWindow": "Sluice reads the engines' metrics by itself",
    "replicaCount": "see server.workers and deploy",
    "extraArgs": "the router's own arguments",
}


def convert(document: Document, report: Report) -> dict[str, Any]:
    """The sections of sluice.yaml; empty if no backend is usable."""
    data = document.data if isinstance(document.data, dict) else {}
    router, serving = _mapping(data, "routerSpec"), _mapping(data, "servingEngineSpec")
    models = _models(router, report)
    shapes = _shapes(serving, models, report)
    for name in ("serviceDiscovery", "staticBackends", "staticModels"):
        if router.get("serviceDiscovery") == "static":
            report.part_of(("routerSpec", name))
    for name, reason in _ROUTER.items():
        if router.get(name) is not None:
            report.left_out(("routerSpec", name), reason)
    key = serving.get("vllmApiKey") or router.get("vllmApiKey")
    if key is not None and models:
        where = "servingEngineSpec" if serving.get("vllmApiKey") else "routerSpec"
        report.approximated(
            (where, "vllmApiKey"), "api_key of every worker: set VLLM_API_KEY to this secret"
        )
        for engine in (engine for model in models.values() for engine in model.engines):
            engine.api_key = "${VLLM_API_KEY}"
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
    }


def _mapping(data: dict[str, Any], name: str) -> dict[str, Any]:
    found = data.get(name)
    return found if isinstance(found, dict) else {}


def _models(router: dict[str, Any], report: Report) -> dict[str, Model]:
    path: KeyPath = ("routerSpec", "staticBackends")
    if router.get("serviceDiscovery") != "static":
        report.left_out(("routerSpec", "serviceDiscovery"), _NOT_STATIC)
        return {}
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
        names = {spec.get("modelURL"), spec.get("name")} if isinstance(spec, dict) else set()
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


def _shape(spec: dict[str, Any]) -> tuple[int | None, int | None]:
    config = _mapping(spec, "vllmConfig")
    window, sequences = config.get("maxModelLen"), config.get("maxNumSeqs")
    extra = [str(part) for part in config.get("extraArgs") or ()]
    window = window or _argument(extra, "--max-model-len")
    sequences = sequences or _argument(extra, "--max-num-seqs")
    return (
        window if isinstance(window, int) else None,
        sequences if isinstance(sequences, int) else None,
    )


def _argument(arguments: list[str], name: str) -> int | None:
    """The value of `--name N` or `--name=N`."""
    for at, text in enumerate(arguments):
        found = text.partition("=")[2] if text.startswith(f"{name}=") else ""
        if text == name and at + 1 < len(arguments):
            found = arguments[at + 1]
        if found.isdigit():
            return int(found)
    return None
