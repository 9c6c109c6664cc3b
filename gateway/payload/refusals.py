"""Turn decoding errors and bad values into OpenAI-shaped 400s that name the field."""

import re

import msgspec

from gateway.errors import BadRequest

_NOUNS = {
    "str": "a string",
    "int": "an integer",
    "float": "a number",
    "bool": "a boolean",
    "array": "an array",
    "object": "an object",
    "null": "null",
}
_PATH = re.compile(r" - at `\$\.?(?P<path>[^`]*)`$")
_TYPES = re.compile(r"^Expected `(?P<want>[^`]*)`, got `(?P<got>[^`]*)`$")
_MISSING = re.compile(r"^Object missing required field `(?P<field>[^`]*)`$")


def missing(param: str) -> BadRequest:
    """400: a required field is absent, null or empty."""
    return BadRequest(
        f"Missing required parameter: '{param}'.",
        reason="missing_field",
        param=param,
    )


def invalid(param: str, why: str) -> BadRequest:
    """400: a field has the right type but a value that cannot be served."""
    return BadRequest(
        f"Invalid value for '{param}': {why}",
        reason="invalid_value",
        param=param,
    )


def undecodable(error: Exception, within: str = "") -> BadRequest:
    """400: the body violates JSON, UTF-8 or the endpoint's schema.

    `within` is the path of the value that was being decoded; "" for the whole body.
    """
    if isinstance(error, RecursionError):
        return BadRequest("The request body is nested too deeply.", reason="too_deep")
    if isinstance(error, UnicodeDecodeError):
        return BadRequest("The request body is not valid UTF-8.", reason="invalid_utf8")
    if not isinstance(error, msgspec.ValidationError):
        detail = str(error).removeprefix("JSON is malformed: ")
        return BadRequest(
            f"The request body could not be parsed as JSON: {detail}.", reason="invalid_json"
        )
    text = str(error)
    found = _PATH.search(text)
    path = within + (found["path"] if found else "")
    text = _PATH.sub("", text)
    if absent := _MISSING.match(text):
        field = absent["field"]
        return missing(f"{path}.{field}" if path else field)
    types = _TYPES.match(text)
    if types is None:
        return invalid(path, f"{text}.")
    want, got = _nouns(types["want"]), _nouns(types["got"])
    if not path:
        return BadRequest(
            f"The request body must be {want}, but it is {got}.", reason="invalid_type", code=None
        )
    return BadRequest(
        f"Invalid type for '{path}': expected {want}, but got {got} instead.",
        reason="invalid_type",
        param=path,
    )


def _nouns(types: str) -> str:
    return " or ".join(_NOUNS.get(name, name) for name in types.split(" | "))
