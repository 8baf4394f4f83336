"""Comparisons whose runs are jobs of a cluster: submitit's stand-in for Slurm on this machine; Ray in a long test."""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
from types import SimpleNamespace

import pytest

from raafl.commands.cli import main
from raafl.errors import BadInput
from raafl.lab.compare import processes
from raafl.lab.compare.processes import Cluster

FILE = """
name: small
config: quickstart
about: two rows
metric: accuracy
seeds: [0]
baseline: A
options: --max_updates 6
rows:
  A: --algorithm fed_async
  B: --algorithm fed_raa
"""

CLUSTER = """
import ray
found = ray.init(num_cpus=2, include_dashboard=False, logging_level="ERROR")
print(found.address_info["gcs_address"], flush=True)
input()
"""


def compared(tmp_path, name, *options):
    file = tmp_path / "small.yaml"
    file.write_text(FILE)
    out = tmp_path / name
    assert main(["compare", str(file), "--output", str(out), "--no_page", "--jobs", "2", *options]) == 0
    rows = json.loads((out / "result.json").read_text())["rows"]
    return [run["model_digest"] for row in rows for run in row["runs"]]


@pytest.mark.slow("two jobs of their own import torch")
def test_jobs_of_slurm_give_the_digests_of_runs_here(tmp_path):
    assert compared(tmp_path, "jobs", "--engine", "local") == compared(tmp_path, "here")
    assert len(list((tmp_path / "jobs" / "runs" / "jobs").glob("*_result.pkl"))) == 2


@pytest.mark.slow("Ray starts a cluster")
@pytest.mark.long("test_jobs_of_slurm_give_the_digests_of_runs_here")
def test_runs_on_ray_give_the_digests_of_runs_here(tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
    with subprocess.Popen(
        [sys.executable, "-c", CLUSTER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as of:
        address = of.stdout.readline().strip()
        there = compared(tmp_path, "ray", "--engine", "ray", "--engine_options", f"address={address}")
        of.stdin.close()
    assert there == compared(tmp_path, "here")


def test_options_are_numbers_or_text_and_need_a_key():
    assert Cluster.of("local", ["timeout_min=120", "slurm_partition=gpu", "num_cpus=0.5"]).options == {
        "timeout_min": 120,
        "slurm_partition": "gpu",
        "num_cpus": 0.5,
    }
    with pytest.raises(BadInput, match=r"engine_options has 'gpu': give KEY=VALUE"):
        Cluster.of("slurm", ["gpu"])


def test_a_package_that_is_not_installed_is_named(monkeypatch):
    monkeypatch.setattr(processes, "find_spec", lambda name: None)
    with pytest.raises(BadInput, match=r"engine is 'slurm', which needs submitit: pip install '.\[slurm\]'"):
        Cluster.of("slurm", [])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--engine_options", "timeout_min=3"],
            "engine_options is ['timeout_min=3'], but runs of this machine take none",
        ),
        (["--engine", "local", "--ranks", "2"], "ranks is 2, but on a cluster each run has one process"),
    ],
)
def test_options_without_effect_are_refused(tmp_path, capsys, options, message):
    file = tmp_path / "small.yaml"
    file.write_text(FILE)
    assert main(["compare", str(file), "--output", str(tmp_path / "out"), "--no_page", *options]) == 2
    assert message in capsys.readouterr().err


def test_a_cluster_of_ray_that_does_not_answer_is_named_with_a_remedy(tmp_path, monkeypatch, caplog):
    def init(**options):
        raise ConnectionError("no instance")

    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(init=init))  # importing Ray changes the environment
    assert Cluster("ray", {}).run(["--version"], tmp_path / "log") == 1
    assert "no cluster answers (no instance): start one (ray start --head), or give" in caplog.text
