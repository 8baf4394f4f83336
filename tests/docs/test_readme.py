"""Run the README's example, and check the message that it quotes."""

from __future__ import annotations

import json
import re

import pytest

from raafl.commands.cli import main
from tests.habits.source import ROOT

README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.M | re.S)


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
