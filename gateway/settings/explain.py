"""pydantic's findings -> problems in plain words, with place and fix.

Messages quote a value only if it cannot be a secret: numbers, and misspelt choices written in the
file itself. They never quote texts and values from the environment.
"""

import collections.abc
import difflib
import re
import typing
from collections.abc import Iterable
from typing import Final

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from gateway.settings.config import Config
from gateway.settings.source import KEY, Document, KeyPath, shown
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
_TOKENS: Final = "give an entitlement's `tokens_per_second`, in tokens a second"
_PRICE: Final = "write `price: {input, output}`, per million tokens"
_REQUESTS: Final = "write `requests_per_minute` at a tenant's key"
_PARALLEL: Final = "give an entitlement's `max_concurrency`"
_ANY: Final = {
    **dict.fromkeys(("max_budget", "soft_budget", "budget", "budget_duration"), _BUDGET),
    **dict.fromkeys(("tpm_limit", "tpm"), _TOKENS),
    **dict.fromkeys(("rpm_limit", "rpm", "requests_per_minute"), _REQUESTS),
    "max_parallel_requests": _PARALLEL,
    "blocked": "write `suspended: true` at a tenant's key",
    "expires": "write `expires_at`",
}
"""Under tenants, keys and entitlements alike."""
_KEY: Final = (
    "a key that opens several models stands under `tenants`: {name, keys: [{name, sha256, "
    "models}]}; write one entitlement for each model"
)
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
    "ModelConfig": {
        "model_name": "write `name`",
        "litellm_params": _LITELLM,
        "context_window_fallbacks": "give the model a second pool with a larger `max_model_len`",
        **dict.fromkeys(("input_cost_per_token", "output_cost_per_token"), _PRICE),
        "num_retries": "write `retry: {max_attempts}` at the top level",
    },
}


_WANTED = {
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float"), "a whole number"),
    **dict.fromkeys(("float_type", "float_parsing"), "a number"),
    "finite_number": "a finite number",
    **dict.fromkeys(("bool_type", "bool_parsing"), "true or false"),
    **dict.fromkeys(("string_type", "path_type"), "text"),
    **dict.fromkeys(("list_type", "tuple_type"), "a list"),
    **dict.fromkeys(("dict_type", "mapping_type"), "a mapping"),
    **dict.fromkeys(("model_type", "model_attributes_type"), "a mapping"),
}
_BOUNDS = {
    "greater_than_equal": ("ge", "at least"),
    "greater_than": ("gt", "more than"),
    "less_than_equal": ("le", "at most"),
    "less_than": ("lt", "less than"),
}
_HOW = {
    "a whole number": "write digits, without quotes",
    "a number": "write digits, without quotes",
    "a finite number": "write a finite number",
    "true or false": "write true or false, without quotes",
    "text": "put it in quotes if it looks like a number or a flag",
    "a list": "write [a, b], or one `- item` a line",
    "a mapping": "write {key: value}, or one `key: value` a line",
}
_KINDS: Final[tuple[tuple[type, str], ...]] = (
    *((bool, "true or false"), (int, "a number"), (float, "a fraction")),
    *((str, "text"), (list, "a list"), (dict, "a mapping")),
)
_UNITS = {"gib": "GiB", "bytes": "bytes", "s": "seconds", "ms": "milliseconds", "tokens": "tokens"}
"""By the last word of a key."""


def explain(document: Document, error: ValidationError) -> None:
    """Add one problem for each finding; those caused by an unresolved reference are dropped."""
    for detail in error.errors(include_url=False, include_context=True):
        location = detail["loc"]
        path = document.resolve(location)
        kind = detail["type"]
        if path in document.unresolved or (kind == "too_short" and document.value(path)):
            continue  # reported already: a list whose items are all bad is also called too short
        place = path if kind == "missing" else path[:-1]
        if kind in {"missing", "extra_forbidden"} or location[-1:] == (KEY,):
            path = (*path, KEY)
        document.add(path, *_told(detail, _section(place)))


def first_problem(error: ValidationError, section: type[Section]) -> tuple[KeyPath, str, str]:
    """(path, problem, fix) of the first finding about a section that is not part of a file."""
    detail = error.errors(include_url=False, include_context=True)[0]
    path = detail["loc"]
    told = _told(detail, _section(path[:-1], section))
    return path[:-1] if path[-1:] == (KEY,) else path, *told


def nearest(word: str, known: Iterable[str]) -> str:
    """`did you mean` for a misspelt word, or the list of all choices."""
    choices = list(known)
    close = difflib.get_close_matches(word.lower(), choices, n=1, cutoff=0.6)
    if close:
        return f"did you mean `{close[0]}`?"
    return f"known here: {', '.join(choices)}"


def _told(detail: ErrorDetails, section: type[Section] | None) -> tuple[str, str]:
    """(problem, fix) of a finding about a key of a section."""
    name = str(detail["loc"][-1]) if detail["loc"] else ""
    known = {} if section is None else section.model_fields
    if detail["type"] == "missing":
        about = (known[name].description if name in known else None) or ""
        about = about.split(".")[0].split(";")[0].strip()
        return f"required key `{name}` is missing", f"add `{name}:`" + (about and f" ({about})")
    if detail["type"] == "extra_forbidden":
        wishes = {} if section is None else _WISHES.get(section.__name__, {})
        if name in wishes:
            return f"`{name}` is no setting here", wishes[name]
        return f"unknown key `{shown(name)}`", nearest(name, known)
    if name == KEY:
        return "not a usable name", "use letters, digits, `.`, `_` and `-`, at most 64"
    return _wording(detail)


def _wording(detail: ErrorDetails) -> tuple[str, str]:
    kind, value, context = detail["type"], detail["input"], detail.get("ctx", {})
    if kind == "sluice":
        return str(context["message"]), str(context["fix"])
    if kind in _WANTED:
        wanted = _WANTED[kind]
        fix, unit = _HOW[wanted], _unit(detail)
        of_text = type(value) is str and wanted.endswith("number")
        if of_text and re.fullmatch(r"[0-9][0-9., ]* ?[A-Za-z]{1,12}", value) is not None:
            fix = "write the number alone" + (f": the key's unit is {unit}" if unit else "")
        return f"expected {wanted}, found {_kind(value)}", fix
    if kind in _BOUNDS:
        key, words = _BOUNDS[kind]
        found = f", found {value}" if isinstance(value, int | float) else ""
        unit = f", in {of}" if (of := _unit(detail)) else ""
        return f"must be {words} {context[key]:g}{found}", f"give {words} {context[key]:g}{unit}"
    if kind == "literal_error":
        choices = [choice.strip(" '") for choice in str(context["expected"]).split(",")]
        choices = [c.strip(" '") for choice in choices for c in choice.split(" or ")]
        quotable = type(value) is str and len(value) <= 20
        message = f"`{shown(value)}` is not a choice here" if quotable else "not a choice here"
        if quotable:
            return message, nearest(value, choices)
        return message, f"known here: {', '.join(choices)}"
    if kind in {"too_short", "string_too_short"}:
        return "empty", "give some text" if isinstance(value, str) else "give at least one item"
    if kind in {"too_long", "string_too_long"}:
        return f"longer than {context['max_length']}", f"at most {context['max_length']} are taken"
    if kind == "string_pattern_mismatch":
        return "not a usable name", "use letters, digits, `.`, `_` and `-`, without blanks"
    return "not a valid value", "see the schema that `sluice schema` prints"


def _unit(detail: ErrorDetails) -> str:
    """The unit that a key's name ends in; "" for none."""
    names = [part for part in detail["loc"] if isinstance(part, str)]
    return _UNITS.get(names[-1].rpartition("_")[2], "") if names else ""


def _kind(value: object) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, EnvValue):
        return "text from the environment"
    found = (name for kind, name in _KINDS if isinstance(value, kind))
    return next(found, "something else")


def _section(path: KeyPath, root: type[Section] = Config) -> type[Section] | None:
    """The section class whose keys are at a path below `root`."""
    section: type[Section] | None = root
    named = False  # whether the next step is a name chosen by the user, such as a pool's
    for step in path:
        if section is None:
            return None
        if named or isinstance(step, int):
            named = False
            continue
        field = section.model_fields.get(step)
        if field is None:
            return None
        parts = _parts(field.annotation)
        named = any(part is collections.abc.Mapping for part in parts)
        classes = (part for part in parts if isinstance(part, type))
        section = next((found for found in classes if issubclass(found, Section)), None)
    return section


def _parts(annotation: object) -> list[typing.Any]:
    """An annotation, its origin and its arguments, at any depth."""
    found = [annotation, typing.get_origin(annotation)]
    for argument in typing.get_args(annotation):
        found.extend(_parts(argument))
    return found
