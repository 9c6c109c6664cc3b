"""Every part of every bench names a function that is there."""

import ast
from pathlib import Path

import pytest

from bench import __main__ as command


@pytest.mark.parametrize("name", command.BENCHES)
def test_a_part_is_a_function(name: str) -> None:
    for part in command.BENCHES[name].parts.values():
        module, _, function = part.partition(":")
        file = Path(command.__file__).parent / f"{module.replace('.', '/')}.py"
        defined = ast.parse(file.read_text(encoding="utf-8")).body
        names = {each.name for each in defined if isinstance(each, ast.FunctionDef)}
        assert function in names, part
