"""Imports go one way, package by package and file by file."""

from __future__ import annotations

import ast
from functools import cache

import pytest

from tests.habits.source import ROOT, imports, modules, nodes, place, within

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
ORDER = (
    (
        "_version",
        "atomic_file",
        "errors",
        "exact_key",
        "lean_import",
        "log",
        "module_hooks",
        "object_store",
        "rng",
        "plain_yaml",
        "rules",
        "sanitize",
        "trainer_stand_in",
        "units",
    ),
    *(
        (name,)
        for name in (
            "data",
            "submodel",
            "devices",
            "transport",
            "core",
            "parts",
            "compression",
            "algorithm",
            "algorithms",
            "local",
        )
    ),
    *(
        (name,)
        for name in (
            "config",
            "runfolder",
            "loggers",
            "monitoring",
            "watch",
            "runtime",
            "sites",
            "lab",
            "commands",
            "api",
        )
    ),
)
"""A package imports from its own line and those above it; the package itself, `raafl`, imports nothing by itself."""

FORBIDDEN = {
    "raafl/algorithms": CLOCKS_AND_WIRES,
    "raafl/parts": CLOCKS_AND_WIRES,
    "raafl/core": CLOCKS_AND_WIRES,
    "raafl/core/coordinator.py": (*CLOCKS_AND_WIRES, *INPUT_AND_OUTPUT),
    "raafl/submodel": ("raafl.data",),
    **{
        f"raafl/devices/{name}.py": ("raafl.submodel", "raafl.data")
        for name in ("catalog", "checks", "files", "profiles")
    },
    "model_zoo": ("raafl",),
}


@cache
def arrows() -> dict[str, set[str]]:
    """Each module of the package and those that it imports, inside functions and for types, too."""
    files = {dotted(path): path for path in modules("raafl")}
    return {
        name: {found for _, used in imports(path) for found in [nearest(used, files)] if found and found != name}
        for name, path in files.items()
        if name not in ("raafl", "raafl.__main__")
    }


def dotted(path):
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def nearest(used, files):
    """The module that a dotted name is, or is a name in."""
    while used and used not in files:
        used = used.rpartition(".")[0]
    return used if used != "raafl" else ""


def line_of(module):
    package = module.split(".")[1]
    (found,) = [number for number, line in enumerate(ORDER) if package in line] or pytest.fail(
        f"{package} is not in ORDER"
    )
    return found


def test_packages_import_in_one_order():
    assert not [
        f"{name} imports {other}" for name, used in arrows().items() for other in used if line_of(other) > line_of(name)
    ]


def test_files_do_not_import_in_a_circle():
    known = arrows()
    reach = {name: set(used) for name, used in known.items()}
    for through in known:
        for used in reach.values():
            if through in used:
                used |= reach[through]
    assert not [name for name in known if name in reach[name]]


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
    for node in nodes(path):
        name = ast.unparse(node) if isinstance(node, ast.Name | ast.Attribute) else ""
        if name in ("open", "print", "input") or (name.startswith("random.") and name != "random.Random"):
            wrong.append(f"{place(path, node.lineno)} uses {name}")
    assert not wrong, "\n".join(wrong)


def test_methods_import_from_the_facade_what_it_has():
    import raafl.algorithm

    facade = set(raafl.algorithm.__all__)
    wrong = [
        f"{place(path, line)} imports {name}: import it from raafl.algorithm"
        for path in modules("raafl/algorithms")
        for line, name in imports(path)
        if name.rpartition(".")[2] in facade and not within(name, ("raafl.algorithm", "raafl.algorithms"))
    ]
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
        for node in nodes(path):
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
