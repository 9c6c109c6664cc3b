"""`bench mutations`: seeded faults in what decides, and whether the tests see them.

A fault changes one place of one module: a comparison, an `and`, a sign, a condition, a call whose
result nobody uses. It is made in a copy of the tree, in which the tests of its subject run, the
nearest first. Some faults change nothing that anybody could see (a bound that is never met
exactly): survivors are printed, for a reader to judge.
"""

import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from rich.console import Console

from bench.common.report import Report, at_least, scaled

ROOT: Final = Path(__file__).parents[2]
FAULTS: Final = scaled(60, 6)
SEED: Final = int(os.environ.get("SLUICE_BENCH_SEED", "1"))
CAUGHT: Final = 0.9
LIMIT_S: Final = 600
"""Tests that take longer hang, which is seen, too."""
SUBJECTS: Final = {
    "gateway/admission": (
        "tests/unit/gateway/admission",
        "tests/contract/test_store_differential.py",
        "tests/contract/test_limits.py",
        "tests/contract/test_lease_store.py",
        "tests/unit/gateway/pipeline",
    ),
    "gateway/tenancy": (
        "tests/unit/gateway/tenancy",
        "tests/contract/test_tenants.py",
        "tests/contract/test_unlucky_operators.py",
        "tests/unit/gateway/pipeline",
        "tests/unit/gateway/control",
        "tests/integration/test_denials.py",
        "tests/integration/test_jwt.py",
    ),
    "gateway/routing": (
        "tests/unit/gateway/routing",
        "tests/unit/gateway/pipeline",
        "tests/unit/gateway/fleet",
        "tests/unit/simulator/pipeline",
    ),
    "gateway/upstream.py": (
        "tests/contract/test_upstream.py",
        "tests/unit/gateway/pipeline",
        "tests/integration/test_lying_engine.py",
    ),
    "gateway/pipeline": (
        "tests/unit/gateway/pipeline",
        "tests/unit/gateway/http",
        "tests/unit/gateway/payload",
        "tests/integration/test_bad_input.py",
        "tests/integration/test_misbehaving_clients.py",
        "tests/integration/test_usage.py",
    ),
}
"""Folder or file -> the tests that should see a fault in it, the nearest first."""
_COMPARED: Final[dict[type[ast.cmpop], type[ast.cmpop]]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_COMPUTED: Final[dict[type[ast.operator], type[ast.operator]]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
}


class Fault(NamedTuple):
    """One changed place."""

    subject: str
    path: str
    line: int
    before: str
    after: str
    span: tuple[int, int, int, int]
    """First line, column, last line, column of what is replaced, as `ast` counts."""


def _changed(node: ast.AST) -> ast.AST | None:
    """The node with a fault, or None where none of ours fits."""
    match node:
        case ast.Compare(left=left, ops=[op], comparators=values) if type(op) in _COMPARED:
            return ast.Compare(left, [_COMPARED[type(op)]()], values)
        case ast.BoolOp(op=op, values=values):
            return ast.BoolOp(ast.Or() if isinstance(op, ast.And) else ast.And(), values)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _COMPUTED:
            text = any(isinstance(part, ast.JoinedStr | ast.List) for part in (left, right))
            return None if text else ast.BinOp(left, _COMPUTED[type(op)](), right)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return operand
        case ast.IfExp(test=test, body=body, orelse=orelse):
            return ast.IfExp(test, orelse, body)
        case ast.Expr(value=ast.Call() | ast.Await() as value):
            logs = "_log." in ast.unparse(value) or "warn" in ast.unparse(value)
            return None if logs else ast.Pass()
        case ast.AugAssign(target=target, op=op, value=value) if type(op) in _COMPUTED:
            return ast.AugAssign(target, _COMPUTED[type(op)](), value)
    return None


def _nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """What runs: neither annotations nor text for people."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.AnnAssign) and child.value is not None:
            yield from _nodes(child.value)
        elif not isinstance(child, ast.arguments | ast.JoinedStr | ast.AnnAssign | ast.Assert):
            yield child
            yield from _nodes(child)


def _faults(subject: str) -> list[Fault]:
    path = ROOT / subject
    found = []
    for file in sorted(path.glob("*.py")) if path.is_dir() else [path]:
        for node in _nodes(ast.parse(file.read_text("utf-8"))):
            changed = _changed(node)
            if changed is not None and isinstance(node, ast.expr | ast.stmt):
                end = (node.end_lineno or 0, node.end_col_offset or 0)
                name = file.relative_to(ROOT).as_posix()
                texts = (ast.unparse(node), ast.unparse(ast.fix_missing_locations(changed)))
                span = (node.lineno, node.col_offset, *end)
                found.append(Fault(subject, name, node.lineno, *texts, span))
    return found


def _with_fault(text: str, fault: Fault) -> str:
    """The module's source with the place replaced; an expression gets parentheses."""
    first, column, last, end = fault.span
    lines = [line.encode() for line in text.split("\n")]
    after = fault.after if fault.after == "pass" or "= " in fault.after else f"({fault.after})"
    lines[first - 1 : last] = [
        lines[first - 1][:column] + after.encode() + lines[last - 1][end:],
    ]
    return b"\n".join(lines).decode()


def _caught(copy: Path, fault: Fault) -> str | None:
    """The tests that see it, or None."""
    file = copy / fault.path
    sound = file.read_text("utf-8")
    file.write_text(_with_fault(sound, fault), "utf-8")
    try:
        for tests in SUBJECTS[fault.subject]:
            if _fail(copy, tests):
                return tests
        return None
    finally:
        file.write_text(sound, "utf-8")


def _fail(copy: Path, tests: str) -> bool:
    """Whether these tests fail in the copy, or hang."""
    command = [
        *(sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"),
        *("-m", "not timed and not alone and not image", tests),
    ]
    environment = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            command, cwd=copy, env=environment, capture_output=True, timeout=LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return True
    return done.returncode != 0


def run() -> Report:
    """Faults of SLUICE_BENCH_SEED, as many for each subject."""
    console = Console(stderr=True)
    draw = random.Random(SEED)
    each = -(-FAULTS // len(SUBJECTS))
    drawn = [fault for subject in SUBJECTS for fault in draw.sample(_faults(subject), each)]
    caught = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "tree"
        listed = subprocess.run(
            ["git", "ls-files", "-co", "--exclude-standard"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
        for name in listed.stdout.splitlines():
            if (ROOT / name).is_file():
                (copy / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, copy / name)
        for number, fault in enumerate(drawn, 1):
            seen_by = _caught(copy, fault)
            caught += seen_by is not None
            outcome = f"seen by {seen_by}" if seen_by else "SURVIVES"
            console.print(
                f"{number}/{len(drawn)} {fault.path}:{fault.line} {fault.before!r} -> "
                f"{fault.after!r}: {outcome}",
                soft_wrap=True,
                markup=False,
            )
    share = caught / len(drawn)
    row = at_least("share of faults that tests see", share, CAUGHT, note=f"{caught}/{len(drawn)}")
    return Report(name="mutations", rows=[row])
