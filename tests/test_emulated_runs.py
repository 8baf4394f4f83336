"""Runs whose server and clients are on an emulated GPU: they mix no devices, and come to the CPU's model to the bit."""

from __future__ import annotations

import pytest

from raafl.algorithms import ALGORITHMS
from raafl.local.train import FabricOptions
from tests.emulated_cuda import Emulated
from tests.federation import experiment, finish


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_simulated_run_on_an_emulated_gpu_gives_the_cpus_model(tmp_path, emulated_cuda: Emulated, name):
    """The emulation computes on the CPU and seeds its generators alike, so that any difference is raafl's."""
    on_gpu = {"server_device": "cuda:0", "fabric": FabricOptions(accelerator="cuda")}
    plain = finish(experiment(tmp_path / "cpu", name, max_updates=8))
    before = emulated_cuda.counts.total()
    found = finish(experiment(tmp_path / "gpu", name, max_updates=8, **on_gpu))
    assert before == 0 < emulated_cuda.counts["to device"]
    assert found.summary["finished"] == plain.summary["finished"] == "max_updates"
    assert found.digest == plain.digest
