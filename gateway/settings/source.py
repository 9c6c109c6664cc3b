"""YAML text -> plain data, with the place of every key and value.

Of PyYAML only the composer (nodes with marks) is used: no constructors, and no tags beyond YAML's
own scalars. The input is bounded by `MAX_BYTES` of text, `MAX_DEPTH` levels and `MAX_NODES` values
after alias expansion, so an alias bomb is an error and not an outage. After a duplicate key or a
bad reference, reading continues to report all problems at once; bad syntax ends it.

A problem never quotes a value that may be a secret. It may quote keys, numbers and misspelt
choices, but no texts and nothing from the environment.
"""

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import yaml

from gateway.errors import SluiceError
from gateway.records.record import plain
from gateway.settings.types import BadReference, EnvValue, mask, number, substitute, unquoted

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


def nearest(word: str, words: Iterable[str]) -> str:
    """`did you mean` for a misspelt word, or the list of all choices."""
    choices = list(words)
    close = difflib.get_close_matches(word.lower(), choices, n=1, cutoff=0.6)
    if close:
        return f"did you mean `{close[0]}`?"
    return f"known here: {', '.join(choices)}"


def install(extra: str) -> str:
    """The command for an extra, from the checkout or a wheel: no package index has it."""
    return f"pip install '.[{extra}]' in Sluice's checkout, or 'FILE.whl[{extra}]' with its wheel"


MAX_BYTES = 1 << 20
MAX_DEPTH = 40
MAX_NODES = 100_000

_TAG = "tag:yaml.org,2002:"
_SCALAR_TAGS = frozenset(
    _TAG + name for name in ("str", "int", "float", "bool", "null", "timestamp", "value", "merge")
)
_QUOTED = re.compile(r" ?'([^']*)'")
_QUOTE_FIX = "check the indentation, and quote values that hold `: `, ` #` or start with a symbol"


class Document:
    """A parsed file: its `data`, the place of every key and value, and the problems found."""

    def __init__(self, filename: str, *, sent: bool = False) -> None:
        self.filename = filename
        self.sent = sent
        """Whether a caller sent it: then neither the environment nor a file it names is read."""
        self.references: dict[KeyPath, str] = {}
        """Values with references, as written."""
        self.data: object = None
        self.problems: list[Problem] = []
        self.unresolved: set[KeyPath] = set()
        """Values whose reference failed: already reported, and None in `data`."""
        self.values: dict[KeyPath, SourcePosition] = {}
        self.keys: dict[KeyPath, SourcePosition] = {}

    def add(self, path: KeyPath, message: str, fix: str) -> None:
        """Note a problem at a value, or at its key if the path ends in `KEY`."""
        key = path[-1:] == (KEY,)
        place = self.key_place(path[:-1]) if key else self.place(path)
        self.add_at(place, message, fix, path=path[:-1] if key else path)

    def add_at(self, place: SourcePosition, message: str, fix: str, *, path: KeyPath = ()) -> None:
        """Note a problem at a place."""
        self.problems.append(
            Problem(
                file=self.filename,
                line=place.line,
                column=place.column,
                path=dotted(path),
                message=message,
                fix=fix,
            )
        )

    def place(self, path: KeyPath) -> SourcePosition:
        """Where a value starts, or else its nearest parent."""
        while path and path not in self.values:
            path = path[:-1]
        return self.values.get(path, SourcePosition(1, 1))

    def key_place(self, path: KeyPath) -> SourcePosition:
        """Where a value's key is; the value's own place for list items and the root."""
        return self.keys.get(path) or self.place(path)

    def resolve(self, location: tuple[str | int, ...]) -> KeyPath:
        """The longest real path inside a validator's location (unions add steps of their own)."""
        path: KeyPath = ()
        for step in location:
            if (*path, step) in self.values:
                path = (*path, step)
        return path

    def put(self, path: KeyPath, value: object) -> None:
        """Replace the value at a path."""
        self.value(path[:-1])[path[-1]] = value

    def value(self, path: KeyPath) -> Any:
        """The plain data at a path; None when there is none."""
        value: Any = self.data
        for step in path:
            try:
                value = value[step]
            except (KeyError, IndexError, TypeError):
                return None
        return value


def read(text: str, filename: str, environ: Mapping[str, str] | None) -> Document:
    """Parse a file's text, one that a caller sent without an environment.

    Raises ConfigError when it is not YAML at all.
    """
    document = Document(filename, sent=environ is None)
    if len(text) > MAX_BYTES:
        document.add((), f"the file is larger than {MAX_BYTES} bytes", "split the fleet in two")
        raise ConfigError(document.problems)
    masked, table = mask(text)
    node = _compose(masked, document)
    if node is None:
        document.add((), "the file is empty", "start from docs/sluice.yaml")
        raise ConfigError(document.problems)
    document.data = _Reader(document, table, environ).value(node, (), ())
    return document


class _TooDeep(Exception):
    """More than MAX_DEPTH levels."""


class _Loader(yaml.SafeLoader):
    """SafeLoader's composer with a bound on nesting."""

    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise _TooDeep
        try:
            return super().compose_node(parent, index)
        finally:
            self.depth -= 1


def _compose(text: str, document: Document) -> yaml.Node | None:
    loader: _Loader | None = None
    place = None
    try:
        loader = _Loader(text)
        return loader.get_single_node()
    except _TooDeep:
        message = f"nested deeper than {MAX_DEPTH} levels"
    except yaml.MarkedYAMLError as error:
        if mark := error.problem_mark or error.context_mark:
            place = SourcePosition(mark.line + 1, mark.column + 1)
        # The parser's message without its quotes: an alias's name may be the start of a secret.
        problem = str(error.problem or error.context or "bad syntax")
        if "\\t" in problem:
            wording = "a tab where YAML wants spaces"
        else:
            if problem.startswith("but "):
                problem = f"{error.context}, {problem}"
            harmless = _QUOTED.sub(
                lambda quoted: quoted[0] if re.fullmatch(r"<[a-z ]+>|\W*", quoted[1]) else "",
                problem.split("; ", maxsplit=1)[0],
            )
            wording = shown(harmless, 120)
        message = f"not valid YAML: {wording}"
    except yaml.YAMLError as error:  # a character that YAML does not allow
        offset = getattr(error, "position", 0)
        before = text[: offset if isinstance(offset, int) else 0]
        place = SourcePosition(before.count("\n") + 1, len(before) - before.rfind("\n"))
        message = "not valid YAML: a control character or an unpaired surrogate"
    except (ValueError, OverflowError, IndexError, AttributeError, TypeError):
        # PyYAML does not wrap these, e.g. for "\UFFFFFFFF" and absurd version directives.
        message = "not valid YAML: an escape or a directive out of range"
    if place is None:
        mark = None if loader is None else loader.get_mark()
        place = SourcePosition(mark.line + 1, mark.column + 1) if mark else SourcePosition(1, 1)
    document.add_at(place, message, _QUOTE_FIX)
    raise ConfigError(document.problems)


class _Reader:
    """Nodes -> data. Keys are always text; the last step of a path is its key or index."""

    def __init__(
        self, document: Document, table: dict[int, str], environ: Mapping[str, str] | None
    ) -> None:
        self._document = document
        self._table = table
        self._environ = environ
        self._nodes = 0

    def value(self, node: yaml.Node, path: KeyPath, above: tuple[yaml.Node, ...]) -> object:
        document, inside = self._document, (*above, node)
        document.values[path] = _place(node)
        self._bound(node, path, above)
        if isinstance(node, yaml.ScalarNode) and node.tag in _SCALAR_TAGS:
            raw = str(node.value).translate(self._table)
            try:
                text = substitute(raw, self._environ)
            except BadReference as error:
                document.add(path, error.message, error.fix)
                document.unresolved.add(path)
                return None
            if isinstance(text, EnvValue):
                document.references[path] = raw
                return None if not text and node.style is None else text
            if node.tag == _TAG + "str":
                return text if node.style else number(text)  # 1e3 is a number in YAML 1.2
            return text if node.tag == _TAG + "timestamp" else unquoted(text)
        if isinstance(node, yaml.SequenceNode) and node.tag == _TAG + "seq":
            return [self.value(item, (*path, i), inside) for i, item in enumerate(node.value)]
        if not isinstance(node, yaml.MappingNode) or node.tag != _TAG + "map":
            document.add(path, "a YAML tag that this file may not use", "remove the `!tag`")
            document.unresolved.add(path)
            return None
        result: dict[str, object] = {}
        for key_node, value_node, merged in self._pairs(node, path, above):
            if not isinstance(key_node, yaml.ScalarNode):
                message, fix = "a key must be a word", "quote it if it starts with `{` or `[`"
                document.add_at(_place(key_node), message, fix, path=path)
                continue
            key = str(key_node.value).translate(self._table)
            inner = (*path, key)
            if key not in result:
                document.keys[inner] = _place(key_node)
                result[key] = self.value(value_node, inner, inside)
            elif not merged:  # an explicit key wins over a merged one
                first = document.keys[inner].line
                message = f"duplicate key `{shown(key)}`, first on line {first}"
                document.add_at(_place(key_node), message, "keep one of the two", path=path)
        return result

    def _pairs(
        self, node: yaml.MappingNode, path: KeyPath, above: tuple[yaml.Node, ...]
    ) -> Iterator[tuple[yaml.Node, yaml.Node, bool]]:
        """(key, value, merged?): the mapping's own first, then what `<<` merges into it."""
        self._bound(node, path, above)
        merges: list[yaml.Node] = []
        for key, value in node.value:
            if key.tag == _TAG + "merge":
                merges.extend(value.value if isinstance(value, yaml.SequenceNode) else [value])
            else:
                yield key, value, False
        for other in merges:
            if isinstance(other, yaml.MappingNode):
                for key, value, _ in self._pairs(other, path, (*above, node)):
                    yield key, value, True
            else:
                message, fix = "`<<` merges mappings only", "name an anchored mapping"
                self._document.add_at(_place(other), message, fix, path=path)

    def _bound(self, node: yaml.Node, path: KeyPath, above: tuple[yaml.Node, ...]) -> None:
        self._nodes += 1
        if self._nodes <= MAX_NODES and len(above) <= MAX_DEPTH and node not in above:
            return
        message = "aliases that contain themselves, or expand without bound"
        self._document.add_at(_place(node), message, "write the values out", path=path)
        raise ConfigError(self._document.problems)


def _place(node: yaml.Node) -> SourcePosition:
    return SourcePosition(node.start_mark.line + 1, node.start_mark.column + 1)
