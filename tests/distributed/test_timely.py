"""TimelyFL on real ranks, whose tasks never take exactly as long as was predicted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from raafl.config.parse import parse
from raafl.runtime.replay import replay
from raafl.submodel import FULL
from tests.habits.source import ROOT
from tests.helpers.real_ranks import ranks

pytestmark = pytest.mark.timeout(120)


def run(folder: Path, speeds: list[float], *options: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """A run of as many ranks on digits, six updates for each; its journal and its summary."""
    devices = json.dumps([{"name": f"device-{n}", "flops_per_s": speed} for n, speed in enumerate(speeds)])
    parsed = parse(
        "fit",
        [
            "--config",
            str(ROOT / "configs" / "quickstart.yaml"),
            f"--clients={len(speeds)}",
            "--algorithm=timely_fl",
            f"--devices={devices}",
            "--partition=raafl.data.Iid",
            "--train.num_steps=10",
            f"--max_updates={6 * len(speeds)}",
            "--progress=quiet",
            f"--output={folder}",
            *options,
        ],
    )
    with ranks(parsed.experiment) as fleet:
        done = fleet.serve()
        assert set(fleet.exit_codes().values()) == {0}
    (folder / "config.yaml").write_text(parsed.config_yaml)
    return done.events(), done.summary


@pytest.mark.long("test_the_interval_closes_a_round_and_a_slow_client_trains_the_last_layers")
def test_equal_devices_work_in_step_on_whole_models(tmp_path):
    """With more slack than any machine needs: six rounds of all, none late, none with fewer layers."""
    events, summary = run(tmp_path / "run", [2e8] * 3, "--algorithm.slack=20")
    assert summary["versions"] == 6 and summary["updates_merged"] == 18 and summary["staleness"]["max"] == 0
    assert {json.dumps(row["spec"]) for row in events if row["event"] == "assigned"} == {json.dumps(FULL.to_json())}
    assert replay(tmp_path / "run")["equal"] is True


def test_the_interval_closes_a_round_and_a_slow_client_trains_the_last_layers(tmp_path):
    """A task of the whole model takes 0.3 s, that of the last client 3 s; nobody waits for it, and it is heard."""
    events, summary = run(tmp_path / "run", [9.6e7, 9.6e7, 9.6e6])
    first = {row["client"]: row["spec"] for row in events if row["event"] == "assigned" and row["version"] == 0}
    assert first[1] == first[2] == FULL.to_json() != first[3]
    assert any(row["event"] == "timer" for row in events)
    assert summary["participation"]["3"] > 0 and summary["versions"] > 6
    assert replay(tmp_path / "run")["equal"] is True
