"""Problems of a configuration, all reported at once, each with its place and its fix.

A problem never quotes a value that may be a secret. It may quote keys, numbers and misspelt
choices, but no texts and nothing from the environment.
"""

from collections.abc import Sequence

import msgspec

from gateway.errors import SluiceError
from gateway.records.record import plain

KeyPath = tuple[str | int, ...]
"""Keys and indices from the root of the file to a value."""
KEY = "[key]"
"""Last step of a path to a key itself, not to its value; pydantic writes it so."""

SHOWN = 100
"""Problems listed in the text of a ConfigError; `problems` has all of them."""


class SourcePosition(msgspec.Struct, frozen=True, gc=False, order=True):
    """A position in the file, both counted from 1."""

    line: int
    column: int


class Problem(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """One problem: its place (file, line, column, dotted path), the message and the fix."""

    file: str
    line: int
    column: int
    path: str
    """`models[0].boundary.gamma`; empty for the file as a whole."""
    message: str
    fix: str

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}:{self.column}"
        path = f"{self.path}: " if self.path else ""
        return f"{where}: {path}{self.message}; {self.fix}"


class ConfigError(SluiceError):
    """The configuration cannot be used; `problems` is sorted by place and never empty."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(sorted(problems, key=lambda p: (p.line, p.column, p.path)))
        lines = [str(problem) for problem in self.problems[:SHOWN]]
        if len(self.problems) > SHOWN:
            lines.append(f"and {len(self.problems) - SHOWN} more")
        super().__init__("\n".join(lines))


def dotted(path: Sequence[str | int]) -> str:
    """`("models", 0, "name")` as `models[0].name`."""
    text = ""
    for step in path:
        if isinstance(step, int):
            text += f"[{step}]"
        else:
            text += f".{shown(step)}" if text else shown(step)
    return text


def shown(text: str, limit: int = 60) -> str:
    """A name fit for a terminal: control characters escaped, cut to `limit` characters."""
    clean = plain(text)
    return clean if len(clean) <= limit else clean[: limit - 1] + "…"


def install(extra: str) -> str:
    """The command for an extra, from the checkout or a wheel: no package index has it."""
    return f"pip install '.[{extra}]' in Sluice's checkout, or 'FILE.whl[{extra}]' with its wheel"
