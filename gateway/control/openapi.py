"""The OpenAPI description of the client API; written by hand because the data plane is raw ASGI.

It describes only the fields that the gateway reads. The rest of a body goes to the engine
unchanged, so every request schema allows further members.
"""

from typing import Any

_TEXT = {"type": "string", "minLength": 1}
_LIMIT = {"type": "integer", "minimum": 1, "maximum": 2147483647}
_MODEL = {"type": "string", "minLength": 1, "maxLength": 256}
_MESSAGE = {
    "type": "object",
    "required": ["role", "content"],
    "properties": {
        "role": {"type": "string", "enum": ["system", "user", "assistant"]},
        "content": {
            "anyOf": [
                {"type": "string"},
                {
                    "type": "array",
                    "minItems": 1,
                    "items": {
                        "type": "object",
                        "required": ["type", "text"],
                        "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
                    },
                },
            ]
        },
        "name": {"type": "string"},
    },
}
_MESSAGES = {"type": "array", "minItems": 1, "items": _MESSAGE}
_TOKEN_IDS = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}}
_PROMPT = {
    "anyOf": [
        _TEXT,
        {"type": "array", "minItems": 1, "items": _TEXT},
        _TOKEN_IDS,
        {"type": "array", "minItems": 1, "items": _TOKEN_IDS},
    ]
}
_STREAM = {
    "stream": {"type": "boolean"},
    "stream_options": {"type": "object", "properties": {"include_usage": {"type": "boolean"}}},
}

_BODIES: dict[str, tuple[str, list[str], dict[str, Any]]] = {
    "/v1/chat/completions": (
        "Chat completion",
        ["model", "messages"],
        {
            "messages": _MESSAGES,
            "max_tokens": _LIMIT,
            "max_completion_tokens": _LIMIT,
            "n": {"type": "integer", "minimum": 1, "maximum": 128},
            **_STREAM,
        },
    ),
    "/v1/completions": (
        "Completion",
        ["model", "prompt"],
        {"prompt": _PROMPT, "max_tokens": _LIMIT, **_STREAM},
    ),
    "/v1/embeddings": ("Embeddings", ["model", "input"], {"input": _PROMPT}),
    "/v1/responses": (
        "Response",
        ["model", "input"],
        {
            "input": {"anyOf": [{"type": "string"}, _MESSAGES]},
            "instructions": {"type": "string"},
            "max_output_tokens": _LIMIT,
            "stream": {"type": "boolean"},
        },
    ),
    "/v1/messages": (
        "Anthropic message",
        ["model", "messages", "max_tokens"],
        {"messages": _MESSAGES, "max_tokens": _LIMIT, "stream": {"type": "boolean"}},
    ),
    "/v1/messages/count_tokens": (
        "Token count of an Anthropic message",
        ["model", "messages"],
        {"messages": _MESSAGES},
    ),
    "/tokenize": ("Token count of a prompt", ["model", "prompt"], {"prompt": {"type": "string"}}),
    "/v1/rerank": (
        "Rerank documents",
        ["model", "query", "documents"],
        {"query": _TEXT, "documents": {"type": "array", "minItems": 1, "items": _TEXT}},
    ),
    "/v1/score": (
        "Score pairs of texts",
        ["model", "text_1", "text_2"],
        {"text_1": _TEXT, "text_2": _PROMPT["anyOf"][1]},
    ),
}

_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "integer", "null"]},
            },
        }
    },
}
_REFUSALS = {
    "400": "The request cannot be served as sent; the message says what to change.",
    "401": "No API key, or an unknown one.",
    "403": "The key may not do this.",
    "404": "Unknown model.",
    "405": "Unknown method.",
    "413": "The body is too large.",
    "415": "The body is not JSON.",
    "429": "A limit was reached; retry after the time given.",
    "502": "Every engine tried failed before it answered.",
    "503": "No engine is ready.",
    "504": "The engine did not answer in time.",
}


def openapi_document(version: str) -> dict[str, Any]:
    """The whole document (OpenAPI 3.1)."""
    paths: dict[str, Any] = {path: {"post": _operation(path)} for path in _BODIES}
    for path, summary in (
        ("/v1/models", "Models that this key may use"),
        ("/health", "The process is alive"),
        ("/ready", "It can serve"),
    ):
        paths[path] = {
            "get": {
                "operationId": path.strip("/").replace("/", "_"),
                "summary": summary,
                "responses": {"200": _json("OK", {"type": "object"}), **_refusals()},
            }
        }
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Sluice",
            "version": version,
            "description": "OpenAI-compatible gateway for fleets of LLM engines.",
        },
        "security": [{"bearer": []}, {}],
        "components": {
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
            "schemas": {"Error": _ERROR},
        },
        "paths": paths,
    }


def _operation(path: str) -> dict[str, Any]:
    summary, required, properties = _BODIES[path]
    schema = {
        "type": "object",
        "required": required,
        "properties": {"model": _MODEL, **properties},
    }
    answer = _json("The engine's answer", {"type": "object"})
    answer["content"]["text/event-stream"] = {"schema": {"type": "string"}}
    return {
        "operationId": path.strip("/").replace("/", "_"),
        "summary": summary,
        "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
        "responses": {"200": answer, **_refusals()},
    }


def _refusals() -> dict[str, Any]:
    reference = {"$ref": "#/components/schemas/Error"}
    return {status: _json(text, reference) for status, text in _REFUSALS.items()}


def _json(description: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"description": description, "content": {"application/json": {"schema": schema}}}
