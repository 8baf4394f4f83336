"""Run folders of 0.1.0 are read, audited, replayed and resumed by later versions."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from raafl.commands.cli import main
from raafl.config.parse import parse
from raafl.runtime.replay import replay
from tests.helpers.joining_clients import remote

pytestmark = pytest.mark.timeout(120)
FOLDERS = Path(__file__).parent / "of_0_1_0"


@pytest.fixture
def earlier(tmp_path, monkeypatch):
    """Copies of the folders, in a state folder that has never seen their configs."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return Path(shutil.copytree(FOLDERS, tmp_path / "earlier"))


def same_bits(folder):
    """Check that a replay gives the recorded model; on another machine or torch the bits may part, and it says on which."""
    told = replay(folder)
    other = [line for line in told["differences"] if not line.startswith("raafl ")]
    assert told["equal"] is True or other, told
    return told


@pytest.mark.parametrize("name", ["simulated", "served"])
def test_a_folder_is_read_audited_and_replayed(earlier, capsys, name):
    folder = earlier / name
    assert main(["watch", str(folder), "--once", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["finished"] == "interrupted"
    assert main(["audit", str(folder), "--json", "--books_only"]) == 0
    assert main(["report", str(folder), "--output", str(earlier / "page.html")]) == 0
    assert same_bits(folder)["events"] == 17  # 2 clients joined, 14 updates arrived, SIGTERM
    (folder / "clients.csv").write_text((folder / "clients.csv").read_text().replace("merged", "unused", 1))
    assert main(["audit", str(folder), "--books_only"]) == 1


def test_a_simulated_run_is_resumed_to_its_end(earlier, capsys):
    folder = earlier / "simulated"
    assert main(["simulate", "--resume", str(folder), "--progress", "quiet"]) == 0
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["finished"] == "max_updates" and summary["updates_merged"] == 40
    same_bits(folder)


@pytest.mark.long(
    "tests/distributed/test_come_and_go.py::test_a_server_is_upgraded_and_its_clients_come_back_by_themselves"
)
def test_a_served_run_is_resumed_with_clients_of_today(earlier):
    folder = earlier / "served"
    parsed = parse("serve", ["--resume", str(folder), "--progress=quiet"])
    experiment = replace(parsed.experiment, max_updates=40)
    with remote(experiment, parsed.config_yaml, earlier, [1, 2]) as fleet:
        run = fleet.serve(min_clients=2)
        assert [joiner.exit_code() for joiner in fleet.joiners] == [0, 0]
    assert run.summary["finished"] == "max_updates" and run.summary["updates_merged"] >= 40
    assert run.events("resumed")[0]["version"] == 14
    same_bits(folder)
