"""A file is a concept: modules and functions stay small, and every one says what it is."""

from __future__ import annotations

import ast

from tests.habits.source import modules, place, tree

MAX_MODULE_LINES = 400
MAX_FUNCTION_LINES = 60

SOURCES = ("raafl", "model_zoo", "benchmarks")


def test_modules_are_short():
    lengths = {place(path, 1): len(path.read_text().splitlines()) for path in modules(*SOURCES)}
    assert not {where: n for where, n in lengths.items() if n >= MAX_MODULE_LINES}, (
        "split these where the concept splits"
    )


def test_functions_are_short():
    long = {}
    for path in modules(*SOURCES):
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines >= MAX_FUNCTION_LINES:
                    long[f"{place(path, node.lineno)} {node.name}"] = lines
    assert not long


def test_library_code_does_not_print():
    wrong = [
        place(path, node.lineno)
        for path in modules("raafl")
        if path.name not in ("cli.py", "__main__.py")
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "print"
    ]
    assert not wrong, "report through the run folder, a logger or raafl.watch.progress"
