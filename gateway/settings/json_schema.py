"""The file's JSON Schema, generated from the models that validate the file."""

from typing import Any

from pydantic.json_schema import GenerateJsonSchema

from gateway.settings.config import Config

DIALECT = "https://json-schema.org/draft/2020-12/schema"
_REFERENCE = "EnvReference"
_VERBATIM = frozenset({"default", "required", "propertyNames"})
_SCALARS = frozenset({"integer", "number", "boolean"})


def schema() -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of sluice.yaml.

    A number, flag, choice or patterned text may also be given as `${NAME}`.
    """
    found = Config.model_json_schema(mode="validation", schema_generator=GenerateJsonSchema)
    definitions = {name: _open(part) for name, part in found.pop("$defs", {}).items()}
    definitions[_REFERENCE] = {
        "title": "Environment reference",
        "description": "`${NAME}` or `${NAME:-default}`, resolved when the file is read.",
        "type": "string",
        "pattern": r"\$\{[A-Za-z_][A-Za-z0-9_]*(:-[^}]*)?\}",
    }
    found = _open(found)
    return {
        "$schema": DIALECT,
        **found,
        "title": "sluice.yaml",
        "$defs": dict(sorted(definitions.items())),
    }


def _open(node: Any) -> Any:
    """Allow an environment reference in place of every scalar that is not free text."""
    if isinstance(node, list):
        return [_open(item) for item in node]
    if not isinstance(node, dict):
        return node
    if "default" in node and isinstance(node["default"], dict):
        node = {key: value for key, value in node.items() if key != "default"}
    if "patternProperties" in node:
        node = {**node, "additionalProperties": False}
    fixed = "enum" in node or "const" in node or "pattern" in node
    if node.get("type") in _SCALARS or fixed:
        about = {k: node[k] for k in ("title", "description", "default") if k in node}
        own = {k: v for k, v in node.items() if k not in about}
        return {**about, "anyOf": [own, {"$ref": f"#/$defs/{_REFERENCE}"}]}
    return {
        key: {name: _open(part) for name, part in value.items()}
        if key == "properties"
        else value
        if key in _VERBATIM
        else _open(value)
        for key, value in node.items()
    }
