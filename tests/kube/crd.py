"""Structural schemas of custom resources: default, prune, validate, CEL rules.

Left out: oneOf and its kin, the cost limits of CEL, Kubernetes' own CEL functions, ratcheting.
"""

import json
import re
from collections.abc import Iterator
from datetime import datetime
from functools import cache
from typing import Any, Final

import celpy
from celpy import celtypes
from celpy.adapter import json_to_cel
from celpy.evaluation import CELEvalError

from tests.kube.objects import Object

TYPES: Final[dict[str, type | tuple[type, ...]]] = {
    "object": dict,
    "array": list,
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
}
BOUNDS: Final = {"int32": 2**31 - 1, "int64": 2**63 - 1}
OPEN: Final = "x-kubernetes-preserve-unknown-fields"
RULES: Final = "x-kubernetes-validations"


def completed(schema: Object, value: Any) -> Any:
    """A value with its defaults, and without fields that the schema does not have."""
    if isinstance(value, list) and "items" in schema:
        return [completed(schema["items"], item) for item in value]
    if schema.get("type") == "integer" and isinstance(value, float) and value.is_integer():
        return int(value)
    if not isinstance(value, dict):
        return value
    properties, others = schema.get("properties", {}), schema.get("additionalProperties")
    result = {}
    for name, inner in value.items():
        if inner is None and "default" in properties.get(name, {}):
            continue
        if name in properties:
            result[name] = completed(properties[name], inner)
        elif isinstance(others, dict):
            result[name] = completed(others, inner)
        elif schema.get(OPEN) or others is True:
            result[name] = inner
    for name, inner in properties.items():
        if "default" in inner and name not in result:
            result[name] = completed(inner, inner["default"])
    return result


def problems(schema: Object, value: Any, old: Any = None, path: str = "") -> Iterator[str]:
    """What the schema and its rules find wrong. `old`: what it was before; None: nothing."""
    if schema.get("x-kubernetes-int-or-string"):
        if not isinstance(value, int | str):
            yield f'{path}: Invalid value: "{_kind(value)}": must be of type integer or string'
        return
    kind = schema.get("type")
    wanted = TYPES.get(kind or "", object)
    if value is None and schema.get("nullable"):
        return
    if not isinstance(value, wanted) or (isinstance(value, bool) and kind != "boolean" and kind):
        yield (
            f'{path}: Invalid value: "{_kind(value)}": '
            f'{path} in body must be of type {kind}: "{_kind(value)}"'
        )
        return
    wrong = list(_own_problems(schema, value, path))
    if isinstance(value, dict):
        wrong += _field_problems(schema, value, old, path)
    elif isinstance(value, list):
        wrong += _item_problems(schema, value, old, path)
    yield from wrong
    if not wrong:  # the rules of a value are asked once the value is of its type
        yield from _rule_problems(schema, value, old, path)


def _own_problems(schema: Object, value: Any, path: str) -> Iterator[str]:
    shown = f'"{value}"' if isinstance(value, str) else value
    invalid = f"{path}: Invalid value: {shown}: {path} in body should"
    if "enum" in schema and value not in schema["enum"]:
        names = ", ".join(f'"{name}"' for name in schema["enum"])
        yield f"{path}: Unsupported value: {shown}: supported values: {names}"
    if isinstance(value, str):
        if len(value) > schema.get("maxLength", len(value)):
            yield f"{path}: Too long: may not be longer than {schema['maxLength']}"
        if len(value) < schema.get("minLength", 0):
            yield f"{invalid} be at least {schema['minLength']} chars long"
        if "pattern" in schema and not re.search(schema["pattern"], value):
            yield f"{invalid} match '{schema['pattern']}'"
        if schema.get("format") == "date-time" and not _is_time(value):
            yield f"{path}: Invalid value: {shown}: {path} in body must be of type date-time"
    elif isinstance(value, int | float) and not isinstance(value, bool):
        most = BOUNDS.get(schema.get("format", ""), float("inf"))
        if value < schema.get("minimum", -most):
            yield f"{invalid} be greater than or equal to {schema.get('minimum', -most)}"
        if value > schema.get("maximum", most):
            yield f"{invalid} be less than or equal to {schema.get('maximum', most)}"
    elif isinstance(value, list):
        if len(value) > schema.get("maxItems", len(value)):
            yield f"{path}: Too many: {len(value)}: must have at most {schema['maxItems']} items"
        if len(value) < schema.get("minItems", 0):
            yield f"{invalid} have at least {schema['minItems']} items"
    elif isinstance(value, dict) and len(value) > schema.get("maxProperties", len(value)):
        yield f"{path}: Too many: {len(value)}: must have at most {schema['maxProperties']} items"


def _field_problems(schema: Object, value: Object, old: Any, path: str) -> Iterator[str]:
    before = old if isinstance(old, dict) else {}
    for name in schema.get("required", ()):
        if name not in value:
            yield f"{_join(path, name)}: Required value"
    for name, inner in value.items():
        own = schema.get("properties", {}).get(name, schema.get("additionalProperties"))
        if isinstance(own, dict):
            yield from problems(own, inner, before.get(name), _join(path, name))


def _item_problems(schema: Object, value: list[Any], old: Any, path: str) -> Iterator[str]:
    keys = schema.get("x-kubernetes-list-map-keys")
    before: dict[Any, Any] = {}
    if keys and isinstance(old, list):
        before = {_identity(item, keys): item for item in old}
    seen = set()
    for number, item in enumerate(value):
        where = f"{path}[{number}]"
        known = _identity(item, keys) if keys else None
        if known is not None and known in seen:
            shown = json.dumps(dict(zip(keys or (), known, strict=True)), separators=(",", ":"))
            yield f"{where}: Duplicate value: {shown}"
        seen.add(known)
        yield from problems(schema.get("items", {}), item, before.get(known), where)


def _identity(item: Any, keys: list[str]) -> tuple[Any, ...]:
    return tuple(item.get(key) for key in keys) if isinstance(item, dict) else (item,)


def _rule_problems(schema: Object, value: Any, old: Any, path: str) -> Iterator[str]:
    for rule in schema.get(RULES, ()):
        text = rule["rule"]
        if re.search(r"\boldSelf\b", text) and old is None:
            continue
        names = {"self": _as_cel(schema, value)}
        if old is not None:
            names["oldSelf"] = _as_cel(schema, old)
        try:
            holds, why = bool(_program(text).evaluate(names)), ""
        except CELEvalError as error:
            holds, why = False, f"rule evaluation error: {error.args[0]}"
        if not holds:
            where = _join(path, rule.get("fieldPath", "").lstrip("."))
            message = why or rule.get("message") or f"failed rule: {text}"
            yield f'{where or "<nil>"}: Invalid value: "{_kind(value)}": {message}'


@cache
def _program(rule: str) -> celpy.Runner:
    environment = celpy.Environment()
    return environment.program(environment.compile(rule))


def _as_cel(schema: Object, value: Any) -> Any:
    """In CEL a `number` is a double even where JSON has an integer, and a date-time a timestamp."""
    if isinstance(value, dict):
        own, others = schema.get("properties", {}), schema.get("additionalProperties")
        others = others if isinstance(others, dict) else {}
        inner = {
            celtypes.StringType(name): _as_cel(own.get(name, others), item)
            for name, item in value.items()
        }
        return celtypes.MapType(inner)
    if isinstance(value, list):
        return celtypes.ListType([_as_cel(schema.get("items", {}), item) for item in value])
    if schema.get("type") == "number":
        return celtypes.DoubleType(value)
    if schema.get("format") == "date-time":
        return celtypes.TimestampType(value)
    return json_to_cel(value)


def _is_time(text: str) -> bool:
    try:
        return datetime.fromisoformat(text).tzinfo is not None
    except ValueError:
        return False


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    known = {kind: name for name, kind in TYPES.items() if isinstance(kind, type)}
    return known.get(type(value), "number")


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path and name else path or name
