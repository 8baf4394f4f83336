"""A test that only `make test-long` runs names the test that shows the same in each run."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.habits.source import ROOT, modules, tree

TESTS = {path.relative_to(ROOT).as_posix(): path for path in modules("tests") if path.name.startswith("test_")}


def functions(file: str) -> dict[str, ast.FunctionDef]:
    return {node.name: node for node in tree(TESTS[file]).body if isinstance(node, ast.FunctionDef)}


def siblings(function: ast.FunctionDef) -> Iterator[str]:
    """Yield what the `long` marks of a test name."""
    for mark in function.decorator_list:
        if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.long":
            yield from (argument.value for argument in mark.args if isinstance(argument, ast.Constant))


def is_long(function: ast.FunctionDef) -> bool:
    return any(ast.unparse(mark).startswith("pytest.mark.long") for mark in function.decorator_list)


def test_the_sibling_of_a_long_test_exists_and_is_not_long():
    wrong, number = [], 0
    for file in (name for name, path in TESTS.items() if "pytest.mark.long(" in path.read_text()):
        for name, function in functions(file).items():
            for sibling in siblings(function):
                number += 1
                where, _, other = sibling.rpartition("::")
                found = functions(where or file).get(other) if (where or file) in TESTS else None
                if found is None or is_long(found):
                    wrong.append(f"{file}::{name} names {sibling}")
    assert number > 20 and not wrong, "\n".join(wrong)
