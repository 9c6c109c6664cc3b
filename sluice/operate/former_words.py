"""Verbs under the names that they had before: for one release, with a line that says the new ones.

`sluice tenant` was for entitlements and `sluice tenants` for tenants. Where only an entitlement can
be meant, `sluice tenant` still does what it did; else it is about tenants.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Final

import typer

_VERBS: Final = frozenset({"expire", "keys", "audit"})
"""Verbs that only entitlements have."""
_OPTIONS: Final = frozenset(
    {
        *("--tenant", "--model", "--class", "--slo-target-ms", "--concurrency", "--mode"),
        *("--tokens-per-second", "--max-tokens-per-second", "--kv-cache-gib"),
        *("--max-kv-cache-gib", "--max-concurrency", "--expires-at"),
    }
)
"""Options that only entitlements have."""


def in_present_words(arguments: Sequence[str]) -> list[str]:
    """The arguments of a command with the present names of its verbs; notes on stderr."""
    group, *rest = arguments or ("",)
    if group == "tenants":
        return _renamed(group, "tenant", rest)
    if group == "tenant" and _of_entitlements(rest):
        return _renamed(group, "entitlement", rest)
    return list(arguments)


def _of_entitlements(arguments: Sequence[str]) -> bool:
    if not arguments:
        return False
    names = {argument.partition("=")[0] for argument in arguments}
    unset = {
        f"--{field.replace('_', '-')}" for flag, field in pairwise(arguments) if flag == "--unset"
    }
    return arguments[0] in _VERBS or bool(_OPTIONS & (names | unset))


def _renamed(old: str, new: str, rest: list[str]) -> list[str]:
    verb = rest[0] if rest and not rest[0].startswith("-") else "VERB"
    typer.echo(f"`sluice {old} {verb}` is called `sluice {new} {verb}` now", err=True)
    return [new, *rest]
