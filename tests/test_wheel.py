"""raafl from a built wheel, away from the repository: commands, shipped configs, the model zoo, completion."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.habits.source import ROOT

pytestmark = pytest.mark.timeout(900)
DEADLINE_S = 300


def run(*argv: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "COLUMNS")} | environment
    done = subprocess.run(argv, cwd=cwd, env=env, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 0, f"{' '.join(argv)}\n{done.stdout}\n{done.stderr}"
    return done


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("wheel")
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--disable-pip-version-check"]
    run(sys.executable, "-m", "pip", "wheel", *options, "--wheel-dir", str(folder), str(ROOT), cwd=folder)
    (found,) = folder.glob("raafl-*.whl")
    return found


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which the wheel is installed; everything else comes from this environment."""
    folder = tmp_path_factory.mktemp("site")
    options = ["--no-deps", "--no-index", "--no-compile", "--quiet", "--disable-pip-version-check"]
    run(sys.executable, "-m", "pip", "install", *options, "--target", str(folder), str(wheel), cwd=folder)
    return folder


def test_the_wheel_holds_the_packages_and_the_configs_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert {"raafl", "model_zoo"} <= tops and all(top.startswith(("raafl", "model_zoo")) for top in tops)
    configs = {Path(name).name for name in names if name.startswith("raafl/configs/")}
    assert configs == {file.name for file in (ROOT / "configs").rglob("*.yaml")}
    assert "raafl/py.typed" in names and not [name for name in names if "__pycache__" in name]
    entries = zipfile.ZipFile(wheel).read(next(name for name in names if name.endswith("entry_points.txt"))).decode()
    assert "raafl = raafl.commands.cli:main" in entries


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="what git tracks is only known in a checkout")
def test_the_source_archive_holds_what_its_tests_and_pages_read(tmp_path):
    """All tracked files but the hosting's: tests read docs/architecture.md, docs name benchmarks/results."""
    pytest.importorskip("build")
    pytest.importorskip("hatchling")
    options = ["--sdist", "--no-isolation", "--outdir", str(tmp_path)]
    run(sys.executable, "-m", "build", *options, str(ROOT), cwd=tmp_path)
    (archive,) = tmp_path.glob("raafl-*.tar.gz")
    with tarfile.open(archive) as file:
        packed = {name.partition("/")[2] for name in file.getnames()}
    tracked = run("git", "ls-files", cwd=ROOT).stdout.splitlines()
    wanted = {name for name in tracked if not name.startswith(".") and name != "CODEOWNERS"}
    assert sorted(wanted - packed) == []


ASKED = """
import contextlib, runpy, sys
import raafl
from raafl.commands.cli import main
print(raafl.__file__)
assert main(["algorithms", "--json"]) == 0
with contextlib.suppress(SystemExit):
    main(["simulate", "--config", "configs/quickstart.yaml", "--print_config"])  # what the README says goes without a checkout
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.long("test_the_wheel_holds_the_packages_and_the_configs_and_nothing_else")
@pytest.mark.slow("a process starts from nothing, and pip twice")
def test_it_works_in_an_empty_folder(site, tmp_path):
    """What is imported, what is shipped, and the command that pip has made: in one process."""
    command = [str(site / "bin" / "raafl"), "simulate", "--config", "quickstart", "--max_updates", "2", "--json"]
    environment = {"PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}
    done = run(sys.executable, "-c", ASKED, *command, "--progress", "quiet", cwd=tmp_path, **environment)
    where, rest = done.stdout.split("\n", 1)
    assert Path(where).is_relative_to(site)
    algorithms, end = json.JSONDecoder().raw_decode(rest)
    assert "fed_raa" in [row["name"] for row in algorithms] and "name: quickstart" in rest[end:]
    assert json.loads(rest.splitlines()[-1])["updates_merged"] == 2
