"""The worked example of docs/add-an-algorithm.md: short, and it trains, refuses what is late, and replays."""

from __future__ import annotations

import csv
import json
import sys

import pytest

from raafl.commands.cli import main
from tests.docs.blocks import blocks
from tests.habits.source import ROOT

FILES = {block.file: block.text for block in blocks(ROOT / "docs" / "add-an-algorithm.md") if block.file}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("deadline", None)


def test_the_example_is_short():
    assert len(FILES["deadline.py"].splitlines()) < 65


@pytest.mark.slow("what the docs show is run")
def test_the_example_trains_refuses_and_replays(folder, capsys):
    assert main(["simulate", "--config", "deadline.yaml", "--json", "--progress", "quiet", "--output", "run"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["updates_merged"] == 80 and summary["final"]["accuracy"] > 0.7
    with open("run/clients.csv", newline="") as file:
        tasks = [row for row in csv.DictReader(file) if row["outcome"] != "unused"]
    # 2e8 FLOP/s finish the whole model within 0.2 s, 3e7 a quarter of its width (50 of 200 units: 0.19 s).
    assert {(row["client"] == "1", row["spec"]) for row in tasks} == {(True, "full"), (False, tasks_spec(tasks))}
    assert "50" in tasks_spec(tasks)
    merged = [int(row["staleness"]) for row in tasks if row["outcome"] == "merged"]
    assert max(merged) <= 8
    assert {row["outcome"] for row in tasks} <= {"merged", "refused:too-late"}
    assert main(["replay", "run", "--trust_config"]) == 0


def test_a_deadline_that_nobody_meets_is_one_line_for_each_client(folder, capsys):
    assert main(["simulate", "--config", "deadline.yaml", "--algorithm.deadline_s", "0.001"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 4 and all("no submodel within deadline_s 0.001: raise it" in line for line in lines)


def tasks_spec(tasks: list[dict[str, str]]) -> str:
    """The one submodel that slow clients train."""
    (spec,) = {row["spec"] for row in tasks if row["client"] != "1"}
    return spec
