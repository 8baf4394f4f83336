"""Runs whose server and clients are on an emulated GPU: they mix no devices, and come to the CPU's model to the bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from raafl.algorithms import ALGORITHMS
from raafl.commands.run import simulate
from raafl.compression.compressors import Compress
from raafl.local.train import FabricOptions
from tests.crashed import crash
from tests.emulated_cuda import Emulated
from tests.federation import experiment, finish

CLIENTS = FabricOptions(accelerator="cuda")  # takes cuda:0


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_run_on_two_emulated_gpus_that_is_resumed_gives_the_cpus_model(
    tmp_path, monkeypatch, emulated_cuda: Emulated, name
):
    """The emulation computes on the CPU and seeds its generators alike, so that any difference is raafl's."""
    cut, end = (12, 21) if name == "fed_buff" else (5, 8)  # it has merged once; its buffer is of ten
    plain = finish(experiment(tmp_path / "cpu", name, max_updates=end))
    assert emulated_cuda.counts.total() == 0
    on_gpu = {"server_device": "cuda:1", "fabric": CLIENTS, "checkpoint_every": 1}
    made = experiment(tmp_path / "gpu", name, max_updates=end, **on_gpu)
    with crash(monkeypatch, cut):
        simulate(made)
    found = finish(replace(made, output=None, resume=made.output))
    assert emulated_cuda.counts["between"] > 0
    assert found.summary["finished"] == plain.summary["finished"] == "max_updates"
    assert found.digest == plain.digest


@pytest.mark.parametrize("server", ["cpu", "cuda"])
@pytest.mark.parametrize("name", ["fed_buff", "scaffold", "split_fed"])
def test_server_and_clients_on_an_emulated_gpu_or_not(tmp_path, emulated_cuda: Emulated, name, server):
    """``cuda`` is the current GPU; a server on the CPU whose clients are on a GPU is what --fabric.accelerator cuda asks for."""
    torch.cuda.set_device(1)
    compress = Compress() if name == "split_fed" else Compress("int8", "top_k", 0.3)
    plain = finish(experiment(tmp_path / "cpu", name, max_updates=4, compress=compress))
    found = finish(
        experiment(tmp_path / "gpu", name, max_updates=4, compress=compress, server_device=server, fabric=CLIENTS)
    )
    assert found.digest == plain.digest
