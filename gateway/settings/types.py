"""Types of configuration values: strict and bounded.

Strict: `"8"` in quotes is text, and `true` is not a number. The only exception is a value from the
environment, which is text and becomes a number or a flag where the setting expects one.
"""

import re
from datetime import datetime
from typing import Annotated, NoReturn

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, SecretStr
from pydantic_core import PydanticCustomError

from gateway.records.entitlement import INSTANT, in_utc
from gateway.settings.scalars import EnvValue, plain

_KEY = re.compile(r"[\x21-\x7e]+")


class Section(BaseModel):
    """Base of every mapping in the file: immutable, without unknown keys."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        hide_input_in_errors=True,
        use_attribute_docstrings=True,
        validate_default=False,
    )


def reject(message: str, fix: str) -> NoReturn:
    """Fail a field's validation with this message and fix, neither of which may quote a secret."""
    raise PydanticCustomError("sluice", "{message}", {"message": message, "fix": fix})


def _origin(text: str) -> str:
    found = text.lower()
    if found in {"*", "null"} or re.fullmatch(r"[a-z][a-z0-9+.-]*://[^\s/?#@]+", found):
        return found
    reject("not an origin", "write SCHEME://HOST or SCHEME://HOST:PORT without a path, or *")


def typed(value: object) -> object:
    """An environment value as the number or flag that it spells; other values unchanged."""
    if not isinstance(value, EnvValue):
        return value
    found = plain(str(value))
    return value if isinstance(found, str) else found


def _instant(value: object) -> object:
    if value is None:
        return None
    found = in_utc(value) if isinstance(value, str | datetime) else None
    if found is not None:
        return found
    reject(f"not {INSTANT}", "write it as 2026-12-31T23:59:59Z")


def _header_key(value: SecretStr) -> SecretStr:
    if not _KEY.fullmatch(value.get_secret_value()):
        reject(
            "not a key that a header can carry: only ASCII letters, digits and signs, no blanks",
            "make one with `openssl rand -hex 24`",
        )
    return value


Count = Annotated[int, Field(strict=True, ge=1, le=1 << 53), BeforeValidator(typed)]
Natural = Annotated[int, Field(strict=True, ge=0, le=1 << 53), BeforeValidator(typed)]
Weight = Annotated[int, Field(strict=True, ge=1, le=1_000_000), BeforeValidator(typed)]
Days = Annotated[int, Field(strict=True, ge=1, le=36_500), BeforeValidator(typed)]
Port = Annotated[int, Field(strict=True, ge=0, le=65535), BeforeValidator(typed)]
Ranks = Annotated[int, Field(strict=True, ge=1, le=256), BeforeValidator(typed)]
Processes = Annotated[int, Field(strict=True, ge=1, le=128), BeforeValidator(typed)]
Attempts = Annotated[int, Field(strict=True, ge=1, le=10), BeforeValidator(typed)]
Seconds = Annotated[
    float, Field(strict=True, gt=0, le=86400, allow_inf_nan=False), BeforeValidator(typed)
]
Drain = Annotated[
    float, Field(strict=True, ge=0, le=86400, allow_inf_nan=False), BeforeValidator(typed)
]
Amount = Annotated[
    float, Field(strict=True, gt=0, le=1 << 53, allow_inf_nan=False), BeforeValidator(typed)
]
Milliseconds = Annotated[
    float, Field(strict=True, ge=1, le=86_400_000, allow_inf_nan=False), BeforeValidator(typed)
]
Gib = Annotated[
    float, Field(strict=True, gt=0, le=1 << 23, allow_inf_nan=False), BeforeValidator(typed)
]
Factor = Annotated[
    float, Field(strict=True, ge=1, le=100, allow_inf_nan=False), BeforeValidator(typed)
]
Share = Annotated[
    float, Field(strict=True, ge=0, le=1, allow_inf_nan=False), BeforeValidator(typed)
]
Flag = Annotated[bool, Field(strict=True), BeforeValidator(typed)]
Text = Annotated[str, Field(min_length=1, max_length=4096)]
ModelName = Annotated[str, Field(min_length=1, max_length=256, pattern=r"^[^\s\x00-\x1f\x7f]+$")]
"""A model's name as clients send it; no blanks."""
Label = Annotated[str, Field(max_length=64, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
"""A name that goes into headers, metrics and admin paths."""
Origin = Annotated[Text, AfterValidator(_origin)]
"""Of a web page, as browsers send it."""
Secret = Annotated[SecretStr, Field(min_length=1, max_length=4096), AfterValidator(_header_key)]
"""A key that is sent as `Authorization: Bearer KEY`."""
Instant = Annotated[datetime, BeforeValidator(_instant, json_schema_input_type=str)]
