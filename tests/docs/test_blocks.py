"""Every code block of README.md and docs/*.md does what it says: Python runs, commands run or parse, YAML is a config."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from raafl.commands.cli import main
from tests.docs.blocks import PAGES, Block, blocks
from tests.docs.commands import check
from tests.docs.configs import check_yaml
from tests.habits.source import ROOT

HEAVY = ("fine-tuning.md", "lora.md")  # language models by transformers: half a minute each
SECRET = "0123456789abcdef0123456789abcdef"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small run that has ended."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    options = ["--max_updates", "6", "--checkpoint_every", "2", "--progress", "quiet", "--output", str(folder)]
    assert main(["simulate", "--config", str(ROOT / "configs" / "quickstart.yaml"), *options]) == 0
    return folder


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A reader's folder: the checkout's configs, nothing else; what is imported from it is forgotten again."""
    modules, paths = set(sys.modules), list(sys.path)
    for name in ("configs", "launch"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "C").symlink_to(ROOT / "configs" / "quickstart.yaml")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAAFL_DATA", str(tmp_path / "no-data"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    sys.path.insert(0, str(tmp_path))
    yield tmp_path
    sys.path[:] = paths
    for name in set(sys.modules) - modules:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def put_runs(page: Path, here: Path, finished: Path) -> None:
    """Make each run folder that a page names, and the checkpoints that it names in one."""
    text = page.read_text(encoding="utf-8")
    made = set(re.findall(r"--output[ =](runs/[\w-]+)", text))  # by the page's own commands
    for name in {"RUN", *re.findall(r"\bruns/[\w*-]*\w[\w*-]*", text)} - made:
        folder = here / name.replace("*", "0")
        if not folder.exists():
            shutil.copytree(finished, folder)
    last = sorted((finished / "checkpoints").glob("*.ckpt"))[-1]
    for name in set(re.findall(r"\bruns/[\w-]+/checkpoints/[\w-]+\.ckpt", text)):
        shutil.copy(last, here / name)


def run_python(block: Block, names: dict[str, object], here: Path) -> None:
    """Run a block in a page's namespace; a block that is a file is written, and imported."""
    if block.file:
        (here / block.file).write_text(block.text, encoding="utf-8")
        names |= vars(importlib.import_module(Path(block.file).stem))
        return
    file = here / f"block_{block.line}.py"
    file.write_text(block.text, encoding="utf-8")
    names |= {"__name__": file.stem, "__file__": str(file)}
    exec(compile(block.text, str(file), "exec"), names)


@pytest.mark.slow("what the docs show is run")
@pytest.mark.parametrize(
    ("page", "runs"),
    [
        *((page, page.name not in HEAVY) for page in PAGES),
        *(pytest.param(page, True, marks=pytest.mark.long) for page in PAGES if page.name in HEAVY),
    ],
    ids=lambda value: str(value.relative_to(ROOT)) if isinstance(value, Path) else "run" if value else "parsed",
)
def test_every_block_does_what_it_says(page, runs, here, finished, capsys):
    put_runs(page, here, finished)
    names: dict[str, object] = {}
    for block in blocks(page):
        try:
            if block.file and block.language != "python":
                Path(block.file).write_text(block.text, encoding="utf-8")
            if block.language == "python" and (block.reason or not runs):
                compile(block.text, str(block), "exec")
            elif block.language == "python":
                run_python(block, names, here)
            elif block.language == "yaml" and not block.reason:
                check_yaml(block)
            for words in block.commands:
                check(words, runs=runs and block.reason is None)
        except (Exception, SystemExit) as error:
            raise AssertionError(f"{block}: {type(error).__name__}: {error}\n{capsys.readouterr().err}") from error
    assert os.getcwd() == str(here)


def test_the_pages_have_blocks_of_every_kind():
    found = [block for page in PAGES for block in blocks(page)]
    assert {"python", "yaml", "bash"} <= {block.language for block in found}
    assert sum(len(block.commands) for block in found) > 20
    assert all(len(block.reason) > 8 for block in found if block.reason), "a marker without a reason"


def test_every_block_names_its_language():
    """By it a block is run, parsed or left alone."""
    assert [str(block) for page in PAGES for block in blocks(page) if not block.language] == []


def test_every_block_is_closed():
    assert [page.name for page in PAGES if len(re.findall(r"^ *```", page.read_text(encoding="utf-8"), re.M)) % 2] == []


def test_a_block_is_found_wherever_it_stands(tmp_path, monkeypatch):
    page = tmp_path / "page.md"
    page.write_text(
        "# A\n\nText.\n\n    raafl certs list   # of three\n\n- item\n\n    goes on\n\n`a.yaml`:\n\n```yaml\nclients: 2\n```\n"
        "<!-- not run: needs two hosts -->\n```bash\nraafl serve [--min_clients 2] > log\nraafl: said\nA=1 make \\\n  x\n```\n"
    )
    monkeypatch.setattr("tests.docs.blocks.ROOT", tmp_path)
    made, file, both = blocks(page)
    assert (made.line, made.commands) == (5, [["raafl", "certs", "list"]])
    assert (file.language, file.file, file.text) == ("yaml", "a.yaml", "clients: 2\n")
    assert (both.reason, both.commands) == ("needs two hosts", [["raafl", "serve", ">", "log"], ["A=1", "make", "x"]])
