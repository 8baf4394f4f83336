"""Check that what the README names exists: files, targets, benchmarks, commands, pictures."""

from __future__ import annotations

import re

from tests.habits.source import ROOT

README = (ROOT / "README.md").read_text()


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
    assert README.count("\n") <= 150
    pictures = re.findall(r'<img src="([^"]+)" width="\d+" alt="[^"]+">', README)
    assert len(pictures) >= 3 and not [path for path in pictures if not (ROOT / path).exists()]


def test_every_command_is_one():
    from raafl.commands.cli import USAGE

    for name in set(re.findall(r"\braafl (\w+) (?:--|RUN|\w)", "\n".join(re.findall(r"`+([^`]+)`+", README)))):
        assert re.search(rf"^  {name} ", USAGE, re.M), name
