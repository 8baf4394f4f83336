"""Play the federation of docs/hospitals.md in its short form, by its own command."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import yaml

from raafl.config.parse import parse
from raafl.sites.policy import load_policy
from tests.habits.source import ROOT

HERE = ROOT / "examples" / "hospitals"


@pytest.mark.parametrize("site", ["north", "east", "south", "west"])
def test_each_policy_allows_the_methods_of_the_configs(site):
    policy = load_policy(str(HERE / "policies" / f"{site}.yaml"))
    configs = [yaml.safe_load((HERE / f"{name}.yaml").read_text()) for name in ("images", "texts", "probe")]
    assert {config["algorithm"]["class_path"].removeprefix("raafl.") for config in configs} == set(policy.algorithms)


@pytest.mark.parametrize("name", ["images", "texts"])
def test_a_config_is_whole(name):
    assert parse("serve", ["--config", str(HERE / f"{name}.yaml")]).experiment.name == f"hospitals-{name}"


def test_without_the_data_it_says_what_is_missing_and_makes_nothing(tmp_path):
    (tmp_path / "sst2").mkdir()
    play = [sys.executable, str(ROOT / "examples" / "hospitals" / "play.py"), "out", "--data", str(tmp_path)]
    ended = subprocess.run(play, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout) == (2, "") and not (tmp_path / "out").exists()
    assert ended.stderr == f"[hospitals] {tmp_path} has no cifar100: set RAAFL_DATA, or give --data\n"


@pytest.mark.long("tests/docs/test_sites.py::test_from_an_empty_folder_to_an_audit")
@pytest.mark.timeout(1800)
def test_four_hospitals_train_lose_a_site_and_are_audited(tmp_path, raafl_data):
    out = tmp_path / "out"
    command = [sys.executable, str(ROOT / "examples/hospitals/play.py"), str(out), "--short", "--data", str(raafl_data)]
    subprocess.run(command, check=True, timeout=1700)
    result = json.loads((out / "result.json").read_text())
    assert [row["run"] for row in result["rows"]] == ["images", "texts", "probe"]
    assert result["rows"][0]["lost"] >= 1 and result["killed"]["merged_after"] >= 1
    assert [row["findings"] for row in result["audits"]] == [0] * len(result["audits"])
    assert any(row.get("trained_again") for row in result["audits"]) or len(result["audits"]) >= 5
    assert float(result["rows"][2]["epsilon"]) > 0
    assert {path.name for path in (out / "pages").iterdir()} >= {"images.html", "hospitals-images.svg", "model-card.md"}
