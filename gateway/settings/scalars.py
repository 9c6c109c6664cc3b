"""YAML scalars and `${NAME}` references, as values.

Rules:

- `${NAME}` is the environment's value. An unset or empty variable is an error, because an empty
  secret is nearly always a mistake. `${NAME:-default}` gives the default in both cases.
- In a text that a caller sent, a reference is not resolved: `reference-NAME` stands in for it.
- `$${` stands for a literal `${`. Substituted text is not scanned again and cannot add structure,
  because references are resolved after the YAML is parsed.
- A value with a reference is an `EnvValue`: text that becomes a number or a flag only where the
  setting expects one. A secret of digits therefore stays text.
- References may stand unquoted inside `{…}` and `[…]`, where braces and commas have a meaning in
  YAML. `mask` hides those characters from the parser one for one, so columns stay correct.
- Numbers are decimal or 0x. YAML 1.1's octal `017` and sexagesimal `1:30` stay text.
"""

import re
from collections.abc import Mapping

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

    def of(found: re.Match[str]) -> str:
        return "${" if found[0] == "$${" else value or f"reference-{found[1]}"

    return EnvValue(_REFERENCE.sub(of, written))


def substitute(text: str, environ: Mapping[str, str] | None) -> str:
    """Resolve the references in one scalar; the text itself when there are none.

    Without an environment each has a stand-in. Raises BadReference for a malformed reference and
    for a missing variable.
    """
    if "${" not in text:
        return text
    found = False

    def value(match: re.Match[str]) -> str:
        nonlocal found
        name, default = match[1], match[2]
        if match[0] == "$${":
            return "${"
        if name is None:
            raise BadReference(
                "malformed environment reference",
                "write `${NAME}` or `${NAME:-default}`, and `$${` for a literal `${`",
            )
        found = True
        if environ is None:
            return str(stand_in(match[0]))
        known = environ.get(name, "")
        if known:
            return known
        if default is not None:
            return str(default)
        state = "empty" if name in environ else "not set"
        raise BadReference(
            f"environment variable {name} is {state}",
            f"export {name}, or write `${{{name}:-default}}`",
        )

    result = _REFERENCE.sub(value, text)
    return EnvValue(result) if found else result


def plain(text: str) -> object:
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
