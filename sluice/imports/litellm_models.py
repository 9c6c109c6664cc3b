"""`model_list` of a LiteLLM file -> models. Equal names are one model with several engines."""

import re
from typing import Any, Final
from urllib.parse import urlsplit

from gateway.settings.problems import KeyPath
from sluice.imports.fleet import Engine, Model
from sluice.imports.litellm_prices import read_price
from sluice.imports.report import Report
from sluice.imports.sections import ASSUMED_SEQUENCES, ASSUMED_WINDOW, variable

_OWN: Final = frozenset({"hosted_vllm", "openai", "text-completion-openai", "openai_like"})
"""Providers that, with an `api_base`, mean an engine that speaks OpenAI's API."""
_ENV: Final = "os.environ/"
_NO_KEYS: Final = frozenset({"none", "null", "empty", "dummy", "fake", "fake-key", "no-key", "na"})
_HOSTED: Final = frozenset({"api.openai.com"})
_LOAD: Final = "Sluice spreads requests by the engines' load"


def reference(value: object) -> str | None:
    """`os.environ/NAME` as `${NAME}`; None for anything else."""
    if not isinstance(value, str) or not value.startswith(_ENV):
        return None
    name = value.removeprefix(_ENV)
    return f"${{{name}}}" if re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) else None


def models_of(entries: object, report: Report) -> tuple[dict[str, Model], dict[str, list[str]]]:
    """Models by name, and models by access group."""
    models: dict[str, Model] = {}
    groups: dict[str, list[str]] = {}
    by_url: dict[str, Model] = {}
    for index, entry in enumerate(entries if isinstance(entries, list) else []):
        path: KeyPath = ("model_list", index)
        found = _engine(path, entry, report) if isinstance(entry, dict) else None
        if found is None:
            continue
        name, engine = found
        owner = by_url.setdefault(engine.url, models.get(name) or Model(name))
        if owner.name != name or any(engine.url == known.url for known in owner.engines):
            if not _shared(path, name, engine, owner, models, report):
                continue
            report.part_of((*path, "model_info", "max_input_tokens"))
            report.part_of((*path, "litellm_params", "max_parallel_requests"))
        else:
            models.setdefault(name, owner).engines.append(engine)
            report.taken(path, f"a worker of the model `{name}`")
            _shape(path, engine, report)
        _details(path, entry, engine, owner, report)
        for group in _info(entry).get("access_groups") or ():
            groups.setdefault(str(group), []).append(owner.name)
    return models, groups


def _shared(
    path: KeyPath,
    name: str,
    engine: Engine,
    owner: Model,
    models: dict[str, Model],
    report: Report,
) -> bool:
    """An engine that is listed before: the same again, or under a second name."""
    known = next(e for e in owner.engines if e.url == engine.url)
    if owner.name == name and known.served == engine.served:
        report.taken(path, "the same worker again")
    elif name in models or engine.served not in {known.served, name}:
        report.left_out(
            path,
            f"{engine.url} is a worker of `{owner.name}` already, and its slots would count twice",
        )
        return False
    elif name not in owner.aliases:
        owner.aliases.append(name)
        adapter = known.served != engine.served
        what = "a LoRA adapter, as" if adapter else "the same engines:"
        report.taken(path, f"{what} an alias of `{owner.name}`")
    else:
        report.taken(path, f"an alias of `{owner.name}`, as above")
    return True


def _info(entry: dict[str, Any]) -> dict[str, Any]:
    found = entry.get("model_info")
    return found if isinstance(found, dict) else {}


def _engine(path: KeyPath, entry: dict[str, Any], report: Report) -> tuple[str, Engine] | None:
    """(name for clients, engine); None after the report says why there is none."""
    params = entry.get("litellm_params")
    name = entry.get("model_name")
    if not isinstance(params, dict) or not isinstance(name, str):
        report.left_out(path, "no model_name or no litellm_params")
        return None
    provider, _, served = str(params.get("model", "")).partition("/")
    base = params.get("api_base") or params.get("base_url")
    if provider not in _OWN or not served or not base:
        what = f"provider `{provider}`" if served else f"`{provider}` without a provider"
        missing = "" if base else " without api_base"
        report.left_out(path, f"{what}{missing}: Sluice relays to engines of your own")
        return None
    url = _url(base)
    if url is None:
        report.left_out(path, "api_base is not the http URL of an engine of your own")
        return None
    if "*" in name or "*" in served:
        report.left_out(path, "a wildcard: Sluice needs to know each model; list it by its name")
        return None
    window = _window(_info(entry))
    most = params.get("max_parallel_requests")
    sequences = most if isinstance(most, int) and most > 0 else None
    return name, Engine(url, served, None, window, sequences)


def _url(base: object) -> str | None:
    if (env := reference(base)) is not None:
        return env
    text = str(base).rstrip("/").removesuffix("/v1").rstrip("/")
    parts = urlsplit(text)
    if parts.scheme not in {"http", "https"} or parts.hostname in _HOSTED or not parts.hostname:
        return None
    return text


def _window(info: dict[str, Any]) -> int | None:
    found = info.get("max_input_tokens")
    return found if isinstance(found, int) and found > 0 else None


def _details(
    path: KeyPath, entry: dict[str, Any], engine: Engine, owner: Model, report: Report
) -> None:
    """Account for what else an entry says."""
    params, inside = entry["litellm_params"], (*path, "litellm_params")
    for key in ("model", "api_base", "base_url", "custom_llm_provider"):
        report.part_of((*inside, key))
    report.part_of((*path, "model_name"))
    _key(inside, params, engine, owner, report)
    read_price(path, entry, owner, report)
    for key in ("rpm", "tpm", "weight", "order"):
        if params.get(key) is not None:
            report.left_out((*inside, key), f"{_LOAD}, and limits are the tenants'")
    timeout = params.get("timeout")
    if isinstance(timeout, int | float) and timeout > 0 and owner.first_byte_s is None:
        owner.first_byte_s = float(timeout)
        report.approximated(
            (*inside, "timeout"),
            "timeouts.first_byte_s of the model; LiteLLM means the whole request",
        )
    if _info(entry).get("access_groups"):
        report.taken((*path, "model_info", "access_groups"), "keys of the group get the model")


def _key(
    path: KeyPath, params: dict[str, Any], engine: Engine, owner: Model, report: Report
) -> None:
    given = params.get("api_key")
    where = (*path, "api_key")
    if given is None or str(given).lower() in _NO_KEYS:
        report.part_of(where)
    elif (env := reference(given)) is not None:
        engine.api_key = env
        report.taken(where, f"api_key: {env}")
    else:
        engine.api_key = f"${{{variable(owner.name)}_API_KEY}}"
        report.approximated(
            where, f"keys are not copied into files: set {engine.api_key[2:-1]} to this one"
        )


def _shape(path: KeyPath, engine: Engine, report: Report) -> None:
    """The figures of a pool, which LiteLLM does not need and Sluice does."""
    where = (*path, "model_info", "max_input_tokens")
    if engine.window is None:
        report.approximated(
            where,
            f"not given: max_model_len {ASSUMED_WINDOW} is assumed. Set the engine's own",
        )
    else:
        report.approximated(where, "max_model_len; set the engine's own where the two differ")
    where = (*path, "litellm_params", "max_parallel_requests")
    if engine.sequences is None:
        report.approximated(
            where, f"not given: max_num_seqs {ASSUMED_SEQUENCES} is assumed. Set the engine's own"
        )
    else:
        report.approximated(where, "max_num_seqs; set the engine's own where the two differ")
