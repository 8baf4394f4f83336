"""A file is a concept: modules and functions stay small, and CONTRIBUTING names the same limits."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tests.habits.source import ROOT, modules, nodes, place

MAX_MODULE_LINES = 600
MAX_FUNCTION_LINES = 50
MAX_LEVELS = 3
MAX_ARGUMENTS = 12

SOURCES = ("raafl", "model_zoo", "benchmarks")
FIELDS_OF_CONFIGS = ("raafl/data/fine_tuning.py FineTuning", "raafl/data/text.py HuggingFaceText")
"""Classes whose arguments configs name, so that they stay as they are."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(*packages: str) -> Iterator[tuple[str, Function]]:
    """Yield every function of packages, with its place and name."""
    for path in modules(*packages):
        for node in nodes(path):
            if isinstance(node, Function):
                yield f"{place(path, node.lineno)} {node.name}", node


def code_lines(function: Function) -> int:
    """Return the lines of a function from its def to its end, without those of its docstring."""
    first = function.body[0]
    docstring = first if ast.get_docstring(function, clean=False) is not None else None
    described = 0 if docstring is None else (docstring.end_lineno or 0) - docstring.lineno + 1
    return (function.end_lineno or function.lineno) - function.lineno + 1 - described


def levels(body: list[ast.stmt], outer: int = 0) -> int:
    """Return how deeply if, for, while, with, try and match are nested in a body; elif is on the level of its if."""
    deepest = outer
    for node in body:
        if isinstance(node, Function | ast.ClassDef):
            continue
        for inner in blocks(node):
            is_elif = isinstance(node, ast.If) and inner is node.orelse and [type(part) for part in inner] == [ast.If]
            deepest = max(deepest, levels(inner, outer if is_elif else outer + 1))
    return deepest


def blocks(node: ast.stmt) -> Iterator[list[ast.stmt]]:
    """Yield the bodies of a compound statement."""
    yield from (part for name in ("body", "orelse", "finalbody") if (part := getattr(node, name, None)))
    yield from (part.body for name in ("handlers", "cases") for part in getattr(node, name, ()))


def test_modules_are_short():
    lengths = {place(path, 1): len(path.read_text().splitlines()) for path in modules(*SOURCES, "tests")}
    too_long = {where: n for where, n in lengths.items() if n >= MAX_MODULE_LINES}
    assert not too_long, "split these where the concept splits"


def test_functions_are_short():
    long = {
        where: lines for where, function in functions(*SOURCES) if (lines := code_lines(function)) >= MAX_FUNCTION_LINES
    }
    assert not long


def test_functions_are_flat():
    deep = {where: depth for where, function in functions(*SOURCES) if (depth := levels(function.body)) > MAX_LEVELS}
    assert not deep, "return early, or give the inner block a name of its own"


def test_constructors_take_few_arguments():
    long = {}
    for path in modules(*SOURCES):
        for node in nodes(path):
            for part in node.body if isinstance(node, ast.ClassDef) else ():
                if isinstance(part, Function) and part.name == "__init__":
                    named = len([*part.args.posonlyargs, *part.args.args, *part.args.kwonlyargs]) - 1
                    if named > MAX_ARGUMENTS:
                        long[f"{path.relative_to(ROOT)} {node.name}"] = named
    assert sorted(long) == sorted(FIELDS_OF_CONFIGS)


def test_contributing_names_the_same_limits():
    text = re.sub(r"\s+", " ", (ROOT / "CONTRIBUTING.md").read_text())
    for sentence in (
        f"Modules, tests too, stay under {MAX_MODULE_LINES} lines",
        f"functions under {MAX_FUNCTION_LINES} (docstrings aside)",
        f"nesting at {MAX_LEVELS} levels",
        f"at most {MAX_ARGUMENTS} arguments",
    ):
        assert sentence in text, sentence


def test_library_code_does_not_print():
    wrong = [
        place(path, node.lineno)
        for path in modules("raafl")
        if path.name not in ("cli.py", "__main__.py")
        for node in nodes(path)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "print"
    ]
    assert not wrong, "report through the run folder, a logger or raafl.watch.progress"


def test_the_checker_counts_levels_and_lines():
    (function,) = ast.parse(
        'def f():\n    """Do.\n\n    More.\n    """\n    if a:\n        pass\n    elif b:\n        for c in d:\n'
        "            with e:\n                pass\n    else:\n        try:\n            pass\n        except F:\n"
        "            match g:\n                case 1:\n                    while h:\n                        pass\n"
    ).body
    assert isinstance(function, ast.FunctionDef) and levels(function.body) == 4 and code_lines(function) == 15
