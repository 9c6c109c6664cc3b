"""The OpenAPI description of the client API; written by hand because the data plane is raw ASGI.

It describes only the fields that the gateway reads. The rest of a body goes to the engine
unchanged, so every request schema allows further members.
"""

from typing import Any

from gateway.batches.intake import ENDPOINTS

Schema = dict[str, Any]


def _array(items: Schema) -> Schema:
    return {"type": "array", "minItems": 1, "items": items}


def _object(required: str, **properties: Any) -> Schema:
    return {"type": "object", "required": required.split(), "properties": properties}


_STRING, _BOOLEAN = {"type": "string"}, {"type": "boolean"}
_TEXT = {"type": "string", "minLength": 1}
_LIMIT = {"type": "integer", "minimum": 1, "maximum": 2147483647}
_MODEL = {"type": "string", "minLength": 1, "maxLength": 256}
_PART = _object("type text", type={"const": "text"}, text=_STRING)
_MESSAGES = _array(
    _object(
        "role content",
        role={"type": "string", "enum": ["system", "user", "assistant"]},
        content={"anyOf": [_STRING, _array(_PART)]},
        name=_STRING,
    )
)
_TOKEN_IDS = _array({"type": "integer", "minimum": 0})
_PROMPT = {"anyOf": [_TEXT, _array(_TEXT), _TOKEN_IDS, _array(_TOKEN_IDS)]}
_STREAM = {
    "stream": _BOOLEAN,
    "stream_options": {"type": "object", "properties": {"include_usage": _BOOLEAN}},
}

_BODIES: dict[str, tuple[str, str, Schema]] = {
    "/v1/chat/completions": (
        "Chat completion",
        "model messages",
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
        "model prompt",
        {"prompt": _PROMPT, "max_tokens": _LIMIT, **_STREAM},
    ),
    "/v1/embeddings": ("Embeddings", "model input", {"input": _PROMPT}),
    "/v1/responses": (
        "Response",
        "model input",
        {
            "input": {"anyOf": [_STRING, _MESSAGES]},
            "instructions": _STRING,
            "max_output_tokens": _LIMIT,
            "stream": _BOOLEAN,
        },
    ),
    "/v1/messages": (
        "Anthropic message",
        "model messages max_tokens",
        {"messages": _MESSAGES, "max_tokens": _LIMIT, "stream": _BOOLEAN},
    ),
    "/v1/messages/count_tokens": (
        "Token count of an Anthropic message",
        "model messages",
        {"messages": _MESSAGES},
    ),
    "/tokenize": ("Token count of a prompt", "model prompt", {"prompt": _STRING}),
    "/v1/rerank": (
        "Rerank documents",
        "model query documents",
        {"query": _TEXT, "documents": _array(_TEXT)},
    ),
    "/v1/score": (
        "Score pairs of texts",
        "model text_1 text_2",
        {"text_1": _TEXT, "text_2": _array(_TEXT)},
    ),
}
_QUOTE = _object(
    "model",
    model=_MODEL,
    endpoint={"enum": ["chat", "completions", "embeddings", "responses", "messages"]},
    messages=_MESSAGES,
    prompt=_PROMPT,
    input=_PROMPT,
    input_tokens={"type": "integer", "minimum": 0, "maximum": 2147483647},
    max_tokens=_LIMIT,
)
_FILE = _object("purpose file", purpose={"const": "batch"}, file={**_STRING, "format": "binary"})
_BATCH = _object(
    "input_file_id endpoint",
    input_file_id=_STRING,
    endpoint={"enum": [*ENDPOINTS]},
    completion_window={**_STRING, "default": "24h"},
    metadata={"type": "object", "additionalProperties": _STRING},
    sluice=_object("", accept_late=_BOOLEAN),
)
_OTHERS: tuple[tuple[str, str, str, Schema | None], ...] = (
    ("post", "/v1/sluice/quote", "What would come of a request now", _QUOTE),
    ("get", "/v1/files", "Files, newest first", None),
    ("post", "/v1/files", "Upload a file of requests", _FILE),
    ("get", "/v1/files/{id}", "One file", None),
    ("delete", "/v1/files/{id}", "Delete a file that no unfinished batch reads", None),
    ("get", "/v1/files/{id}/content", "Its bytes, or a range of them", None),
    ("get", "/v1/batches", "Batches, newest first", None),
    ("post", "/v1/batches", "Create a batch of an uploaded file", _BATCH),
    ("get", "/v1/batches/{id}", "One batch", None),
    ("post", "/v1/batches/{id}/cancel", "Cancel a batch; what it has done stays", None),
    ("get", "/v1/models", "Models that this key may use", None),
    ("get", "/health", "The process is alive", None),
    ("get", "/ready", "It can serve", None),
)
"""Method, path, summary, and the body where there is one."""
_ERROR = _object(
    "error",
    error=_object(
        "message type param code",
        message=_STRING,
        type=_STRING,
        param={"type": ["string", "null"]},
        code={"type": ["string", "integer", "null"]},
    ),
)
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
    paths: dict[str, Any] = {}
    for path, (summary, required, properties) in _BODIES.items():
        answer = _json("The engine's answer", {"type": "object"})
        answer["content"]["text/event-stream"] = {"schema": _STRING}
        operation = _operation(path, summary, answer)
        schema = _object(required, model=_MODEL, **properties)
        content = {"application/json": {"schema": schema}}
        paths[path] = {"post": {**operation, "requestBody": {"required": True, "content": content}}}
    for method, path, summary, body in _OTHERS:
        operation = _operation(path, summary, _json("OK", {"type": "object"}))
        if path in paths:
            operation["operationId"] += f"_{method}"
        if body is not None:
            kind = "multipart/form-data" if body is _FILE else "application/json"
            operation["requestBody"] = {"required": True, "content": {kind: {"schema": body}}}
        if "{id}" in path:
            operation["parameters"] = [
                {"name": "id", "in": "path", "required": True, "schema": _STRING}
            ]
        paths.setdefault(path, {})[method] = operation
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


def _operation(path: str, summary: str, answer: Schema) -> Schema:
    error = {"$ref": "#/components/schemas/Error"}
    refusals = {status: _json(text, error) for status, text in _REFUSALS.items()}
    return {
        "operationId": path.strip("/").translate({ord("/"): "_", ord("{"): "", ord("}"): ""}),
        "summary": summary,
        "responses": {"200": answer, **refusals},
    }


def _json(description: str, schema: Schema) -> Schema:
    return {"description": description, "content": {"application/json": {"schema": schema}}}
