"""Reads a file, a text, or what an administrator sends; raises ConfigError with all problems.

pydantic's findings become problems in plain words, with place and fix. These quote a value only if
it cannot be a secret: numbers, and misspelt choices written in the file itself. They never quote
texts and values from the environment.
"""

import os
import re
import time
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from gateway.records.tenancy import RowKind
from gateway.settings.checks import check_relations, unfit_limits
from gateway.settings.compare import only_secrets, stand_in_for_references
from gateway.settings.config import Config, digest_of
from gateway.settings.model import EnginesConfig
from gateway.settings.source import (
    KEY,
    MAX_BYTES,
    ConfigError,
    KeyPath,
    Problem,
    dotted,
    nearest,
    read,
    shown,
)
from gateway.settings.tenants import (
    EntitlementConfig,
    KeyLimitsConfig,
    TenantConfig,
    TenantKeyConfig,
)
from gateway.settings.types import EnvValue, Section

_LITELLM: Final = (
    "this is a part of a LiteLLM file: `sluice import litellm FILE -o sluice.yaml` converts one"
)
_STACK: Final = (
    "this is a part of a values file: `sluice import production-stack FILE -o sluice.yaml` "
    "converts one"
)
_BUDGET: Final = (
    "write `budgets: [{money: 100, window: month}]`, or `tokens`, at a tenant, a key or an "
    "entitlement"
)
_ANY: Final = {
    **dict.fromkeys(("max_budget", "soft_budget", "budget", "budget_duration"), _BUDGET),
    **dict.fromkeys(
        ("tpm_limit", "tpm"), "give an entitlement's `tokens_per_second`, in tokens a second"
    ),
    **dict.fromkeys(
        ("rpm_limit", "rpm", "requests_per_minute"),
        "write `requests_per_minute` at a tenant's key",
    ),
    "max_parallel_requests": "give an entitlement's `max_concurrency`",
    "blocked": "write `suspended: true` at a tenant's key",
    "expires": "write `expires_at`",
}
"""Under tenants, keys and entitlements alike."""
_KEY: Final = (
    "a key that opens several models stands under `tenants`: {name, keys: [{name, sha256, "
    "models}]}; write one entitlement for each model"
)
_PHASED: Final = "a pool in phases has its engines under `prefill` and `decode`: write it there"
# By class of section, what users of other gateways look for -> where the file says it.
_WISHES: Final[dict[str, dict[str, str]]] = {
    "EntitlementConfig": {**_ANY, "models": _KEY, "keys": _KEY},
    "TenantConfig": {
        **_ANY,
        "models": "list `models` at a key, or write one entitlement for each model",
        "api_keys": "list them as `keys: [{name, sha256}]`",
    },
    "TenantKeyConfig": {
        **_ANY,
        "key": "write `sha256`, from `sluice hash-key`: keys are never in the file",
        "token": "write `sha256`",
        "max_parallel_requests": "write `max_concurrency`",
        **dict.fromkeys(("rpm", "rpm_limit"), "write `requests_per_minute`"),
    },
    "Config": {
        **dict.fromkeys(("model_list", "litellm_settings"), _LITELLM),
        **dict.fromkeys(("router_settings", "general_settings"), _LITELLM),
        **dict.fromkeys(("servingEngineSpec", "routerSpec"), _STACK),
        "fallbacks": "write `fallbacks: [other]` at the model",
        "default_fallbacks": "write `fallbacks: [other]` at each model",
        "model_group_alias": "write `aliases` at the model",
        "keys": "list keys under `tenants`: {name, keys: [{name, sha256}]}",
    },
    "PoolConfig": dict.fromkeys(EnginesConfig.model_fields, _PHASED),
    "ModelConfig": {
        "model_name": "write `name`",
        "litellm_params": _LITELLM,
        "context_window_fallbacks": "give the model a second pool with a larger `max_model_len`",
        **dict.fromkeys(
            ("input_cost_per_token", "output_cost_per_token"),
            "write `price: {input, output}`, per million tokens",
        ),
        "num_retries": "write `retry: {max_attempts}` at the top level",
    },
}

_DIGITS: Final = "write digits, without quotes"
# By the finding's type, what was expected and how it is written.
_WANTED: Final = {
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float"), ("a whole number", _DIGITS)),
    **dict.fromkeys(("float_type", "float_parsing"), ("a number", _DIGITS)),
    "finite_number": ("a finite number", "write a finite number"),
    **dict.fromkeys(
        ("bool_type", "bool_parsing"), ("true or false", "write true or false, without quotes")
    ),
    **dict.fromkeys(
        ("string_type", "path_type"),
        ("text", "put it in quotes if it looks like a number or a flag"),
    ),
    **dict.fromkeys(
        ("list_type", "tuple_type"), ("a list", "write [a, b], or one `- item` a line")
    ),
    **dict.fromkeys(
        ("dict_type", "mapping_type", "model_type", "model_attributes_type"),
        ("a mapping", "write {key: value}, or one `key: value` a line"),
    ),
}
_BOUNDS = {
    "greater_than_equal": ("ge", "at least"),
    "greater_than": ("gt", "more than"),
    "less_than_equal": ("le", "at most"),
    "less_than": ("lt", "less than"),
}
_KINDS: Final[tuple[tuple[type, str], ...]] = (
    *((type(None), "nothing"), (EnvValue, "text from the environment")),
    *((bool, "true or false"), (int, "a number"), (float, "a fraction")),
    *((str, "text"), (list, "a list"), (dict, "a mapping"), (object, "something else")),
)
"""What a value is called: as the first class that it is of."""
_UNITS = {"gib": "GiB", "bytes": "bytes", "s": "seconds", "ms": "milliseconds", "tokens": "tokens"}
"""By the last word of a key."""

_SECTIONS: Final[dict[RowKind, type[Section]]] = {
    "entitlement": EntitlementConfig,
    "tenant": TenantConfig,
    "key": TenantKeyConfig,
}
_BUDGETS: Final = {"budgets": "set it in the configuration file"}
_IN_FILE: Final[dict[RowKind, dict[str, str]]] = {
    "entitlement": {"api_keys": "add a key with POST /admin/entitlements/{name}/keys"} | _BUDGETS,
    "tenant": {"keys": "add each with POST /admin/tenants/{name}/keys"} | _BUDGETS,
    "key": {},
}


def load(path: str | Path, environ: Mapping[str, str] | None = None) -> Config:
    """Read a configuration file; `environ` is the process's environment unless given."""
    name = str(path)
    try:
        with Path(path).open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
            # With a modification time in the future, every later file would seem older.
            modified_unix_s = min(os.fstat(file.fileno()).st_mtime, time.time())
    except (OSError, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or "not a usable path"
        raise _refused(name, "", f"cannot read the file: {reason}", "check the path") from error
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = raw[: error.start]
        place = before.count(b"\n") + 1, error.start - before.rfind(b"\n")
        raise _refused(name, "", "not UTF-8", "save the file as UTF-8", *place) from error
    config = parse(text, name, os.environ if environ is None else environ)
    config.note(file=name, digest=digest_of(raw), modified_unix_s=modified_unix_s)
    return config


def parse(text: str, filename: str, environ: Mapping[str, str] | None) -> Config:
    """Read a configuration from text. Raises ConfigError, and nothing else.

    A text that a caller sent has no environment: it could name secrets in what is told of it.
    """
    document = read(text, filename, environ)
    if document.sent:
        stand_in_for_references(document)
    config: Config | None = None
    try:
        config = Config.model_validate(document.data)
    except ValidationError as error:
        for detail in error.errors(include_url=False, include_context=True):
            location = detail["loc"]
            path = document.resolve(location)
            kind = detail["type"]
            # Reported already: what a reference caused, and a list whose items are all bad, which
            # is also called too short.
            if path in document.unresolved or (kind == "too_short" and document.value(path)):
                continue
            place = path if kind == "missing" else path[:-1]
            if kind in {"missing", "extra_forbidden"} or location[-1:] == (KEY,):
                path = (*path, KEY)
            document.add(path, *_explained(detail, _section(place)))
    if not document.sent or (config is not None and only_secrets(document.references, config)):
        check_relations(document, config)
    if document.problems or config is None:
        raise ConfigError(document.problems)
    config.note(references=document.references)
    return config


def read_admin_fields(
    config: Config, kind: RowKind, fields: Mapping[str, object]
) -> dict[str, Any]:
    """What an administrator sends of a tenant, an entitlement or a key, as JSON.

    The file's own section checks it, with the same words and fixes. Keys and budgets of an
    entitlement or a tenant are set in the file only, or by routes of their own. Raises ConfigError
    with the first problem.
    """
    for name, fix in _IN_FILE[kind].items():
        if name in fields:
            raise _refused("request", name, "cannot be sent here", fix)
    section = _SECTIONS[kind]
    try:
        checked = section.model_validate(fields)
    except ValidationError as error:
        detail = error.errors(include_url=False, include_context=True)[0]
        path = detail["loc"]
        problem_and_fix = _explained(detail, _section(path[:-1], section))
        path = path[:-1] if path[-1:] == (KEY,) else path
        raise _refused("request", dotted(path), *problem_and_fix) from None
    limits = [name for name in KeyLimitsConfig.model_fields if name in fields]
    if kind == "key" and limits and (unfit := unfit_limits(config)) is not None:
        raise _refused("request", limits[0], *unfit)
    return checked.model_dump(mode="json", exclude_unset=True, exclude_none=True)


def _refused(
    file: str, path: str, message: str, fix: str, line: int = 1, column: int = 1
) -> ConfigError:
    return ConfigError(
        [Problem(file=file, line=line, column=column, path=path, message=message, fix=fix)]
    )


def _explained(detail: ErrorDetails, section: type[Section] | None) -> tuple[str, str]:
    """(problem, fix) of a finding about a key of a section."""
    kind, context = detail["type"], detail.get("ctx", {})
    name = str(detail["loc"][-1]) if detail["loc"] else ""
    fields = {} if section is None else section.model_fields
    if kind == "missing":
        about = (fields[name].description if name in fields else None) or ""
        about = about.split(".")[0].split(";")[0].strip()
        return f"required key `{name}` is missing", f"add `{name}:`" + (about and f" ({about})")
    if kind == "extra_forbidden":
        wishes = {} if section is None else _WISHES.get(section.__name__, {})
        if name in wishes:
            return f"`{name}` is no setting here", wishes[name]
        return f"unknown key `{shown(name)}`", nearest(name, fields)
    if name == KEY:
        return "not a usable name", "use letters, digits, `.`, `_` and `-`, at most 64"
    if kind == "sluice":
        return str(context["message"]), str(context["fix"])
    if kind in {"too_long", "string_too_long"}:
        return f"longer than {context['max_length']}", f"at most {context['max_length']} are taken"
    if kind == "string_pattern_mismatch":
        return "not a usable name", "use letters, digits, `.`, `_` and `-`, without blanks"
    return _of_value(detail, detail["input"], context)


def _of_value(detail: ErrorDetails, value: object, context: Mapping[str, Any]) -> tuple[str, str]:
    """(problem, fix) of a value of another kind than its key asks for, or out of its bounds."""
    kind = detail["type"]
    words = [part for part in detail["loc"] if isinstance(part, str)]
    unit = _UNITS.get(words[-1].rpartition("_")[2], "") if words else ""
    if kind in _WANTED:
        wanted, fix = _WANTED[kind]
        with_unit = type(value) is str and re.fullmatch(r"[0-9][0-9., ]* ?[A-Za-z]{1,12}", value)
        if with_unit and wanted.endswith("number"):
            fix = "write the number alone" + (f": the key's unit is {unit}" if unit else "")
        kind_name = next(words for of, words in _KINDS if isinstance(value, of))
        return f"expected {wanted}, found {kind_name}", fix
    if kind in _BOUNDS:
        key, bound = _BOUNDS[kind]
        bound = f"{bound} {context[key]:g}"
        given = f", found {value}" if isinstance(value, int | float) else ""
        return f"must be {bound}{given}", f"give {bound}" + (unit and f", in {unit}")
    if kind == "literal_error":
        choices = [choice.strip(" '") for choice in re.split(",| or ", str(context["expected"]))]
        if type(value) is str and len(value) <= 20:  # quotable
            return f"`{shown(value)}` is not a choice here", nearest(value, choices)
        return "not a choice here", f"known here: {', '.join(choices)}"
    if kind in {"too_short", "string_too_short"}:
        return "empty", "give some text" if isinstance(value, str) else "give at least one item"
    return "not a valid value", "see the schema that `sluice schema` prints"


def _section(path: KeyPath, root: type[Section] = Config) -> type[Section] | None:
    """The section class whose keys are at a path below `root`."""
    section: type[Section] | None = root
    named = False  # whether the next step is a name chosen by the user, such as a pool's
    for step in path:
        if named or isinstance(step, int):
            named = False
            continue
        field = None if section is None else section.model_fields.get(step)
        if field is None:
            return None
        parts = _parts(field.annotation)
        named = any(part is Mapping for part in parts)
        classes = (part for part in parts if isinstance(part, type))
        section = next((c for c in classes if issubclass(c, Section)), None)
    return section


def _parts(annotation: object) -> list[typing.Any]:
    """An annotation, its origin and its arguments, at any depth."""
    parts = [annotation, typing.get_origin(annotation)]
    for argument in typing.get_args(annotation):
        parts.extend(_parts(argument))
    return parts
