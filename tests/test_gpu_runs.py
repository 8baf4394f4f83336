"""Runs on a real GPU: every algorithm comes to the CPU's model within rounding, and its replay gives the same bits."""

from __future__ import annotations

import pytest
import torch

from raafl.algorithms import ALGORITHMS, fed_buff
from raafl.compression.plan import Compress
from raafl.local.train import FabricOptions
from raafl.runfolder.checkpoint_reader import load
from raafl.runtime.replay import replay
from raafl.runtime.run import simulate
from tests.helpers import cached_models
from tests.helpers.crash import crash, simulated
from tests.helpers.small_runs import Finished, equal_replay, experiment, finish
from tests.test_emulated_runs import MORE, QUICK, SHORT, SMALLER

pytestmark = pytest.mark.gpu

ON_GPU = {"server_device": "cuda:0", "fabric": FabricOptions(accelerator="cuda")}
FEW = {**SHORT, "max_updates": 4}
RANDOM = {"ada_vit", "fed_pm"}
"""Draw noise or masks on the device that computes, whose generator gives other numbers than the CPU's."""


def compare(found: Finished, plain: Finished) -> None:
    """Check that two runs have come to the same values, except for the rounding of a few steps."""
    values, expected = (load(run.folder).state_dict for run in (found, plain))
    assert values.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(
            values[name], tensor, rtol=2e-3, atol=2e-4, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_algorithm_on_a_gpu_gives_nearly_the_cpus_model_and_replays(tmp_path, name):
    made = experiment(tmp_path / "gpu", SMALLER.get(name, name), **FEW, **ON_GPU)
    found = finish(made)
    assert found.summary["finished"] == "max_updates" and found.summary["updates_refused"] == {}
    assert equal_replay(made, found)
    if name not in RANDOM:
        compare(found, finish(experiment(tmp_path / "cpu", SMALLER.get(name, name), **FEW)))


@pytest.mark.parametrize("name", MORE)
def test_more_on_a_gpu_gives_nearly_the_cpus_model_and_replays(tmp_path, name):
    algorithm, more = MORE[name]
    more = {**FEW, **more}
    made = experiment(tmp_path / "gpu", algorithm, **more, **ON_GPU)
    found = finish(made)
    assert found.summary["finished"] == "max_updates"
    assert equal_replay(made, found)
    if name not in RANDOM:
        plain = finish(experiment(tmp_path / "cpu", algorithm, **more))
        assert found.summary["updates_refused"] == plain.summary["updates_refused"]
        compare(found, plain)


@pytest.mark.parametrize("name", ["fed_opt", "fed_buff", "ca2fl"])
def test_a_run_on_a_gpu_that_crashes_and_is_resumed_gives_the_same_bits(tmp_path, monkeypatch, name):
    algorithm = SMALLER.get(name, name)
    whole = finish(experiment(tmp_path / "whole", algorithm, **FEW, **ON_GPU))
    made = experiment(tmp_path / "half", algorithm, checkpoint_every=1, **FEW, **ON_GPU)
    with cached_models.reuse_findings(), crash(monkeypatch, 3):
        simulate(made)
    found = finish(experiment(None, algorithm, resume=str(tmp_path / "half"), **FEW, **ON_GPU))
    assert found.digest == whole.digest


def test_a_command_replays_a_run_on_a_gpu(tmp_path):
    summary = simulated(
        f"--config={QUICK}",
        "--algorithm=fed_buff",
        "--max_updates=8",
        "--compress.up=int8",
        "--server_device=cuda:0",
        "--fabric.accelerator=cuda",
        f"--output={tmp_path / 'run'}",
    )
    result = replay(tmp_path / "run")
    assert result["equal"] is True and result["model_digest"] == summary["model_digest"]


def test_a_server_on_the_cpu_whose_clients_are_on_a_gpu(tmp_path):
    more = {**FEW, "compress": Compress("int8", "top_k", 0.3)}
    made = experiment(tmp_path / "gpu", fed_buff(2), **more, fabric=FabricOptions(accelerator="cuda"))
    found = finish(made)
    assert equal_replay(made, found)
    assert found.summary["updates_merged"] == 4
