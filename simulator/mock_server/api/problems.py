"""Errors with vLLM's formats and wordings."""

from http import HTTPStatus
from typing import Any

from simulator.mock_server.api.config import MockConfig


class ApiError(Exception):
    """An error answer, with vLLM's status and JSON."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "BadRequestError",
        param: str | None = None,
        flat: bool = False,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.flat = flat
        """Whether fields are at the top level beside `object`, as in SGLang."""

    def body(self, *, anthropic: bool = False) -> dict[str, Any]:
        """The JSON, in the dialect's shape."""
        if anthropic:
            return {"type": "error", "error": {"type": self.kind, "message": self.message}}
        fields = {
            "message": self.message,
            "type": self.kind,
            "param": self.param,
            "code": self.status,
        }
        return {"object": "error", **fields} if self.flat else {"error": fields}


class ContextOverflowError(ApiError):
    """The prompt and the output do not fit the window."""


def invalid(message: str) -> ApiError:
    """A body that fails validation."""
    return ApiError(400, message, kind=HTTPStatus.BAD_REQUEST.phrase)


def overflow(
    config: MockConfig, prompt_tokens: int, limit: int | None, limit_field: str = "max_tokens"
) -> ContextOverflowError:
    """Refusal of a prompt (and output limit) above the window, in the chosen wording."""
    window = config.profile.max_model_len
    total = prompt_tokens + (limit or 0)
    wording = config.overflow_wording
    if wording == "sglang":
        if prompt_tokens >= window:
            message = (
                f"The input ({prompt_tokens} tokens) is longer than the model's context length "
                f"({window} tokens)."
            )
        else:
            message = (
                "Requested token count exceeds the model's maximum context length of "
                f"{window} tokens. You requested a total of {total} tokens: {prompt_tokens} "
                f"tokens from the input messages and {limit} tokens for the completion. Please "
                "reduce the number of tokens in the input messages or the completion to fit "
                "within the limit."
            )
        return ContextOverflowError(400, message, flat=True)
    if wording == "v1":
        asked = (
            f"you requested {total} tokens in the messages, Please reduce the length of the "
            "messages."
            if limit is None
            else f"you requested {total} tokens ({prompt_tokens} in the messages, {limit} in the "
            "completion). Please reduce the length of the messages or completion."
        )
        return ContextOverflowError(
            400, f"This model's maximum context length is {window} tokens. However, {asked}"
        )
    if wording == "v2":
        return ContextOverflowError(
            400,
            f"You passed {prompt_tokens} input tokens and requested {limit or 0} output tokens. "
            f"However, the model's context length is only {window} tokens, resulting in a maximum "
            f"input length of {max(0, window - (limit or 0))} tokens. Please reduce the length of "
            "the input prompt or the number of requested output tokens.",
            param="input_tokens",
        )
    if wording == "v4" and limit is not None and limit > window:
        return ContextOverflowError(
            400,
            f"{limit_field}={limit} cannot be greater than max_model_len=max_total_tokens="
            f"{window}. Please request fewer output tokens. (parameter={limit_field}, "
            f"value={limit})",
            param=limit_field,
        )
    return _newest_overflow(window, prompt_tokens, limit)


def _newest_overflow(window: int, prompt_tokens: int, limit: int | None) -> ContextOverflowError:
    """The wording of vLLM 0.32: it counts the prompt only to one token too many (`at least`)."""
    room = window - (limit or 0)
    least = min(prompt_tokens, room + 1) if room >= 0 else prompt_tokens
    asked = (
        f"your prompt contains at least {least} input tokens"
        if limit is None
        else f"you requested {limit} output tokens and your prompt contains at least {least} "
        f"input tokens, for a total of at least {least + limit} tokens"
    )
    return ContextOverflowError(
        400,
        f"This model's maximum context length is {window} tokens. However, {asked}. Please reduce "
        "the length of the input prompt or the number of requested output tokens. "
        f"(parameter=input_tokens, value={least})",
        param="input_tokens",
    )


def model_not_found(model: str) -> ApiError:
    """The model is not served here."""
    return ApiError(
        404, f"The model `{model}` does not exist.", kind="NotFoundError", param="model"
    )


def adapter_not_found(name: str) -> ApiError:
    """The LoRA adapter is not loaded here."""
    return ApiError(404, f"The lora adapter '{name}' cannot be found.", kind="NotFoundError")


def busy() -> ApiError:
    """The queue is full; the engine is healthy."""
    return ApiError(
        503,
        "The engine is busy: too many requests are queued. Please try again later.",
        kind="ServiceUnavailableError",
    )


def unavailable() -> ApiError:
    """A 503 for another reason than a full queue."""
    return ApiError(503, "The engine is not available.", kind="ServiceUnavailableError")


def internal() -> ApiError:
    """A crash of the engine."""
    return ApiError(500, "EngineCore encountered an issue.", kind="InternalServerError")
