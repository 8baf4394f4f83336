"""CONTRIBUTING lists every private name of another library that the package uses, and none that it does not use."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator

from tests.habits.source import ROOT, modules, nodes

HEADING = "## Private interfaces of other libraries"
PRIVATE = re.compile(r"_[a-zA-Z]\w*")
DOCUMENTED = {"_replace", "_exit"}  # Python documents these, underscore and all


def defined(parsed: Iterable[ast.AST]) -> Iterator[str]:
    """Yield the private names that a file gives to something of its own."""
    for node in parsed:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_named(node.value, "self"):
            yield node.attr


def is_named(node: ast.expr, name: str) -> bool:
    """Whether an expression is that plain name."""
    return isinstance(node, ast.Name) and node.id == name


def used(parsed: Iterable[ast.AST]) -> Iterator[str]:
    """Yield the private names that a file reads from elsewhere; operators of aten are named in `native_functions.yaml`."""
    for node in parsed:
        if isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("raafl"):
            yield from filter(PRIVATE.fullmatch, [*(node.module or "").split("."), *(one.name for one in node.names)])
        elif isinstance(node, ast.Import):
            yield from (part for one in node.names for part in one.name.split(".") if PRIVATE.fullmatch(part))
        elif isinstance(node, ast.Attribute) and PRIVATE.fullmatch(node.attr):
            if ast.unparse(node.value) not in ("torch.ops.aten", "_aten", "aten", "self", "cls"):
                yield node.attr
        elif (
            isinstance(node, ast.Call)
            and is_named(node.func, "import_module")
            and isinstance(node.args[0], ast.Constant)
        ):
            yield from filter(PRIVATE.fullmatch, str(node.args[0].value).split("."))
        elif isinstance(node, ast.Call) and is_named(node.func, "getattr") and len(node.args) > 1:
            of, name = ast.unparse(node.args[0]), node.args[1]
            if (
                isinstance(name, ast.Constant)
                and PRIVATE.fullmatch(str(name.value))
                and of not in ("torch.ops.aten", "self")
            ):
                yield name.value


def listed() -> set[str]:
    """Read the private names from the first column of the table in CONTRIBUTING.md."""
    section = (ROOT / "CONTRIBUTING.md").read_text().split(HEADING)[1].split("\n## ")[0]
    cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    return {
        part
        for cell in cells
        for name in re.findall(r"`([^`]+)`", cell)
        for part in name.split(".")
        if part.startswith("_")
    }


def test_the_table_has_every_private_name_and_no_other():
    trees = [nodes(path) for path in modules("raafl", "model_zoo")]
    own = {name for parsed in trees for name in defined(parsed)} | DOCUMENTED
    read = {name for parsed in trees for name in used(parsed)}
    assert sorted(read - own - listed()) == []
    assert sorted(listed() - read) == []


def test_a_use_is_seen_in_each_of_its_forms():
    lines = [
        "from torch._C import _x",
        "import a._b as b",
        "torch._c.d",
        "getattr(logger, '_e', 0)",
        "import_module('a._f')",
        "self._own",
        "_aten._softmax",
    ]
    assert set(used(ast.walk(ast.parse("\n".join(lines))))) == {"_C", "_x", "_b", "_c", "_e", "_f"}
