"""Names, references and text of the file that an import writes."""

import json
import re
from collections.abc import Collection, Mapping
from typing import Any, Final

import yaml

from gateway.settings import ConfigError, parse

ASSUMED_WINDOW: Final = 32_768
"""max_model_len where the imported file does not say it."""
ASSUMED_SEQUENCES: Final = 256
"""max_num_seqs likewise: vLLM's default."""
_NAME: Final = re.compile(r"[^A-Za-z0-9._-]+")
_LABEL_CHARS: Final = 64
_REFERENCE: Final = re.compile(r"(?<!\$)\$\{([A-Za-z_][A-Za-z0-9_]*)\}")


class Row(dict[str, Any]):
    """A section that is written on one line."""


def label(text: str, taken: Collection[str] = ()) -> str:
    """A name from any text, as the file allows it, and none of those `taken`."""
    name = _NAME.sub("-", text).strip("-._")[:_LABEL_CHARS] or "unnamed"
    made, number = name, 2
    while made in taken:
        made = f"{name[: _LABEL_CHARS - 8]}-{number}"
        number += 1
    return made


def literal(text: str) -> str:
    """Text in which nothing is read as a reference to the environment."""
    return text.replace("${", "$${")


def variable(text: str) -> str:
    """A name of an environment variable, from any text."""
    name = re.sub(r"[^A-Za-z0-9]+", "_", text).strip("_").upper() or "KEY"
    return f"K_{name}" if name[0].isdigit() else name


class _Dumper(yaml.SafeDumper):
    """Block style, with every Row on one line and lists indented."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, indentless=False)


def _row(dumper: yaml.SafeDumper, row: Row) -> yaml.Node:
    return dumper.represent_mapping("tag:yaml.org,2002:map", row, flow_style=True)


_Dumper.add_representer(Row, _row)


def dumped(config: Mapping[str, Any], head: str) -> str:
    """Text of these sections under a comment."""
    comment = "".join(f"# {line}\n" for line in head.splitlines())
    body = yaml.dump(dict(config), Dumper=_Dumper, sort_keys=False, width=1_000, allow_unicode=True)
    return f"{comment}{body}"


def written(config: Mapping[str, Any], head: str) -> str:
    """The file's text under a comment. Raises ConfigError if `sluice check` would refuse it."""
    text = dumped(config, head)
    parse(text, "sluice.yaml", _environment(text, config))
    return text


def _environment(text: str, config: Mapping[str, Any]) -> dict[str, str]:
    """Any usable value for each reference: a URL for a whole value, a digit within one."""
    state = config.get("state", {}).get("url", "")
    whole = _REFERENCE.fullmatch(state)
    found = dict.fromkeys(references(text), "http://set.invalid:1")
    found.update(dict.fromkeys(references(state), "1" if whole is None else "redis://set.invalid"))
    return found


def references(text: str) -> list[str]:
    """Environment variables that a text refers to, in order."""
    return list(dict.fromkeys(_REFERENCE.findall(text)))


def problems_of(error: ConfigError) -> str:
    """The problems of a file that an import made, as JSON for a bug report."""
    return json.dumps([str(problem) for problem in error.problems], indent=2)
