"""Types of configuration values: strict and bounded.

Strict: `"8"` in quotes is text, and `true` is not a number. The only exception is a value from the
environment, which is text and becomes a number or a flag where the setting expects one.
"""

import re
from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Final, NoReturn

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, SecretStr
from pydantic_core import PydanticCustomError

from gateway.records.entitlement import INSTANT, in_utc

_REFERENCE = re.compile(r"\$\$\{|\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}|\$\{")
_MASKED = re.compile(r"\$\{[^{}\n]*\}")
_SPECIAL = "{},[]:#"
_INT = re.compile(r"[-+]?(0|[1-9][0-9_]{0,29})\Z|0x[0-9a-fA-F]{1,16}\Z")
_FLOAT = re.compile(
    r"[-+]?(\d{1,30}\.\d{0,30}|\.\d{1,30})([eE][-+]?\d{1,3})?\Z|[-+]?\d{1,30}[eE][-+]?\d{1,3}\Z"
)
_BOOLS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


class EnvValue(str):
    """Text that came wholly or partly from the environment; never quoted in an error."""

    __slots__ = ()


class BadReference(Exception):
    """A reference that cannot be resolved; carries the problem's message and fix."""

    def __init__(self, message: str, fix: str) -> None:
        super().__init__(message)
        self.message = message
        self.fix = fix


def mask(text: str) -> tuple[str, dict[int, str]]:
    """Hide YAML's special characters inside references; the table undoes it (str.translate)."""
    size = len(_SPECIAL)
    used = set(text)
    for base in range(0xE000, 0xF8FF - size, size):  # the private use area
        table = {base + i: char for i, char in enumerate(_SPECIAL)}
        if used.isdisjoint(map(chr, table)):
            break
    else:
        return text, {}
    hide = str.maketrans({char: chr(code) for code, char in table.items()})
    return _MASKED.sub(lambda match: match[0].translate(hide), text), table


def stand_in(written: str, value: str = "") -> EnvValue:
    """A text with this value in place of its references; by default their names."""

    def of(match: re.Match[str]) -> str:
        return "${" if match[0] == "$${" else value or f"reference-{match[1]}"

    return EnvValue(_REFERENCE.sub(of, written))


def substitute(text: str, environ: Mapping[str, str] | None) -> str:
    """Resolve the references in one scalar; the text itself when there are none.

    Without an environment each has a stand-in. Raises BadReference for a malformed reference and
    for a missing variable.
    """
    if "${" not in text:
        return text
    resolved = False

    def value(match: re.Match[str]) -> str:
        nonlocal resolved
        name, default = match[1], match[2]
        if match[0] == "$${":
            return "${"
        if name is None:
            raise BadReference(
                "malformed environment reference",
                "write `${NAME}` or `${NAME:-default}`, and `$${` for a literal `${`",
            )
        resolved = True
        if environ is None:
            return str(stand_in(match[0]))
        setting = environ.get(name, "")
        if setting:
            return setting
        if default is not None:
            return str(default)
        state = "empty" if name in environ else "not set"
        raise BadReference(
            f"environment variable {name} is {state}",
            f"export {name}, or write `${{{name}:-default}}`",
        )

    result = _REFERENCE.sub(value, text)
    return EnvValue(result) if resolved else result


def unquoted(text: str) -> object:
    """The value of an unquoted YAML scalar: null, a flag, a number or the text itself."""
    if text in {"", "~", "null", "Null", "NULL"}:
        return None
    if text.lower() in _BOOLS:
        return _BOOLS[text.lower()]
    return number(text)


def number(text: str) -> int | float | str:
    """A decimal or 0x integer, a decimal float, or the text when it is neither."""
    if _INT.match(text):
        return int(text, 16) if text.startswith("0x") else int(text.replace("_", ""))
    if _FLOAT.match(text):
        return float(text)
    return text


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
    origin = text.lower()
    if origin in {"*", "null"} or re.fullmatch(r"[a-z][a-z0-9+.-]*://[^\s/?#@]+", origin):
        return origin
    reject("not an origin", "write SCHEME://HOST or SCHEME://HOST:PORT without a path, or *")


def typed(value: object) -> object:
    """An environment value as the number or flag that it spells; other values unchanged."""
    if not isinstance(value, EnvValue):
        return value
    parsed = unquoted(str(value))
    return value if isinstance(parsed, str) else parsed


def _instant(value: object) -> object:
    if value is None:
        return None
    moment = in_utc(value) if isinstance(value, str | datetime) else None
    if moment is not None:
        return moment
    reject(f"not {INSTANT}", "write it as 2026-12-31T23:59:59Z")


def _header_key(value: SecretStr) -> SecretStr:
    if not _KEY.fullmatch(value.get_secret_value()):
        reject(
            "not a key that a header can carry: only ASCII letters, digits and signs, no blanks",
            "make one with `openssl rand -hex 24`",
        )
    return value


MAX_MONEY: Final = 9_000_000
_TYPED = BeforeValidator(typed)
Count = Annotated[int, Field(strict=True, ge=1, le=1 << 53), _TYPED]
Natural = Annotated[int, Field(strict=True, ge=0, le=1 << 53), _TYPED]
Weight = Annotated[int, Field(strict=True, ge=1, le=1_000_000), _TYPED]
Days = Annotated[int, Field(strict=True, ge=1, le=36_500), _TYPED]
Port = Annotated[int, Field(strict=True, ge=0, le=65535), _TYPED]
Ranks = Annotated[int, Field(strict=True, ge=1, le=256), _TYPED]
Processes = Annotated[int, Field(strict=True, ge=1, le=128), _TYPED]
Attempts = Annotated[int, Field(strict=True, ge=1, le=10), _TYPED]
Seconds = Annotated[float, Field(strict=True, gt=0, le=86400, allow_inf_nan=False), _TYPED]
Drain = Annotated[float, Field(strict=True, ge=0, le=86400, allow_inf_nan=False), _TYPED]
Amount = Annotated[float, Field(strict=True, gt=0, le=1 << 53, allow_inf_nan=False), _TYPED]
Milliseconds = Annotated[
    float, Field(strict=True, ge=1, le=86_400_000, allow_inf_nan=False), _TYPED
]
Gib = Annotated[float, Field(strict=True, gt=0, le=1 << 23, allow_inf_nan=False), _TYPED]
Factor = Annotated[float, Field(strict=True, ge=1, le=100, allow_inf_nan=False), _TYPED]
Share = Annotated[float, Field(strict=True, ge=0, le=1, allow_inf_nan=False), _TYPED]
Money = Annotated[float, Field(strict=True, gt=0, le=MAX_MONEY, allow_inf_nan=False), _TYPED]
"""In units of the currency."""
WarnAt = Annotated[float, Field(strict=True, gt=0, le=1, allow_inf_nan=False), _TYPED]
Flag = Annotated[bool, Field(strict=True), _TYPED]
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
