"""Docstrings say what a thing does: they open with a verb or a noun, never with a question word."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.habits.source import modules, place

QUESTION = re.compile(r"(What|How|Where|Who|Which|When)\b|Return (what|how|whether|where)\b")
"""A reader of "Where peers meet" must read on to know whether it is a folder, a function or a time."""


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the line and the docstring of a module, and of its public classes and functions."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Module):
            yield 1, ast.get_docstring(node) or ""
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            yield node.lineno, ast.get_docstring(node) or ""


def test_none_opens_with_a_question_word():
    wrong = [
        f"{place(path, line)} {text.splitlines()[0]}"
        for path in modules("raafl")
        for line, text in docstrings(path)
        if QUESTION.match(text)
    ]
    assert not wrong, "open with a verb (a function, a module) or a noun (a class):\n" + "\n".join(wrong)
