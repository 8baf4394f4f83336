"""The source tree as the habit tests read it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def modules(*packages: str) -> list[Path]:
    """The Python files of packages or single modules, given as paths from the repository's root; never none."""
    found = []
    for package in packages:
        path = ROOT / package
        files = [path] if path.is_file() else sorted(path.rglob("*.py"))
        assert files, f"{package} holds no Python file; the test looks in the wrong place"
        found += files
    return found


@cache
def tree(path: Path) -> ast.Module:
    """Parse a file, once for all tests."""
    return ast.parse(path.read_text())


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """Return all nodes of a file, walked once for all tests: the walks were most of the time of the habits."""
    return tuple(ast.walk(tree(path)))


@cache
def imports(path: Path) -> tuple[tuple[int, str], ...]:
    """Return (line, dotted name) for each name a module imports anywhere and each attribute `distributed` it uses."""
    return tuple(_imports(path))


def _imports(path: Path) -> Iterator[tuple[int, str]]:
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            start = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{start}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Attribute) and node.attr == "distributed":
            yield node.lineno, ast.unparse(node)


def place(path: Path, line: int) -> str:
    return f"{path.relative_to(ROOT)}:{line}"


def within(name: str, prefixes: tuple[str, ...]) -> bool:
    """Whether a dotted name is one of `prefixes` or lies below one."""
    return any(name == prefix or name.startswith(f"{prefix}.") for prefix in prefixes)
