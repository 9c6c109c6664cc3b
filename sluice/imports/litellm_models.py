"""`model_list` of a LiteLLM file -> models. Equal names are one model with several engines."""

import re
from decimal import Decimal, InvalidOperation
from typing import Any, Final
from urllib.parse import urlsplit

from gateway.records.endpoint import matches
from gateway.records.usage import DECIMALS
from gateway.settings.source import KeyPath
from sluice.imports.fleet import Engine, Model
from sluice.imports.litellm_rows import whole
from sluice.imports.report import Report
from sluice.imports.sections import ASSUMED_SEQUENCES, ASSUMED_WINDOW, variable

_OWN: Final = frozenset({"hosted_vllm", "openai", "text-completion-openai", "openai_like"})
"""Providers that, with an `api_base`, mean an engine that speaks OpenAI's API."""
_ENV: Final = "os.environ/"
_NO_KEYS: Final = frozenset(
    {"", "none", "null", "empty", "dummy", "fake", "fake-key", "no-key", "na", "not-needed"}
)
_CHAT: Final = frozenset({"chat", "completion", "responses"})
_EMBEDS: Final = r"embed|\b(?:bge|e5|gte)-"
"""In names of models whose row does not say so."""
_HOSTED: Final = frozenset({"api.openai.com"})
_FIRST: Final = "the worker has one, that of its first row"
_LOAD: Final = "Sluice spreads requests by the engines' load"
_NAMES: Final = {
    "input_cost_per_token": "input",
    "cache_read_input_token_cost": "cached_input",
    "output_cost_per_token": "output",
}
"""LiteLLM's name -> of `price`, in the order of the file."""
_NEEDED: Final = ("input", "output")
_MAX_PRICE: Final = 1_000_000
"""Highest price that the file may have."""


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
    rows = sorted(enumerate(entries if isinstance(entries, list) else []), key=_is_pattern)
    for index, entry in rows:
        path: KeyPath = ("model_list", index)
        found = _engine(path, entry, report) if isinstance(entry, dict) else None
        if found is None:
            continue
        name, engine = found
        own = engine.served if "*" in name else name
        owner = by_url.get(engine.url) or models.get(own) or Model(own)
        known = next((each for each in owner.engines if each.url == engine.url), None)
        if known is not None:
            if not _shared(path, name, engine, known, owner, models, report):
                continue
            _same_shape(path, engine, known, report)
        elif (own not in models and _further_name(own, models)) or (
            name != own and _further_name(name, _others(owner, models))
        ):
            report.left_out(path, "a row before made this a further name of another model")
            continue
        else:
            by_url[engine.url] = models.setdefault(own, owner)
            owner.engines.append(engine)
            also = ""
            if name != own:
                owner.aliases += [] if name in owner.aliases else [name]
                also = f", which has the alias `{name}`"
            report.taken(path, f"a worker of the model `{own}`{also}")
            _shape(path, engine, report)
        _details(path, entry, known, engine, owner, report)
        for group in _info(entry).get("access_groups") or ():
            groups.setdefault(str(group), []).append(name)
    _caught(rows, models, report)
    return models, groups


def covered(models: dict[str, Model], name: str) -> Model | None:
    """A model by the longest pattern among the aliases that has this name."""
    aliases = {alias: model for model in models.values() for alias in model.aliases}
    found = [alias for alias in aliases if matches(alias, name)]
    return aliases[max(found, key=len)] if found else None


def _shared(
    path: KeyPath,
    name: str,
    engine: Engine,
    known: Engine,
    owner: Model,
    models: dict[str, Model],
    report: Report,
) -> bool:
    """An engine that is listed before: the same again, or under a second name."""
    if owner.name == name and known.served == engine.served:
        report.taken(path, "the same worker again")
    elif (
        name in models
        or _further_name(name, _others(owner, models))
        or engine.served not in {known.served, name}
    ):
        report.left_out(
            path,
            f"{engine.url} is a worker of `{owner.name}` already, and its slots would count twice",
        )
        return False
    elif known.served != engine.served:
        if name not in owner.loras:
            owner.loras.append(name)
        report.approximated(
            path,
            f"taken for a LoRA adapter of `{owner.name}`; if the engine has two names "
            "(--served-model-name), move it from `loras` to `aliases`",
        )
    else:
        if name not in owner.aliases:
            owner.aliases.append(name)
        report.taken(path, f"the same engines: an alias of `{owner.name}`")
    return True


def _is_pattern(row: tuple[int, object]) -> bool:
    """Whether a row is for many names: it is read after those that name a model."""
    return isinstance(row[1], dict) and "*" in str(row[1].get("model_name"))


def _caught(rows: list[tuple[int, Any]], models: dict[str, Model], report: Report) -> None:
    """Tell of rows that were left out and whose names a pattern of another row has."""
    for index, entry in rows:
        name = entry.get("model_name") if isinstance(entry, dict) else None
        if not isinstance(name, str) or name in models or _further_name(name, models):
            continue
        if (model := covered(models, name)) is not None:
            path: KeyPath = ("model_list", index, "model_name")
            report.left_out(path, f"a pattern has this name: requests go to `{model.name}`")


def _others(owner: Model, models: dict[str, Model]) -> dict[str, Model]:
    return {name: model for name, model in models.items() if model is not owner}


def _further_name(name: str, models: dict[str, Model]) -> bool:
    return any(name in (*model.aliases, *model.loras) for model in models.values())


def _same_shape(path: KeyPath, engine: Engine, known: Engine, report: Report) -> None:
    """Figures of a row whose engine has those of a row before."""
    for where, given, kept in (
        (("model_info", "max_input_tokens"), engine.window, known.window),
        (("litellm_params", "max_parallel_requests"), engine.sequences, known.sequences),
    ):
        if given in (None, kept):
            report.part_of((*path, *where))
        else:
            report.left_out((*path, *where), _FIRST)


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
    provider, served = _served(params)
    base = params.get("api_base") or params.get("base_url")
    if provider not in _OWN or not served or not base:
        what = f"provider `{provider}`" if served else f"`{provider}` without a provider"
        missing = "" if base else " without api_base"
        report.left_out(path, f"{what}{missing}: Sluice relays to engines of your own")
        return None
    url = _url(base)
    if url is None:
        report.left_out(path, "api_base is no http URL of an engine of your own without a password")
        return None
    if "*" in served:
        report.left_out(path, "any model of an engine: list each one by its name")
        return None
    window = _positive(_info(entry).get("max_input_tokens"))
    sequences = _positive(params.get("max_parallel_requests"))
    return name, Engine(url, served, None, window, sequences)


def _served(params: dict[str, Any]) -> tuple[str, str]:
    """(provider, name of the model at the engine), which may be given apart."""
    model, given = str(params.get("model", "")), params.get("custom_llm_provider")
    if not given:
        provider, _, served = model.partition("/")
        return provider, served
    return str(given), model.removeprefix(f"{given}/")


def _url(base: object) -> str | None:
    if (env := reference(base)) is not None:
        return env
    text = str(base).rstrip("/").removesuffix("/v1").rstrip("/")
    try:
        parts = urlsplit(text)
    except ValueError:
        return None
    own = parts.hostname and parts.hostname not in _HOSTED
    plain = not (parts.query or parts.fragment or "@" in parts.netloc)
    return text if own and plain and parts.scheme in {"http", "https"} else None


def _positive(value: object) -> int | None:
    found = whole(value)
    return found if found is not None and found > 0 else None


def _details(
    path: KeyPath,
    entry: dict[str, Any],
    known: Engine | None,
    engine: Engine,
    owner: Model,
    report: Report,
) -> None:
    """Account for what else an entry says; `known`: its engine, where a row before has it."""
    params, inside = entry["litellm_params"], (*path, "litellm_params")
    for key in ("model", "api_base", "base_url", "custom_llm_provider"):
        report.part_of((*inside, key))
    report.part_of((*path, "model_name"))
    _key(inside, params, known, engine, owner, report)
    read_price(path, entry, owner, report)
    for key in ("rpm", "tpm", "weight", "order"):
        if params.get(key) is not None:
            report.left_out((*inside, key), f"{_LOAD}, and limits are the tenants'")
    owner.kind = _kind(_info(entry).get("mode"), owner)
    report.part_of((*path, "model_info", "mode"))
    timeout = params.get("timeout")
    if isinstance(timeout, int | float) and timeout > 0 and owner.first_byte_s is None:
        owner.first_byte_s = float(timeout)
        report.approximated(
            (*inside, "timeout"),
            "timeouts.first_byte_s of the model; LiteLLM means the whole request",
        )
    if _info(entry).get("access_groups"):
        report.taken((*path, "model_info", "access_groups"), "keys of the group get the model")


def _kind(mode: object, model: Model) -> str:
    """What a model is asked for by its row, or else by its names; "" for chat."""
    if isinstance(mode, str) and mode:
        return "" if mode in _CHAT else mode
    names = " ".join((model.name, *model.served)).lower()
    return "embedding" if re.search(_EMBEDS, names) else model.kind


def _key(
    path: KeyPath,
    params: dict[str, Any],
    known: Engine | None,
    engine: Engine,
    owner: Model,
    report: Report,
) -> None:
    given = params.get("api_key")
    where = (*path, "api_key")
    if given is None or str(given).strip().lower() in _NO_KEYS:
        report.part_of(where)
        return
    engine.api_key = reference(given) or f"${{{variable(owner.name)}_API_KEY}}"
    if known is not None and known.api_key != engine.api_key:
        report.left_out(where, _FIRST)
    elif reference(given) is not None:
        report.taken(where, f"api_key: {engine.api_key}")
    else:
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


def read_price(path: KeyPath, entry: dict[str, Any], owner: Model, report: Report) -> None:
    """The price of a row's model, which rows give in `litellm_params` or in `model_info`."""
    found: dict[str, float] = {}
    told: list[tuple[KeyPath, str]] = []
    for name, ours in _NAMES.items():
        for part in ("litellm_params", "model_info"):
            section = entry.get(part)
            given = section.get(name) if isinstance(section, dict) else None
            if given is None:
                continue
            where = (*path, part, name)
            price = _per_million(given)
            if price is None:
                report.left_out(where, "not the cost of a token")
            elif ours not in found:
                found[ours] = price
                told.append((where, f"price.{ours}: {price:g} per million tokens"))
            else:
                report.left_out(where, "litellm_params has it as well, and counts")
    if not found:
        return
    if owner.price is None:
        _complete(found, told, report)
        owner.price = found
    elif any(owner.price.get(name) != price for name, price in found.items()):
        for where, _ in told:
            report.left_out(where, f"`{owner.name}` has one price, that of its first row")
        return
    for where, note in told:
        report.taken(where, note)


def _complete(found: dict[str, float], told: list[tuple[KeyPath, str]], report: Report) -> None:
    """Fill in what a price needs, and leave out what the file would refuse."""
    for name in _NEEDED:
        if name not in found:
            found[name] = 0.0
            report.approximated(told[0][0], f"no cost of {name} tokens is given: they are free")
    if found.get("cached_input", 0.0) > found["input"]:
        del found["cached_input"]
        where = next(where for where, _ in told if where[-1] == "cache_read_input_token_cost")
        told[:] = [line for line in told if line[0] != where]
        report.left_out(where, "more than other input costs: it costs the same")


def _per_million(given: object) -> float | None:
    """The price of a million tokens; None if `given` is no cost of one."""
    if isinstance(given, bool) or not isinstance(given, int | float | str):
        return None
    try:
        exact = Decimal(str(given)) * 1_000_000
    except InvalidOperation:
        return None
    return float(round(exact, DECIMALS)) if 0 <= exact <= _MAX_PRICE else None
