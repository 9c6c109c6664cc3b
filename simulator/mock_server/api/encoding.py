"""JSON as the engines write it: UTF-8, with ASCII escapes if it holds a lone surrogate."""

import json

import orjson


def dumps(value: object) -> bytes:
    """A value of plain JSON types as bytes."""
    try:
        return orjson.dumps(value)
    except orjson.JSONEncodeError:
        return json.dumps(value, separators=(",", ":")).encode()
