"""Docstrings open with the subject and a verb, and name every argument of a function that has more than two."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.habits.source import modules, nodes, place, tree

SOURCES = ("raafl", "model_zoo", "benchmarks", "tests/helpers")
QUESTION = re.compile(r"(What|How|Where|Who|Which|When)\b|Return (what|how|whether|where)\b")
"""A reader of "Where peers meet" must read on to know whether it is a folder, a function or a time."""

FRAGMENT = re.compile(
    r"(as|at|by|for|from|in|it|its|of|on|that|their|they|to|what|whose|which|who|with|where|when|why|how)\b"
)
"""A line "layout: of the task" says nothing to a reader who meets it alone, as in an editor's hint."""

LEAST_WORDS = 3
MOST_UNNAMED = 2
Function = ast.FunctionDef | ast.AsyncFunctionDef


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the line and the docstring of a module, and of its public classes and functions."""
    for node in nodes(path):
        if isinstance(node, ast.Module):
            yield 1, ast.get_docstring(node) or ""
        elif isinstance(node, Function | ast.ClassDef) and not node.name.startswith("_"):
            yield node.lineno, ast.get_docstring(node) or ""


def public_functions(node: ast.Module | ast.ClassDef) -> Iterator[tuple[Function, list[str]]]:
    """Yield the public functions and methods in ``node`` with the names of their public parameters, without self or cls."""
    for part in node.body:
        if isinstance(part, Function | ast.ClassDef) and part.name.startswith("_"):
            continue
        if isinstance(part, ast.ClassDef):
            yield from public_functions(part)
        elif isinstance(part, Function):
            named = [*part.args.posonlyargs, *part.args.args]
            is_static = any(ast.unparse(decorator) == "staticmethod" for decorator in part.decorator_list)
            named = named if isinstance(node, ast.Module) or is_static else named[1:]
            named += [*part.args.kwonlyargs, *(arg for arg in (part.args.vararg, part.args.kwarg) if arg is not None)]
            yield part, [arg.arg for arg in named if not arg.arg.startswith("_")]


def unnamed(function: Function, parameters: list[str]) -> list[str]:
    """Return the parameters that the docstring should describe and does not.

    None is missing where the docstring says where they are described: "see `Base.method`" of the method that it overrides, or
    "arguments as for `other`".
    """
    text = ast.get_docstring(function) or ""
    elsewhere = re.search(rf"\b[Ss]ee `(\w+\.)+{function.name}`|\barguments as for `[\w.]+`", text)
    return (
        []
        if len(parameters) <= MOST_UNNAMED or elsewhere
        else [name for name in parameters if name not in section(text)]
    )


def section(text: str) -> set[str]:
    """Return the names that a docstring's section Args describes."""
    parts = re.split(r"^Args:$", text, maxsplit=1, flags=re.M)
    lines = re.split(r"^\w+:$", parts[1], flags=re.M)[0] if len(parts) > 1 else ""
    return {name for names in re.findall(r"^ {4}(\S[^:]*):", lines, re.M) for name in re.findall(r"\w+", names)}


def fragments(text: str) -> list[str]:
    """Return the lines of a docstring's sections Args and Attributes that are no phrases of their own."""
    lines = [
        line
        for part in re.split(r"^(?:Args|Attributes):$", text, flags=re.M)[1:]
        for line in re.findall(r"^ {4}\S.*(?:\n {8,}\S.*)*", re.split(r"^\w", part, maxsplit=1, flags=re.M)[0], re.M)
    ]
    return [
        line for line in lines if FRAGMENT.match(phrase := line.partition(": ")[2]) or len(phrase.split()) < LEAST_WORDS
    ]


def hooks() -> set[tuple[str, ...]]:
    """Return name and parameters of the methods that a base class of the parts describes, so that overrides need not."""
    return {
        (function.name, *parameters)
        for path in modules("raafl/core", "raafl/parts")
        for function, parameters in public_functions(tree(path))
        if section(ast.get_docstring(function) or "") >= set(parameters)
    }


def lacking(*packages: str) -> list[str]:
    """Return the functions of packages that leave an argument undescribed, and override no hook that describes it."""
    described = hooks()
    return [
        f"{place(path, function.lineno)} {function.name}: {', '.join(names)}"
        for path in modules(*packages)
        for function, parameters in public_functions(tree(path))
        if (function.name, *parameters) not in described and (names := unnamed(function, parameters))
    ]


def test_none_opens_with_a_question_word():
    wrong = [
        f"{place(path, line)} {text.splitlines()[0]}"
        for path in modules(*SOURCES)
        for line, text in docstrings(path)
        if QUESTION.match(text)
    ]
    assert not wrong, "open with a verb (a function, a module) or a noun (a class):\n" + "\n".join(wrong)


def test_every_argument_of_three_or_more_is_described():
    wrong = lacking(*SOURCES)
    assert not wrong, "add a line to the section Args for each:\n" + "\n".join(wrong)


def test_each_line_of_an_argument_or_attribute_stands_alone():
    wrong = [
        f"{place(path, line)} {entry.strip()}"
        for path in modules("raafl", "model_zoo")
        for line, text in docstrings(path)
        for entry in fragments(text)
    ]
    assert not wrong, f"say what it is, by a noun, in {LEAST_WORDS} words or more:\n" + "\n".join(wrong)


def test_the_checker_sees_fragments_with_the_lines_that_go_on():
    args = "    a: of the run.\n    b: number of\n        runs, of all.\n    c, d: two\n        words more.\n"
    assert fragments(f"Do.\n\nArgs:\n{args}\nRaises:\n    E: of no use.\n") == ["    a: of the run."]
    attributes = ["    b: a list.", "    c: its own list of runs."]
    assert fragments("\n".join(["A.", "", "Attributes:", *attributes])) == attributes


def test_the_checker_sees_what_is_described():
    module = ast.parse(
        'def f(a, b, *c, d=1, **_e):\n    """Do.\n\n    Args:\n        a, b: both.\n            More of b: and so on.\n'
        '        d (int): one.\n\n    Raises:\n        c: no argument.\n    """\n'
        'class A:\n    def g(self, a, b):\n        """Do."""\n'
        '    def h(self, a, b, c):\n        """Do; see `B.h`."""\n'
        '    @staticmethod\n    def i(a, b, c):\n        """Do; see `B.h`."""\n'
        "    def _j(self, a, b, c): ...\n"
    )
    found = {function.name: unnamed(function, names) for function, names in public_functions(module)}
    assert found == {"f": ["c"], "g": [], "h": [], "i": ["a", "b", "c"]}


def test_overrides_are_those_of_hooks_that_describe_their_arguments():
    described = hooks()
    assert ("receive", "state", "update", "spec", "staleness") in described
    assert ("receive", "state", "update", "spec") not in described
