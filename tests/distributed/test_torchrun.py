"""The command line under torchrun, whole: processes, run folder, exit code. `make demo`, in `.ci/run`, starts five ranks so."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from raafl.config.parse import load_experiment
from raafl.errors import BadInput
from raafl.runtime.over_ranks import simulate_over_ranks
from raafl.runtime.run import simulate
from tests.helpers import forkserver
from tests.helpers.forked_command import command

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.timeout(120)
OPTIONS = ["--config", "configs/quickstart.yaml", "--clients", "2", "--progress", "quiet"]


def start(*options, ranks=3):
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m", "raafl", "fit"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, *torchrun, *OPTIONS, *options],
        cwd=ROOT,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def end(process, timeout_s=90):
    """Wait for it; kill its whole session if it does not end."""
    try:
        out, err = process.communicate(timeout=timeout_s)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    return process.returncode, out, err


@pytest.mark.long("tests/runtime/test_replay.py::test_a_wall_clock_run_of_real_ranks_replays_to_the_last_bit")
def test_ranks_train_and_leave_a_run_folder(tmp_path):
    options = ("--clients=1", "--max_updates=6", "--json", f"--output={tmp_path / 'run'}")
    code, out, err = end(start(*options, ranks=2))
    assert code == 0, err
    summary = json.loads(out)
    assert (summary["runtime"], summary["finished"]) == ("distributed", "max_updates")
    assert summary["updates_merged"] == sum(summary["participation"].values()) == 6
    assert summary == json.loads((tmp_path / "run" / "summary.json").read_text())
    names = {"config.yaml", "events.jsonl", "metrics.csv", "clients.csv", "checkpoints", "summary.json"}
    assert names <= {path.name for path in (tmp_path / "run").iterdir()}


@pytest.mark.long
def test_a_task_in_progress_when_the_run_ends_makes_no_rank_fail(tmp_path):
    """The second device needs a minute for a task, of which the run lets it do a second or so."""
    devices = '[{"name": "quick", "flops_per_s": 1.0e9}, {"name": "dawdling", "flops_per_s": 1.0e6}]'
    options = ("--devices", devices, "--algorithm", "fed_async", "--max_updates", "4", "--waits.stop_s", "1")
    began = time.monotonic()
    code, out, err = end(start(*options, "--output", str(tmp_path / "run"), "--json"))
    assert code == 0, err
    assert json.loads(out)["participation"] == {"1": 4, "2": 0}
    assert time.monotonic() - began < 60


@pytest.mark.long
def test_a_rank_that_is_killed_takes_the_others_with_it_under_torchrun(tmp_path):
    """That is torchrun's way; what the run had done is on disk, and no process stays."""
    process = start("--max_updates", "1000000", "--output", str(tmp_path / "run"))
    journal, deadline = tmp_path / "run" / "events.jsonl", time.monotonic() + 240  # where others keep the machine busy
    while time.monotonic() < deadline and not (journal.exists() and '"arrived"' in journal.read_text()):
        time.sleep(0.1)
    started = psutil.Process(process.pid).children(recursive=True)
    ranks = {child.environ().get("RANK"): child for child in started if "raafl" in child.cmdline()}
    ranks["1"].kill()
    code, _, _ = end(process, 120)
    assert code != 0
    _, alive = psutil.wait_procs(started, timeout=30)
    assert alive == []
    assert all(json.loads(line) for line in journal.read_text().splitlines())


@pytest.mark.long(
    "tests/conformance/test_executors.py::test_every_algorithm_ends_alike_over_ranks_and_when_it_has_crashed_and_goes_on_elsewhere"
)
def test_three_ranks_simulate_what_one_process_does(tmp_path):
    options = ("--max_updates=40", "--clients=4", "--progress=quiet")
    argv = (
        "--standalone",
        "--nproc-per-node=3",
        "-m",
        "raafl",
        "simulate",
        "--config=configs/quickstart.yaml",
        *options,
    )
    with command(
        tmp_path, *argv, f"--output={tmp_path / 'three'}", before=forkserver.start, entry=forkserver.torchrun
    ) as started:
        assert started.end() == 0, started.err
    three = json.loads((tmp_path / "three" / "summary.json").read_text())
    one, _ = simulate(load_experiment("configs/quickstart.yaml", *options, f"--output={tmp_path / 'one'}"))
    alike = ("model_digest", "runtime", "finished", "participation", "final", "time_s", "bytes_up", "staleness")
    assert [three[name] for name in alike] == [one[name] for name in alike]
    assert three["warnings"] == one["warnings"]


def test_ranks_take_the_place_of_workers(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    experiment = load_experiment("configs/quickstart.yaml", "--workers", "2")
    with pytest.raises(BadInput, match="workers is 2, but the run has 3 ranks that train already: give --workers 1"):
        simulate_over_ranks(experiment)
