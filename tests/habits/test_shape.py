"""A file is a concept: modules and functions stay small, and CONTRIBUTING names the same limits."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tests.habits.source import ROOT, modules, nodes, place

MAX_MODULE_LINES = 600
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
        f"nesting at {MAX_LEVELS} levels",
        f"at most {MAX_ARGUMENTS} arguments",
    ):
        assert sentence in text, sentence


def test_the_checker_counts_levels():
    (function,) = ast.parse(
        'def f():\n    """Do.\n\n    More.\n    """\n    if a:\n        pass\n    elif b:\n        for c in d:\n'
        "            with e:\n                pass\n    else:\n        try:\n            pass\n        except F:\n"
        "            match g:\n                case 1:\n                    while h:\n                        pass\n"
    ).body
    assert isinstance(function, ast.FunctionDef) and levels(function.body) == 4
