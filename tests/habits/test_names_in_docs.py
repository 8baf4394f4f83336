"""What pages name exists: files, and the names in the walk of an update; the glossary has each term once."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tests.habits.source import ROOT, modules, nodes

WALK = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").split("## The way of an update")[1]
PAGES = [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "CONTRIBUTING.md", ROOT / "benchmarks" / "README.md"]
ROWS = re.findall(r"^\| (\d+) \| `(\S+)` \| (.*) \|$", WALK, re.M)


@cache
def definitions(path: Path) -> set[str]:
    """Return the classes, functions and methods of a file, a method as `Class.method`."""
    found = set()
    for node in nodes(path):
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{part.name}" for part in node.body if isinstance(part, ast.FunctionDef)}
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            found.add(node.name)
    return found


def defined(name: str, *files: str) -> bool:
    """Return whether a class, a function or `Class.method` is defined in one of the files, given below raafl/; none = anywhere."""
    return any(name in definitions(path) for path in ([ROOT / "raafl" / file for file in files] or modules("raafl")))


def test_the_walk_is_short_and_in_order():
    assert [int(step) for step, _, _ in ROWS] == list(range(1, len(ROWS) + 1))
    assert 10 < len({file for _, file, _ in ROWS}) <= 16


@pytest.mark.parametrize(("step", "file", "text"), ROWS, ids=[file for _, file, _ in ROWS])
def test_the_names_of_a_step_exist(step, file, text):
    names = [name for name in re.findall(r"`([\w.]+)`", text) if not name.endswith((".py", ".csv"))]
    missing = [name for name in names if not (defined(name) if "." in name else defined(name, *files_of(step)))]
    assert (ROOT / "raafl" / file).is_file() and not missing


def files_of(step: str) -> list[str]:
    """Return the files in which the single names of a step may be: its own, those of the parts and of the core."""
    own = next(file for number, file, _ in ROWS if number == step)
    records = [str(path.relative_to(ROOT / "raafl")) for path in modules("raafl/core")]
    return [own, *records]


def test_a_name_that_is_gone_is_found():
    assert defined("Coordinator.handle") and defined("Coordinator", "core/coordinator.py")
    assert not defined("Coordinator.process") and not defined("Coordinator", "core/state.py")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_path_on_a_page_exists(page):
    text = page.read_text(encoding="utf-8")
    paths = re.findall(r"`((?:raafl|model_zoo|tests|docs|configs|launch|benchmarks)/[\w./-]+)`", text)
    assert not [path for path in paths if "NAME" not in path and not (ROOT / path).exists()]


def test_every_page_that_code_configs_and_scripts_name_exists():
    folders = ("raafl", "model_zoo", "benchmarks", "configs", "launch", "tests")
    files = [file for name in folders for file in (ROOT / name).rglob("*") if file.suffix in (".py", ".yaml", ".sh")]
    files += [*ROOT.glob("*.md"), *ROOT.glob("*.cff"), ROOT / "pyproject.toml"]
    named = {page for file in files for page in re.findall(r"\bdocs/[\w/-]+\.md\b", file.read_text(encoding="utf-8"))}
    assert len(named) > 20 and not [page for page in named if not (ROOT / page).exists()]


def test_the_glossary_has_each_term_once_in_order():
    text = (ROOT / "docs" / "concepts.md").read_text(encoding="utf-8").partition("## Glossary")[2]
    terms = re.findall(r"^\| ([^|]+?) \| [^|]+ \|[^|]*\|$", text, re.M)[2:]
    assert len(terms) > 60 and terms == sorted(set(terms), key=str.lower)
