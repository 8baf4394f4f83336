"""The README does not describe last year's program: what it names exists, and its example runs."""

from __future__ import annotations

import json
import re

import pytest

from raafl.commands.cli import main
from tests.habits.source import ROOT

README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.M | re.S)


def test_every_path_exists():
    paths = set(re.findall(r"(?:configs|docs|launch)/[\w./-]+\w", README))
    assert paths
    assert not [path for path in paths if not (ROOT / path).exists()]


def test_every_make_target_exists():
    targets = set(re.findall(r"^make (\w+)", README, re.M)) | set(re.findall(r"`make (\w+)`", README))
    assert {"demo", "test"} <= targets
    makefile = (ROOT / "Makefile").read_text()
    assert not [target for target in targets if not re.search(rf"^{target}:", makefile, re.M)]


def test_every_benchmark_exists():
    for name in re.findall(r"python -m benchmarks\.(\w+)", README):
        assert (ROOT / "benchmarks" / f"{name}.py").exists()


def test_it_is_short_and_shows_its_pictures():
    assert README.count("\n") <= 190
    pictures = re.findall(r'<img src="([^"]+)" width="\d+" alt="[^"]+">', README)
    assert len(pictures) >= 3 and not [path for path in pictures if not (ROOT / path).exists()]


def test_every_command_is_one():
    from raafl.commands.cli import USAGE

    for name in set(re.findall(r"\braafl (\w+) (?:--|RUN|\w)", "\n".join(re.findall(r"`+([^`]+)`+", README)))):
        assert re.search(rf"^  {name} ", USAGE, re.M), name


def test_the_example_runs(tmp_path, monkeypatch, capsys):
    (code,) = (block for block in blocks("python") if "class Net" in block)
    (config,) = blocks("yaml")
    (tmp_path / "my_model.py").write_text(code)
    (tmp_path / "mine.yaml").write_text(config)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert main(["simulate", "--config", "mine.yaml", "--json", "--progress", "quiet"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["updates_merged"] == 200
    assert len(summary["participation"]) == 8
    assert summary["final"]["accuracy"] > 0.8


@pytest.mark.parametrize("option", ["model.hiden=[200]"])
def test_the_quoted_complaint_is_what_is_said(option, capsys):
    assert main(["simulate", "--config", str(ROOT / "configs" / "quickstart.yaml"), f"--{option}"]) == 2
    assert capsys.readouterr().err.strip() in README
