"""A client whose memory is too small for a task: refused, given something smaller or kept out, and the others go on."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from model_zoo import MLP
from raafl.algorithms import fed_raa
from raafl.compression.plan import Compress
from raafl.core.algorithm import Training
from raafl.core.types import OUT_OF_MEMORY
from raafl.runtime.executors.base import is_out_of_memory
from raafl.runtime.setup import load_data
from tests.helpers.small_runs import COMING_AND_GOING, equal_replay, experiment, finish

pytestmark = pytest.mark.timeout(120)

CPU = RuntimeError(
    "[enforce fail at alloc_cpu.cpp:117] . DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."
)
GPU = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


class Hungry(MLP):
    """Needs more than there is for a hidden layer of twelve units or more, once the run has begun."""

    error: Exception = MemoryError()

    def training_step(self, batch, batch_idx):
        if len(batch[1]) > 2 and self.layers[1].out_features >= 12:
            raise self.error
        return super().training_step(batch, batch_idx)


def hungry():
    return Hungry(64, (24,), 10, lr=0.05)


@pytest.mark.quick_cases("gpu")
@pytest.mark.parametrize("error", [MemoryError(), GPU, CPU], ids=["python", "gpu", "cpu"])
def test_a_client_is_given_something_smaller_next(tmp_path, monkeypatch, error):
    """Of fragments of 5, 7 and 12 units the last is too large: each client is asked for it at most once."""
    monkeypatch.setattr(Hungry, "error", error)
    made = experiment(tmp_path / "run", fed_raa(fragments=3, K=100.0), model=hungry, max_updates=40)
    run = finish(made)
    assert run.summary["finished"] == "max_updates"
    refused = [row for row in run.rows() if row["outcome"] == f"refused:{OUT_OF_MEMORY}"]
    assert sorted(row["client"] for row in refused) == ["1", "2", "3", "4"]
    assert {row["region"] for row in refused} == {"3"}
    assert {row["region"] for row in run.rows() if row["outcome"] == "merged"} == {"1", "2"}
    assert equal_replay(made, run)


class Fed(MLP):
    """Needs more than there is for one of client 3's samples."""

    sample = torch.full((1, 64), -1.0)

    def training_step(self, batch, batch_idx):
        if (batch[0].flatten(1) == self.sample).all(dim=1).any():
            raise MemoryError
        return super().training_step(batch, batch_idx)


@pytest.mark.quick_cases("none")
@pytest.mark.parametrize("up", ["none", "top_k"])
def test_a_client_with_nothing_smaller_to_do_is_kept_out_and_the_others_go_on(tmp_path, monkeypatch, up):
    more = {"train": Training(num_epochs=1, num_steps=None), "max_updates": 30, "model": lambda: Fed(64, (24,), 10)}
    more |= {} if up == "none" else {"compress": Compress(up=up)}
    made = experiment(tmp_path / "one", "fed_async", **more)
    ((batch, _), *_) = load_data(made).client(3).in_order(64)
    monkeypatch.setattr(Fed, "sample", batch[0][-1:].flatten(1))
    one, two = finish(made), finish(experiment(tmp_path / "two", "fed_async", workers=2, **more))
    assert one.summary["finished"] == "max_updates" and one.summary["clients_kept_out"] == {"3": 1}
    assert one.summary["updates_refused"] == {OUT_OF_MEMORY: 3} and one.summary["participation"]["3"] == 0
    assert one.digest == two.digest and one.text("events.jsonl") == two.text("events.jsonl")
    assert equal_replay(made, one)


def test_a_simulated_client_that_comes_back_declares_the_memory_that_it_had_declared(tmp_path):
    """Else one that was short of memory once would be given small tasks for ever."""
    devices = [replace(device, memory_bytes=1e9) for device in COMING_AND_GOING]
    algorithm = fed_raa(fragments=3, K=100.0)
    made = experiment(tmp_path / "run", algorithm, model=hungry, devices=devices, max_updates=40)
    run = finish(made)
    assert {row["profile"]["memory_bytes"] for row in run.events("joined")} == {1e9}
    assert run.summary["updates_refused"][OUT_OF_MEMORY] and equal_replay(made, run)


def test_what_says_that_memory_is_too_small():
    assert all(map(is_out_of_memory, (MemoryError(), GPU, CPU, RuntimeError("CUBLAS_STATUS_ALLOC_FAILED"))))
    assert not any(map(is_out_of_memory, (RuntimeError("shape mismatch"), ValueError("out of memory"))))
