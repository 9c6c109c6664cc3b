"""docs/sluice.yaml against the schema: every setting at its place, no other, defaults as stated."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.settings import ConfigError, parse

ROOT = Path(__file__).parents[2]
EXAMPLE = (ROOT / "docs/sluice.yaml").read_text(encoding="utf-8")
SCHEMA = json.loads((ROOT / "docs/sluice.schema.json").read_text(encoding="utf-8"))
LIVE = re.sub(r"^( *)# (?=[a-z_]+: )", r"\1", EXAMPLE, flags=re.MULTILINE)
"""The example with its commented settings in force."""

CODE = re.compile(r"`([^`]+)`")
"""What stands in backticks."""

KeyPath = tuple[str, ...]
Shown = tuple[yaml.Node, int]


def settings_of(
    node: dict[str, Any], under: KeyPath = ()
) -> Iterator[tuple[KeyPath, dict[str, Any]]]:
    """Every setting of the schema by its path; `*` stands for an item, or a key of any name."""
    if "$ref" in node:
        if node["$ref"].endswith("/EnginesConfig"):  # of a phase: as the pool's own
            return
        yield from settings_of(SCHEMA["$defs"][node["$ref"].rpartition("/")[2]], under)
    for choice in node.get("anyOf", []):
        yield from settings_of(choice, under)
    for name, part in node.get("properties", {}).items():
        yield (*under, name), part
        yield from settings_of(part, (*under, name))
    if "items" in node:
        yield from settings_of(node["items"], (*under, "*"))
    for part in (node.get("additionalProperties"), *node.get("patternProperties", {}).values()):
        if isinstance(part, dict):
            yield from settings_of(part, (*under, "*"))


SETTINGS = dict(settings_of(SCHEMA))
MAPPINGS = {path[:-1] for path in SETTINGS if path[-1] != "*"}


def shown(node: yaml.Node | None, under: KeyPath = ()) -> Iterator[tuple[KeyPath, Shown]]:
    """Every setting of the example by its path: its value, and the line it is on."""
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            path = (*under, key.value) if under in MAPPINGS else (*under, "*")
            if under in MAPPINGS:
                yield path, (value, key.start_mark.line)
            yield from shown(value, path)
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield from shown(item, (*under, "*"))


def remark_at(at: int) -> str:
    """The comment on a line, the lines that lead to it and those (`#   `) that go on with it."""
    lines = [line.strip() for line in LIVE.splitlines()]
    first, last = at, at + 1
    while re.match(r"# (?! )", lines[first - 1]):
        first -= 1
    while last < len(lines) and lines[last].startswith("#   "):
        last += 1
    said = [lines[at].partition("# ")[2], *lines[first:at], *lines[at + 1 : last]]
    return " ".join(line.lstrip("# ") for line in said)


SHOWN: dict[KeyPath, list[Shown]] = {}
for found, value in shown(yaml.compose(LIVE, yaml.SafeLoader)):
    SHOWN.setdefault(found, []).append(value)


PUT_OFF = re.compile(r"\b(to come|no effect yet|not( yet)? in force|not yet read|later version)\b")


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))], ids=lambda p: p.name
)
def test_no_page_puts_off_a_setting_that_is_in_force(page: Path) -> None:
    """Every setting of the schema is in force."""
    names = {path[-1] for path in SETTINGS} - {"*"}
    wrong = [
        line
        for line in page.read_text(encoding="utf-8").splitlines()
        if PUT_OFF.search(line.lower())
        and (line.startswith("#") or names & set(re.findall(r"\w+", " ".join(CODE.findall(line)))))
    ]
    assert wrong == []


def test_the_example_is_valid_as_written_and_with_what_is_commented() -> None:
    environ = {name: f"from-{name}" for name in re.findall(r"\$\{(\w+)", EXAMPLE)}
    assert parse(EXAMPLE, "docs/sluice.yaml", environ).models
    with pytest.raises(ConfigError) as refused:
        parse(LIVE, "docs/sluice.yaml", environ)
    elsewhere = ("o such file", "publishes through Redis")
    wrong = [p for p in refused.value.problems if not any(e in p.message for e in elsewhere)]
    assert wrong == []


def test_the_example_shows_every_setting_and_no_other() -> None:
    assert len(SETTINGS) > 90
    assert {".".join(path) for path in SHOWN} == {".".join(path) for path in SETTINGS}


@pytest.mark.parametrize(
    "path", [p for p, part in SETTINGS.items() if "default" in part], ids=".".join
)
def test_the_example_shows_or_states_the_default(path: KeyPath) -> None:
    default = SETTINGS[path]["default"]
    if default is None or default == []:
        said = " ".join(remark_at(line) for _, line in SHOWN[path])
        assert re.search(r"\b(default|absent|without|leave away)\b", said), said
        return
    for node, line in SHOWN[path]:
        stated = re.search(r"\bdefault:? (\S+?)[,;.]?(?=\s|$)", remark_at(line))
        value = stated[1] if stated else yaml.serialize(node)
        assert yaml.safe_load(value) == default
