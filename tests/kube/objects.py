"""What the API server does with any object: names, quantities, selectors, merge patches."""

import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any, Final

Object = dict[str, Any]

SUBDOMAIN: Final = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
LABEL: Final = re.compile(r"(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?")
QUANTITY: Final = re.compile(r"([+-]?)(\d+\.?\d*|\.\d+)([numkMGTPE]|[KMGTPE]i|[eE][+-]?\d+)?")
DECIMAL: Final = {"n": -3, "u": -2, "m": -1, "": 0, "k": 1, "M": 2, "G": 3, "T": 4, "P": 5, "E": 6}
BINARY: Final = {"Ki": 1, "Mi": 2, "Gi": 3, "Ti": 4, "Pi": 5, "Ei": 6}


class Refused(Exception):
    """The API server refuses a call: a Status object says why."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.status: Object = {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": message,
            "reason": reason,
            "code": code,
        }


def invalid(what: str, name: str, problems: list[str]) -> Refused:
    """422. `what`: the kind, with its group where it has one."""
    listed = problems[0] if len(problems) == 1 else f"[{', '.join(problems)}]"
    return Refused(422, "Invalid", f'{what} "{name}" is invalid: {listed}')


# -- quantities


def quantity(text: str | float) -> Fraction:
    """What a quantity is worth. Raises ValueError."""
    match = QUANTITY.fullmatch(str(text))
    if match is None:
        raise ValueError("quantities must match the regular expression")
    sign, number, suffix = match.group(1), match.group(2), match.group(3) or ""
    worth = Fraction(number if number[-1] != "." else number[:-1])
    if suffix in BINARY:
        worth *= 1024 ** BINARY[suffix]
    elif suffix in DECIMAL:
        worth *= Fraction(1000) ** DECIMAL[suffix]
    else:
        worth *= Fraction(10) ** int(suffix[1:])
    return -worth if sign == "-" else worth


def canonical(text: str | float) -> str:
    """A quantity as the API server writes it: 1000 is 1k, 1024Mi is 1Gi, .5 is 500m."""
    worth, match = quantity(text), QUANTITY.fullmatch(str(text))
    suffix = (match and match.group(3)) or ""
    if len(suffix) > 1 and suffix[0] in "eE":
        return _scaled(worth, {f"e{3 * power}" if power else "": power for power in range(7)}, 1000)
    if suffix in BINARY and worth.denominator == 1 and abs(worth) >= 1024:
        return _scaled(worth, {"": 0, **BINARY}, 1024)
    return _scaled(worth, DECIMAL, 1000)


def _scaled(worth: Fraction, suffixes: Mapping[str, int], base: int) -> str:
    """With the largest suffix that leaves an integer."""
    for suffix, power in sorted(suffixes.items(), key=lambda pair: -pair[1]):
        scaled = worth / Fraction(base) ** power
        if scaled.denominator == 1 and (scaled or not power):
            return f"{scaled}{suffix}"
    return f"{-(-worth * 10**9 // 1)}n"  # rounded up to nano


# -- metadata


def metadata_problems(obj: Object) -> list[str]:
    """What is wrong in the metadata of any object."""
    metadata, problems = obj["metadata"], []
    name = metadata["name"]
    if not SUBDOMAIN.fullmatch(name) or len(name) > 253:
        problems.append(
            f'metadata.name: Invalid value: "{name}": a lowercase RFC 1123 subdomain must consist '
            "of lower case alphanumeric characters, '-' or '.', and must start and end with an "
            "alphanumeric character"
        )
    for key, value in (metadata.get("labels") or {}).items():
        prefix, _, short = key.rpartition("/")
        if (prefix and not SUBDOMAIN.fullmatch(prefix)) or not short or not _label(short):
            problems.append(f'metadata.labels: Invalid value: "{key}": name part must consist of')
        if not isinstance(value, str) or not _label(value):
            problems.append(
                f'metadata.labels: Invalid value: "{value}": a valid label must be an empty string '
                "or consist of at most 63 alphanumeric characters, '-', '_' or '.'"
            )
    problems += [
        f'metadata.annotations: Invalid value: "{key}": name part must consist of'
        for key in metadata.get("annotations") or {}
        if not _label(key.rpartition("/")[2])
    ]
    for number, name in enumerate(metadata.get("finalizers") or ()):
        if "/" not in name and name not in ("orphan", "foregroundDeletion", "kubernetes"):
            where = f'metadata.finalizers[{number}]: Invalid value: "{name}"'
            why = "name is neither a standard finalizer name nor is it fully qualified"
            problems.append(f"{where}: {why}")
    for owner in metadata.get("ownerReferences") or ():
        problems += [
            f'metadata.ownerReferences.{field}: Invalid value: "": {field} must not be empty'
            for field in ("apiVersion", "kind", "name", "uid")
            if not owner.get(field)
        ]
    return problems


def _label(text: str) -> bool:
    return len(text) <= 63 and bool(LABEL.fullmatch(text))


# -- selectors


def selected_by_labels(selector: str) -> Callable[[Object], bool]:
    """Raises Refused for one that cannot be read."""
    tests: list[Callable[[Mapping[str, str]], bool]] = []
    for part in re.split(r",(?![^(]*\))", selector):
        text = part.strip()
        if not text:
            continue
        if match := re.fullmatch(r"(\S+)\s+(in|notin)\s+\((.*)\)", text):
            key, word, values = match.group(1), match.group(2), match.group(3).split(",")
            wanted = {value.strip() for value in values}
            tests.append(_within(key, wanted, word == "in"))
        elif match := re.fullmatch(r"([^\s=!]+)\s*(==|=|!=)\s*([\w.-]*)", text):
            tests.append(_within(match.group(1), {match.group(3)}, match.group(2) != "!="))
        elif match := re.fullmatch(r"(!?)\s*([\w./-]+)", text):
            tests.append(_present(match.group(2), not match.group(1)))
        else:
            raise Refused(400, "BadRequest", f"unable to parse requirement: {text}")

    def selected(obj: Object) -> bool:
        labels = obj["metadata"].get("labels") or {}
        return all(test(labels) for test in tests)

    return selected


def _within(key: str, values: set[str], wanted: bool) -> Callable[[Mapping[str, str]], bool]:
    return lambda labels: (labels.get(key) in values) is wanted


def _present(key: str, wanted: bool) -> Callable[[Mapping[str, str]], bool]:
    return lambda labels: (key in labels) is wanted


FIELDS: Final = {
    "pods": ("spec.nodeName", "spec.schedulerName", "spec.restartPolicy", "status.phase"),
    "nodes": ("spec.unschedulable",),
    "secrets": ("type",),
    "namespaces": ("status.phase",),
    "events": ("reason", "type"),
}


def selected_by_fields(selector: str, plural: str) -> Callable[[Object], bool]:
    """Raises Refused for a field that cannot be selected by."""
    tests = []
    for part in filter(None, selector.split(",")):
        field, sign, value = re.split(r"(!=|==|=)", part, maxsplit=1)
        if field not in ("metadata.name", "metadata.namespace", *FIELDS.get(plural, ())):
            what = f'"{field}" is not a known field selector'
            raise Refused(400, "BadRequest", what)
        tests.append((field.split("."), value, sign != "!="))

    def selected(obj: Object) -> bool:
        return all((str(at(obj, path) or "") == value) is wanted for path, value, wanted in tests)

    return selected


# -- changes


def at(obj: Any, path: list[str]) -> Any:
    """The value at a path; None where there is none."""
    for name in path:
        obj = obj.get(name) if isinstance(obj, dict) else None
    return obj


def put_at(obj: Object, path: list[str], value: Any) -> None:
    """Set the value at a path."""
    for name in path[:-1]:
        obj = obj.setdefault(name, {})
    obj[path[-1]] = value


def merged(target: Any, patch: Any) -> Any:
    """A JSON merge patch applied (RFC 7386)."""
    if not isinstance(patch, dict):
        return patch
    result = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = merged(result.get(key), value)
    return result
