"""Count which seeded faults of raafl the tests catch: `python -m tests.mutants --seed 0 --num 200 --jobs 1 --out FILE`.

Each mutant changes one place of a copy of the tree. The tests of its module run on it: first those that import the module
or are named like it or like one that imports it, then the others of its folder, then a few whole runs.
FILE has a line for each mutant; a second call goes on after the last.
A mutant is drawn by the text of its function and its change, so that a seed draws the same ones from code that moved.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("core", "parts", "submodel", "local", "runtime")
WHOLE_RUNS = (
    "tests/conformance/test_two_clocks.py",
    "tests/conformance/test_executors.py",
    "tests/test_federation_api.py",
)
INVARIANTS = {"submodel": ["tests/submodel/test_every_model.py"]}
"""Tests of a whole package, after those of a module's folder."""
SWAPPED = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
}  # fmt: skip
"""Operators, and what a mutant has in their place."""


class Mutant(NamedTuple):
    """A change of the text between two offsets of a file."""

    key: str
    file: str
    line: int
    start: int
    end: int
    old: str
    new: str


def changed(node: ast.AST) -> str | None:
    """Return the text of an expression or a statement with one fault, None where it is not changed."""
    match node:
        case ast.Compare(ops=[operator]) if type(operator) in SWAPPED:
            return ast.unparse(ast.Compare(node.left, [SWAPPED[type(operator)]()], node.comparators))
        case ast.BinOp() if type(node.op) in SWAPPED:
            return ast.unparse(ast.BinOp(node.left, SWAPPED[type(node.op)](), node.right))
        case ast.BoolOp():
            return ast.unparse(ast.BoolOp(SWAPPED[type(node.op)](), node.values))
        case ast.UnaryOp(op=ast.Not()):
            return ast.unparse(node.operand)
        case ast.Constant(value=bool()):
            return str(not node.value)
        case ast.Constant(value=int() | float()):
            return repr(node.value + 1)
        case ast.Return(value=ast.expr()) if not isinstance(node.value, ast.Constant):
            return "return None"
        case ast.Expr(value=ast.Call()) | ast.AugAssign() | ast.Raise():
            return "pass"
        case ast.Continue() | ast.Break():
            return "break" if isinstance(node, ast.Continue) else "continue"
        case ast.IfExp():
            return ast.unparse(ast.IfExp(node.test, node.orelse, node.body))
    return None


def within(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a function that a mutant may change: no annotation, no message, no part of an f-string."""
    if isinstance(node, (ast.JoinedStr, ast.Assert)):
        return
    yield node
    if isinstance(node, ast.Raise):
        return
    for field, value in ast.iter_fields(node):
        if field not in ("annotation", "returns", "decorator_list", "op", "ops"):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from within(child)


def mutants_of(path: Path) -> Iterator[Mutant]:
    """Yield each mutant of a file."""
    text, file = path.read_text(), path.relative_to(ROOT).as_posix()
    lines = text.encode().splitlines(keepends=True)
    offsets = [0]
    for line in lines:
        offsets.append(offsets[-1] + len(line))
    raw, seen = text.encode(), set()
    tree = ast.parse(text)
    functions = [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    for function in functions:
        for node in within(function):
            if not hasattr(node, "lineno") or (new := changed(node)) is None:
                continue
            start, end = offsets[node.lineno - 1] + node.col_offset, offsets[node.end_lineno - 1] + node.end_col_offset
            if (start, end) in seen:
                continue
            seen.add((start, end))
            old = raw[start:end].decode()
            new = f"({new})" if isinstance(node, ast.expr) else new
            key = f"{function.name}|{ast.unparse(node)}|{new}|{start - offsets[function.lineno - 1]}"
            yield Mutant(hashlib.sha256(key.encode()).hexdigest()[:12], file, node.lineno, start, end, old, new)


def drawn(seed: int) -> list[Mutant]:
    """Return all mutants in the order that a seed draws them in."""
    files = [path for package in PACKAGES for path in sorted((ROOT / "raafl" / package).rglob("*.py"))]
    found = {mutant.key: mutant for path in files for mutant in mutants_of(path)}
    return sorted(found.values(), key=lambda mutant: hashlib.sha256(f"{seed} {mutant.key}".encode()).hexdigest())


def named_like(path: Path) -> list[Path]:
    """Return the files of tests that are named like a module, in the folder of its tests."""
    folder = ROOT / "tests" / path.parent.relative_to(ROOT / "raafl")
    stem = path.parent.name if path.stem == "__init__" else path.stem
    return [test for where in (folder, folder.parent) for test in where.glob(f"test_{stem.strip('_')}.py")]


def stages(file: str) -> list[list[str]]:
    """Return the files of tests for a module, in the order of their runs."""
    module = Path(file)
    folder = ROOT / "tests" / module.parent.relative_to("raafl")
    while not list(folder.rglob("test_*.py")):
        folder = folder.parent
    dotted = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    near = [path for path in folder.rglob("test_*.py") if "gpu" not in path.name]
    users = [path for path in ROOT.glob("raafl/**/*.py") if f"from {dotted} import" in path.read_text()]
    named = [test for path in (ROOT / module, *users) for test in named_like(path)]
    importing = [path for path in near if f"from {dotted} import" in path.read_text()]
    first = list(dict.fromkeys(named[:1] + importing + named))
    rest = sorted(set(near) - set(first))
    return [
        [str(path.relative_to(ROOT)) for path in first],
        [str(path.relative_to(ROOT)) for path in rest],
        [*INVARIANTS.get(module.parts[1], []), *WHOLE_RUNS],
    ]


class Catcher:
    """Remembers the first test that failed."""

    def __init__(self, note: Path) -> None:
        self.note = note

    def pytest_runtest_logreport(self, report) -> None:
        if report.failed and not self.note.exists():
            self.note.write_text(report.nodeid)

    def pytest_collectreport(self, report) -> None:
        self.pytest_runtest_logreport(report)


def run_tests(tree: Path, files: list[str], note: Path, limit_s: float) -> int | None:
    """Run files of tests in a fork of this process, within a tree; return pytest's exit code, None where time ran out."""
    pid = os.fork()
    if not pid:
        os.setsid()
        os.chdir(tree)
        os.environ["PYTHONPATH"] = str(tree)
        sys.path[:] = [str(tree), *(entry for entry in sys.path if entry and Path(entry).resolve() != ROOT)]
        for name in [name for name in sys.modules if name.partition(".")[0] in ("raafl", "tests", "model_zoo")]:
            del sys.modules[name]
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, 1)
        os.dup2(nothing, 2)
        import pytest

        options = ["-x", "-q", "--timeout=30", "-p", "no:cacheprovider", "--tb=no"]
        os._exit(int(pytest.main([*options, *files], plugins=[Catcher(note)])))
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.1)
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


def judged(mutant: Mutant, tree: Path, limit_s: float) -> dict[str, object]:
    """Return what the tests say of a mutant: "caught", "survived", or "limit" where all that ran in the time passed."""
    path, note, began = tree / mutant.file, tree / "caught_by", time.monotonic()
    whole = path.read_bytes()
    note.unlink(missing_ok=True)
    verdict = "survived"
    path.write_bytes(whole[: mutant.start] + mutant.new.encode() + whole[mutant.end :])
    try:
        for files in filter(None, stages(mutant.file)):
            code = run_tests(tree, files, note, limit_s - (time.monotonic() - began))
            verdict = "caught" if note.exists() or code not in (None, 0, 5) else "limit" if code is None else "survived"
            if verdict != "survived":
                break
    finally:
        path.write_bytes(whole)
    test = note.read_text() if note.exists() else None
    return {**mutant._asdict(), "verdict": verdict, "test": test, "seconds": round(time.monotonic() - began, 1)}


def copied(folder: Path) -> Path:
    """Copy what git tracks to a folder."""
    for name in subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True).split("\0"):
        if name and (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    if (ROOT / ".venv").exists():
        (folder / ".venv").symlink_to((ROOT / ".venv").resolve())
    return folder


def main(argv: list[str] | None = None) -> int:
    """Run from the command line; 0 = all mutants were tried."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants")
    parser.add_argument("--seed", type=int, default=0, help="which mutants to draw")
    parser.add_argument("--num", type=int, default=200, help="how many")
    parser.add_argument("--jobs", type=int, default=1, help="how many at a time, each in a copy of the tree")
    parser.add_argument("--limit_s", type=float, default=60, help="seconds for a mutant")
    parser.add_argument("--only", default="raafl/", help="files that begin so")
    parser.add_argument(
        "--keys", type=Path, help="a FILE of an earlier call: try its mutants, where the code still has them"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "mutants.jsonl", help="the file of verdicts")
    options = parser.parse_args(argv)

    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline"}
    import hypothesis  # noqa: F401  imported here for all forks
    import torch.distributed  # noqa: F401

    from raafl.lean_import import import_lightning

    import_lightning()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    rows = [json.loads(line) for line in options.out.read_text().splitlines()] if options.out.exists() else []
    chosen = [mutant for mutant in drawn(options.seed) if mutant.file.startswith(options.only)]
    if options.keys:
        keys = {json.loads(line)["key"] for line in options.keys.read_text().splitlines()}
        chosen = [mutant for mutant in chosen if mutant.key in keys]
    done = {row["key"] for row in rows}
    left = [mutant for mutant in chosen[: options.num] if mutant.key not in done]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.jobs) as pool:
        trees = [copied(Path(folder) / str(number)) for number in range(options.jobs)]

        def try_one(mutant: Mutant) -> None:
            tree = trees.pop()
            row = judged(mutant, tree, options.limit_s)
            trees.append(tree)
            rows.append(row)
            with options.out.open("a") as out:
                out.write(json.dumps(row) + "\n")
            print(
                f"[raafl] {row['verdict']:8} {row['seconds']:5.1f} s {mutant.file}:{mutant.line} {mutant.new[:60]!r}",
                flush=True,
            )

        list(pool.map(try_one, left))
    counts = {verdict: sum(row["verdict"] == verdict for row in rows) for verdict in ("caught", "survived", "limit")}
    print(f"[raafl] of {len(rows)} mutants {counts}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
