"""What is compiled where asked for (pyproject.toml, docs/adr/0007) keeps to what mypyc can do."""

import ast
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HOOK = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"][
    "wheel"
]["hooks"]["mypyc"]
EXCLUDED = {name for name in HOOK["exclude"] if "/" in name}
COMPILED = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in HOOK["include"]
    for path in ROOT.glob(pattern)
    if path.name != "__init__.py" and path.relative_to(ROOT).as_posix() not in EXCLUDED
)
NOT_FOR_THEIR_CLASSES = {"gateway/stages/explain.py", "gateway/policy/passing.py"}


def tree(name: str) -> ast.Module:
    return ast.parse((ROOT / name).read_text())


def has_records(name: str) -> bool:
    """A class with arguments, or one of msgspec's: both lose what their arguments say."""
    return any(
        isinstance(node, ast.ClassDef)
        and (
            node.keywords
            or any(ast.unparse(base).endswith(("Struct", "Record")) for base in node.bases)
        )
        for node in ast.walk(tree(name))
    )


@pytest.mark.parametrize("name", COMPILED)
def test_no_class_of_it_takes_arguments(name: str) -> None:
    assert not has_records(name), "a record: name the module under exclude"


@pytest.mark.parametrize("name", COMPILED)
def test_no_bound_of_a_slice_does_anything(name: str) -> None:
    """mypyc 2.4 evaluates the bounds of a memoryview's slice twice; `len` and `max` may be."""
    harmless = {"len", "max", "min"}
    for node in ast.walk(tree(name)):
        if isinstance(node, ast.Slice):
            calls = [n for n in ast.walk(node) if isinstance(n, ast.Call)]
            assert {ast.unparse(call.func) for call in calls} <= harmless, ast.unparse(node)
            assert not any(isinstance(n, ast.Await | ast.NamedExpr) for n in ast.walk(node))


@pytest.mark.parametrize("name", sorted(EXCLUDED))
def test_what_is_left_out_is_there_and_has_to_be(name: str) -> None:
    assert name in NOT_FOR_THEIR_CLASSES or has_records(name), "it could be compiled"


def test_what_decides_is_compiled() -> None:
    assert {"gateway/policy/quartz.py", "gateway/policy/admission.py"} <= set(COMPILED)
    assert len(COMPILED) > 60
