"""Imports go one way: runtime, then core, then parts and submodel."""

from __future__ import annotations

import ast

import pytest

from tests.habits.source import imports, modules, place, within

CLOCKS_AND_WIRES = (
    "torch.distributed",
    "time",
    "socket",
    "threading",
    "asyncio",
    "multiprocessing",
    "subprocess",
    "sched",
)
INPUT_AND_OUTPUT = ("os", "io", "pathlib", "shutil", "tempfile", "logging", "datetime")
UPPER = ("raafl.runtime", "raafl.cli", "raafl.experiment", "raafl.report", "raafl.progress")

DEVICES = ("raafl.core", "raafl.parts", "raafl.algorithms", "raafl.data", "raafl.submodel")
FORBIDDEN = {
    "raafl/algorithms": (*CLOCKS_AND_WIRES, *UPPER),
    "raafl/parts": (*CLOCKS_AND_WIRES, *UPPER, "raafl.algorithms"),
    "raafl/core": (*CLOCKS_AND_WIRES, *UPPER, "raafl.algorithms"),
    "raafl/core/coordinator.py": (*CLOCKS_AND_WIRES, *INPUT_AND_OUTPUT, *UPPER),
    "raafl/submodel": (*UPPER, "raafl.core", "raafl.parts", "raafl.algorithms", "raafl.data"),
    **{f"raafl/devices/{name}.py": (*UPPER, *DEVICES) for name in ("checks", "drawn", "files", "profiles", "shipped")},
    "model_zoo": ("raafl",),
}


@pytest.mark.parametrize("package", FORBIDDEN)
def test_a_package_imports_nothing_from_above_it(package):
    wrong = [
        f"{place(path, line)} uses {name}"
        for path in modules(package)
        for line, name in imports(path)
        if within(name, FORBIDDEN[package])
    ]
    assert not wrong, "\n".join(wrong)


def test_the_coordinator_does_no_input_or_output_and_draws_from_no_shared_generator():
    (path,) = modules("raafl/core/coordinator.py")
    wrong = []
    for node in ast.walk(ast.parse(path.read_text())):
        name = ast.unparse(node) if isinstance(node, ast.Name | ast.Attribute) else ""
        if name in ("open", "print", "input") or (name.startswith("random.") and name != "random.Random"):
            wrong.append(f"{place(path, node.lineno)} uses {name}")
    assert not wrong, "\n".join(wrong)


def test_nothing_is_pickled():
    wrong = [
        f"{place(path, line)} imports {name}"
        for path in modules("raafl")
        for line, name in imports(path)
        if within(name, ("pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal", "joblib"))
    ]
    assert not wrong, "\n".join(wrong)


def test_torch_load_takes_weights_only():
    wrong = []
    for path in modules("raafl"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
                safe = any(k.arg == "weights_only" and ast.unparse(k.value) == "True" for k in node.keywords)
                wrong += [] if safe else [place(path, node.lineno)]
    assert not wrong, f"torch.load without weights_only=True: {wrong}"


def test_the_checker_sees_every_way_to_import(tmp_path, monkeypatch):
    from tests.habits import source

    monkeypatch.setattr(source, "ROOT", tmp_path)
    file = tmp_path / "pkg" / "sub" / "module.py"
    file.parent.mkdir(parents=True)
    file.write_text(
        "import time as clock\nfrom torch import distributed\nfrom ..runtime import journal\nfrom . import sibling\n"
        "def f():\n    import socket, os.path\n    return torch.distributed.send\n"
    )
    assert sorted(source.imports(file)) == [
        (1, "time"),
        (2, "torch.distributed"),
        (3, "pkg.runtime.journal"),
        (4, "pkg.sub.sibling"),
        (6, "os.path"),
        (6, "socket"),
        (7, "torch.distributed"),
    ]
