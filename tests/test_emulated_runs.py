"""Runs whose server and clients are on an emulated GPU: they mix no devices, and come to the CPU's model to the bit."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import raafl
from model_zoo import MLP
from raafl.algorithms import ca2fl, fadas, fed_async, fed_avg, fed_buff, fed_raa, hetero_fl
from raafl.compression.plan import Compress
from raafl.config.experiment import SubmodelOptions
from raafl.core.algorithm import Training
from raafl.core.options import Guard
from raafl.local import from_trainer
from raafl.local.train import FabricOptions
from raafl.parts.protect.privacy import Privacy
from raafl.runtime.executors import batched
from raafl.runtime.replay import replay
from raafl.runtime.run import simulate
from tests.helpers import cached_models
from tests.helpers.crash import crash, simulated
from tests.helpers.emulated_cuda import Emulated
from tests.helpers.methods import each_method
from tests.helpers.small_runs import experiment, finish
from tests.helpers.small_trainers import classifier

CLIENTS = FabricOptions(accelerator="cuda")  # takes cuda:0
QUICK = Path(__file__).parents[1] / "configs" / "quickstart.yaml"
ON_GPUS = {"server_device": "cuda:1", "fabric": CLIENTS}
SHORT = {"clients": 2, "eval_every": 100, "train": Training(num_epochs=None, num_steps=1)}
SMALLER = {"ca2fl": ca2fl(2), "fadas": fadas(2), "fed_buff": fed_buff(buffer_size=2)}


@pytest.mark.parametrize("name", each_method(parts=["local", "merge"]))
def test_a_run_on_two_emulated_gpus_that_is_resumed_gives_the_cpus_model(tmp_path, monkeypatch, request, name):
    """The emulation computes on the CPU and seeds its generators alike, so that any difference is raafl's."""
    algorithm = SMALLER.get(name, name)
    with cached_models.reuse_findings():
        plain = finish(experiment(tmp_path / "cpu", algorithm, max_updates=4, **SHORT))
        emulated = request.getfixturevalue("emulated_cuda")
        made = experiment(tmp_path / "gpu", algorithm, max_updates=4, checkpoint_every=1, **SHORT, **ON_GPUS)
        with crash(monkeypatch, 3):  # it has merged once
            simulate(made)
        found = finish(replace(made, output=None, resume=made.output))
    assert emulated.counts["between"] > 0
    assert found.summary["finished"] == plain.summary["finished"] == "max_updates"
    assert found.digest == plain.digest


class Normed(MLP):
    """Keeps running statistics."""

    def __init__(self) -> None:
        super().__init__(64, (24,), 10, lr=0.05)
        self.layers.insert(2, nn.BatchNorm1d(24))


class Adam(MLP):
    """Its optimiser counts steps on the CPU, and takes all parameters at once on a GPU."""

    def __init__(self) -> None:
        super().__init__(64, (24,), 10, lr=0.05, dropout=0.2)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


MORE = {
    "clipped, a median of submodels": (hetero_fl(), {"guard": Guard(0.4, combine="median"), "clients": 3}),
    "refused, a trimmed mean": (
        fed_buff(3),
        {"guard": Guard(outlier=1.5, warm_up=1, combine="trimmed_mean"), "clients": 3},
    ),
    "private": (fed_raa(), {"privacy": Privacy(clip_norm=0.4, noise_multiplier=0.2)}),
    "private deltas": (fed_buff(2), {"privacy": Privacy(clip_norm=0.4, noise_multiplier=0.2)}),
    "compressed": (fed_async(), {"compress": Compress("int8", "top_k", 0.3)}),
    "batch norm": (hetero_fl(), {"model": Normed}),
    "batch norm, measured": (
        hetero_fl(),
        {"model": Normed, "submodels": SubmodelOptions(batch_norm="static", static_batches=2)},
    ),
    "clients as one batch": (fed_avg(), {"batch_clients": 4, "clients": 8}),
}


@pytest.mark.quick_cases("batch norm, measured", "private")
@pytest.mark.parametrize("name", MORE)
def test_a_run_with_more_on_two_emulated_gpus_gives_the_cpus_model(tmp_path, request, name):
    algorithm, more = MORE[name]
    more = {**SHORT, "max_updates": 6, **more}
    with cached_models.reuse_findings():
        plain = finish(experiment(tmp_path / "cpu", algorithm, **more))
        request.getfixturevalue("emulated_cuda")
        found = finish(experiment(tmp_path / "gpu", algorithm, **more, **ON_GPUS))
        assert found.digest == plain.digest
        assert found.summary["final"] == plain.summary["final"]
        assert found.summary["updates_refused"] == plain.summary["updates_refused"]


def test_clients_are_one_batch_on_an_emulated_gpu(tmp_path, monkeypatch, request):
    """Each kind of product is tried there; data lie there once, and each task sends its order."""
    monkeypatch.setattr(batched, "_TRIALS", (2, 3))
    more = {**SHORT, "clients": 12, "max_updates": 24, "train": Training(num_epochs=2)}
    with cached_models.reuse_findings():
        plain = finish(experiment(tmp_path / "cpu", fed_avg(), **more))
        request.getfixturevalue("emulated_cuda")
        found = finish(experiment(tmp_path / "gpu", fed_avg(), **more, batch_clients=4, **ON_GPUS))
    assert found.digest == plain.digest
    told = found.summary["batched"]
    assert told["share"] > 0.5 and told["by_the_loop"] == []


def test_a_run_on_two_emulated_gpus_replays(tmp_path, emulated_cuda: Emulated):
    options = (
        f"--config={QUICK}",
        "--algorithm=fed_buff",
        "--algorithm.buffer_size=2",
        "--clients=2",
        "--max_updates=4",
        "--train.num_epochs=null",
        "--train.num_steps=1",
        "--eval_every=100",
        "--compress.up=int8",
        "--server_device=cuda:1",
        "--fabric.accelerator=cuda",
        f"--output={tmp_path / 'run'}",
    )
    summary, copies = simulated(*options), emulated_cuda.counts["between"]
    result = replay(tmp_path / "run")
    assert result["equal"] is True and result["differences"] == [] and result["model_digest"] == summary["model_digest"]
    assert 0 < copies < emulated_cuda.counts["between"]


@pytest.mark.quick_cases("fed_buff")
@pytest.mark.parametrize("name", ["fed_buff", "split_fed"])
def test_forked_workers_use_no_emulated_gpu_though_the_server_is_on_one(tmp_path, monkeypatch, request, name):
    """A real one takes no call from a process that was forked after its parent's first."""
    options = {**SHORT, "max_updates": 4, "workers": 2}
    with cached_models.reuse_findings():
        plain = finish(experiment(tmp_path / "cpu", SMALLER.get(name, name), **options))
        emulated = request.getfixturevalue("emulated_cuda")
        first, begin = os.getpid(), emulated.streams.begin

        def begin_here(func, args, kwargs, tensors, gpus):
            if gpus and os.getpid() != first:
                raise RuntimeError("Cannot re-initialize CUDA in forked subprocess")
            return begin(func, args, kwargs, tensors, gpus)

        monkeypatch.setattr(emulated.streams, "begin", begin_here)
        found = finish(experiment(tmp_path / "gpu", SMALLER.get(name, name), **options, server_device="cuda:1"))
    assert found.digest == plain.digest and emulated.counts["to host"] > 0


def test_an_optimiser_with_state_trains_on_an_emulated_gpu(tmp_path, emulated_cuda: Emulated):
    found = finish(experiment(tmp_path / "gpu", fed_avg(), model=Adam, max_updates=2, **SHORT, **ON_GPUS))
    assert found.summary["updates_merged"] == 2 and found.summary["updates_refused"] == {}


@pytest.mark.quick_cases("fed_buff-cuda", "split_fed-cpu")
@pytest.mark.parametrize("server", ["cpu", "cuda"])
@pytest.mark.parametrize("name", ["fed_buff", "scaffold", "split_fed"])
def test_server_and_clients_on_an_emulated_gpu_or_not(tmp_path, emulated_cuda: Emulated, name, server):
    """``cuda`` is the current GPU; a server on the CPU whose clients are on a GPU is what --fabric.accelerator cuda asks for."""
    torch.cuda.set_device(1)
    compress = Compress() if name == "split_fed" else Compress("int8", "top_k", 0.3)
    short = {**SHORT, "max_updates": 2, "compress": compress}
    plain = finish(experiment(tmp_path / "cpu", name, **short))
    assert emulated_cuda.counts.total() == 0
    found = finish(experiment(tmp_path / "gpu", name, **short, server_device=server, fabric=CLIENTS))
    assert found.digest == plain.digest


@pytest.mark.parametrize("more", [{}, {"label_smoothing_factor": 0.1}], ids=["plain", "a loss outside the model"])
def test_a_trainer_in_bf16_computes_on_an_emulated_gpu_what_it_computes_on_the_cpu(
    tmp_path, monkeypatch, request, more
):
    """Its model alone is autocast, by the device's own autocast, in tasks and evaluations."""
    pytest.importorskip("transformers")
    device_of = from_trainer.fabric_of  # the Trainer itself is made for the CPU, for want of a GPU

    def run(name, fabric):
        federation = raafl.Federation(
            "fed_avg", clients=2, max_updates=4, progress="quiet", output=tmp_path / name, fabric=fabric
        )
        trainer = classifier(tmp_path, num=12, bf16=True, **more)
        return federation.simulate(raafl.from_trainer(trainer)).summary

    plain = run("cpu", FabricOptions(accelerator="cpu"))
    monkeypatch.setattr(
        from_trainer, "fabric_of", lambda args: {**device_of(args), "accelerator": "cuda", "capture": "off"}
    )
    emulated = request.getfixturevalue("emulated_cuda")
    there = run("gpu", FabricOptions(accelerator="cuda", capture="off"))
    assert emulated.counts["to host"] > 0
    assert (there["model_digest"], there["final"]) == (plain["model_digest"], plain["final"])
