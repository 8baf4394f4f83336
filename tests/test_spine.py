"""What runs load: the spine of docs/spine.md and the rooms that they name, and that a run needs no room that it does not name."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.habits.source import ROOT, modules, nodes, tree

PAGE = ROOT / "docs" / "spine.md"
QUICK_START = (
    "command line",
    "data sources",
    "nested batches",
    "checks of a config",
    "goals",
    "device catalogue",
    "axes",
    "frozen base",
    "proof",
    "methods",
    "costs",
    "smaller modules",
    "state of modules",
    "classes",
    "stand-in for the Trainer",
    "own configs",
    "seals",
    "first look",
    "divergence",
    "final model",
    "memory of a process",
)
"""Rooms that `raafl simulate --config quickstart` names."""
ARGV = ["simulate", "--config", "quickstart", "--progress", "quiet"]

ROOMS_OF_RUNS = {
    "--max_updates 2": (),
    "--algorithm fed_avg --guard.combine median": ("masked loss", "robust merges"),
    "--algorithm fed_avg --compress.up int8": ("compression",),
    "--algorithm fed_avg --privacy.clip_norm 1 --privacy.noise_multiplier 1": (
        "masked loss",
        "privacy",
        "robust merges",
    ),
    "--algorithm fed_avg --secure_aggregation.min_cover 3": (
        "devices in files",
        "masked loss",
        "privacy",
        "restored records",
        "robust merges",
        "secure aggregation",
        "sessions",
        "sites",
    ),
    "--keep_best loss": ("best checkpoint", "resuming"),
    "--logger csv": ("loggers", "other commands", "resuming"),
    "--monitor 127.0.0.1:0": ("monitoring",),
    "--batch_clients 4": ("Lightning's hooks", "batches of clients", "masked loss"),
    "--workers 2": ("devices in files", "processes of a simulation", "restored records", "sessions"),
    "--submodels.batch_norm static": ("batch norm",),
}
"""Options of a run, and the rooms that they enter."""


MOST_MODULES, MOST_LINES = 79, 15_950
"""What the spine may have: what a run does not need goes to a room, so that these numbers only fall."""


class Room(NamedTuple):
    """Modules that a run loads when it names them."""

    patterns: tuple[str, ...]
    seams: frozenset[str]  # modules of the spine that import them, or name them in a table


@cache
def spine() -> tuple[str, ...]:
    """The modules of the spine, in the order of the page."""
    return tuple(re.findall(r"^\| `(raafl/[\w/]+\.py)` \|", PAGE.read_text(encoding="utf-8"), re.M))


@cache
def rooms() -> dict[str, Room]:
    """The rooms of the page by name."""
    rows = re.findall(r"^\| ([^`|]+) \| ([^|]+) \| ([^|]+) \| [^|]+ \|$", PAGE.read_text(encoding="utf-8"), re.M)
    quoted = {name: [re.findall(r"`([^`]+)`", cell) for cell in cells] for name, *cells in rows if "`" in cells[0]}
    return {name: Room(tuple(files), frozenset(seams)) for name, (files, seams) in quoted.items()}


def room_of(path: str) -> str | None:
    """The first room that has a module; None for one of the spine."""
    if path in spine():
        return None
    return next((name for name, room in rooms().items() if any(fnmatch(path, one) for one in room.patterns)), "?")


def path_of(name: str) -> str:
    """The file of a dotted name, from the repository's root; empty where there is none."""
    while name.startswith("raafl"):
        for path in (f"{name.replace('.', '/')}.py", f"{name.replace('.', '/')}/__init__.py"):
            if (ROOT / path).is_file():
                return path
        name = name.rpartition(".")[0]
    return ""


def entered(path: Path) -> set[str]:
    """The modules that a module imports anywhere, types aside, or names in a table."""
    import ast

    types = {
        id(node)
        for test in nodes(path)
        if isinstance(test, ast.If) and ast.unparse(test.test) == "TYPE_CHECKING"
        for node in ast.walk(test)
    }
    found = set()
    for node in nodes(path):
        if id(node) in types:
            continue
        if isinstance(node, ast.Import):
            found |= {path_of(alias.name) for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {path_of(f"{node.module}.{alias.name}") for alias in node.names}
        elif (
            isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(r"raafl[\w.:]+", node.value)
        ):
            found.add(path_of(node.value.replace(":", ".")))
    return found - {""}


def at_once(path: Path) -> set[str]:
    """The modules that a module imports when it is imported."""
    import ast

    found = set()
    for node in tree(path).body:
        if isinstance(node, ast.Import):
            found |= {path_of(alias.name) for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {path_of(f"{node.module}.{alias.name}") for alias in node.names}
    return found - {""}


def test_each_module_is_of_the_spine_or_of_a_room():
    every = [str(path.relative_to(ROOT)) for path in modules("raafl")]
    assert [path for path in every if room_of(path) == "?"] == [], "docs/spine.md names no room of these"
    assert [path for path in spine() if path not in every] == []
    unused = [name for name in rooms() if name not in {room_of(path) for path in every}]
    assert unused == []


def test_the_spine_does_not_grow():
    lines = [len((ROOT / path).read_text(encoding="utf-8").splitlines()) for path in spine()]
    assert len(lines) <= MOST_MODULES
    assert sum(lines) <= MOST_LINES


def test_the_spine_imports_no_room_before_it_is_named():
    found = {path: [other for other in sorted(at_once(ROOT / path)) if room_of(other)] for path in spine()}
    assert {path: others for path, others in found.items() if others} == {}


@pytest.mark.parametrize("name", rooms())
def test_a_room_is_entered_by_the_seams_that_the_page_names(name):
    entering = {path for path in spine() if any(room_of(other) == name for other in entered(ROOT / path))}
    assert entering == rooms()[name].seams


LOADED = """
import json, os, sys
from raafl.commands.cli import main

def files():
    named = [m.__file__ for n, m in sys.modules.items() if n.partition(".")[0] == "raafl" and getattr(m, "__file__", None)]
    return sorted(os.path.relpath(file, sys.argv[1]) for file in named)

assert main(json.loads(sys.argv[2])) == 0
print(json.dumps(files()))
"""


def loaded(folder: Path, *options: str, root: Path = ROOT) -> list[str]:
    """Run the quick start in a fresh interpreter; return the modules of raafl that it has loaded."""
    argv = [*ARGV, *options, "--output", str(folder / "run")]
    done = subprocess.run(
        [sys.executable, "-c", LOADED, str(root), json.dumps(argv)],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow("torch and lightning are imported anew")
def test_the_quick_start_loads_the_spine_and_the_rooms_that_it_names(tmp_path):
    found = loaded(tmp_path, "--max_updates", "4")
    assert sorted(set(spine()) - set(found)) == [], "the spine has modules that a run does not load"
    assert {path: room_of(path) for path in found if room_of(path) not in (None, *QUICK_START)} == {}


@pytest.mark.long("test_the_quick_start_loads_the_spine_and_the_rooms_that_it_names")
@pytest.mark.parametrize("options", ROOMS_OF_RUNS)
def test_a_run_loads_the_rooms_that_its_options_name(options, tmp_path):
    found = {room_of(path) for path in loaded(tmp_path, *options.split(), "--max_updates", "4")}
    assert found - {None, *QUICK_START} == set(ROOMS_OF_RUNS[options])


OF_PROCESSES = {
    "compression",
    "configs of others",
    "devices in files",
    "failures",
    "other commands",
    "processes of a client",
    "restored records",
    "sessions",
    "subfederation",
    "tensors in files",
}
"""Rooms of `raafl fit --local`: the server, its clients and the process that starts them. None of them is of sites."""

AT_EXIT = """
import atexit, json, os, sys

def write():
    named = [m.__file__ for n, m in list(sys.modules.items()) if n.partition(".")[0] == "raafl"]
    with open(os.path.join(os.environ["LOADED_IN"], f"{os.getpid()}.json"), "w") as file:
        json.dump([one for one in named if one], file)

atexit.register(write)
"""


@pytest.mark.slow("a server and two clients import torch anew")
@pytest.mark.long("test_the_quick_start_loads_the_spine_and_the_rooms_that_it_names")
def test_processes_of_one_command_load_no_room_of_sites(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(AT_EXIT)
    (tmp_path / "loaded").mkdir()
    argv = ["fit", "--config", "quickstart", "--clients", "2", "--local", "2", "--max_updates", "4"]
    done = subprocess.run(
        [sys.executable, "-m", "raafl", *argv, "--progress", "quiet", "--output", str(tmp_path / "run")],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path}", "LOADED_IN": str(tmp_path / "loaded")},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    each = [json.loads(file.read_text()) for file in (tmp_path / "loaded").glob("*.json")]
    assert len(each) == 4
    found = {room_of(os.path.relpath(file, ROOT)) for files in each for file in files}
    assert found - {None, *QUICK_START} == OF_PROCESSES


WITHOUT = """
import sys, pytest
from raafl.commands.cli import main
assert main(sys.argv[1:]) == 0
tests = ["tests/core/test_coordinator.py", "tests/core/test_admission.py", "tests/core/test_hooks.py"]
sys.exit(pytest.main(["-q", "--noconftest", "-p", "no:cacheprovider", *tests]))
"""


def runs_without(folder: Path, gone: list[str]) -> None:
    """Copy the package without some modules, and run the quick start and tests of the core there."""
    for part in ("raafl", "model_zoo", "configs", "tests"):
        shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    for path in gone:
        (folder / path).unlink()
    argv = [*ARGV, "--max_updates", "4", "--output", str(folder / "run")]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, *argv],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def files_of(name: str) -> list[str]:
    """The modules of a room."""
    return [path for path in (str(one.relative_to(ROOT)) for one in modules("raafl")) if room_of(path) == name]


@pytest.mark.slow("torch and lightning are imported anew")
def test_the_quick_start_needs_no_room_that_it_does_not_name(tmp_path):
    runs_without(tmp_path, [path for name in rooms() if name not in QUICK_START for path in files_of(name)])


@pytest.mark.long("test_the_quick_start_needs_no_room_that_it_does_not_name")
@pytest.mark.parametrize("name", [name for name in rooms() if name not in QUICK_START])
def test_the_quick_start_runs_without(name, tmp_path):
    runs_without(tmp_path, files_of(name))


@pytest.mark.long("test_the_quick_start_needs_no_room_that_it_does_not_name")
def test_the_quick_start_needs_no_method_but_its_own(tmp_path):
    of_cores_tests = ("fed_async", "fed_avg", "fed_buff", "fed_opt")
    kept = {f"raafl/algorithms/{name}.py" for name in ("__init__", "fed_raa", *of_cores_tests)}
    runs_without(
        tmp_path, [path for path in files_of("methods") if path.startswith("raafl/algorithms/") and path not in kept]
    )
