"""A task that a client begins before it arrives: what comes decides whether its steps count."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils.data import TensorDataset

from raafl.algorithms import streaming_diloco
from raafl.core.algorithm import Training
from raafl.core.types import Assignment
from raafl.data.federated import ClientData
from raafl.errors import GpuLost, InvalidPayload, TaskFailed
from raafl.local.context import ALONE
from raafl.local.train import LocalTrainer
from raafl.runtime.overlap import EarlyTask, expected_next
from raafl.submodel import FULL, FlatTensors, Submodels
from tests.helpers.single_task import Slope, whole

LAST = Assignment(3, 1, 0, 0, 0, FULL, 0, None, 3, 5, 0.0, next_seed=6, next_lr_scale=0.5)
NEXT = replace(LAST, id=9, task=1, seed=6, lr_scale=0.5, version=4, extra={"up": 0, "down": 0}, next_seed=7)


class Table:
    """A client that holds 8 after five steps, expects a task of three steps of ``w <- w + (4 - w) / 4``, and receives 0."""

    def __init__(self, item, replica=8.0, module=None):
        algorithm, module = streaming_diloco(1, alpha=0.5, sync_delay=2), module or Slope()
        submodels = Submodels(module, (torch.ones(1, 1), torch.zeros(1, 1)))
        self.trainer = LocalTrainer(submodels, algorithm.local, algorithm.merge.sends, Training(None, 3))
        own = {"line.weight": whole(2.0), "replica/line.weight": whole(replica), "inner_steps/steps": [5.0]}
        layout = algorithm.local.payload(submodels).layout()
        values = FlatTensors.from_named({name: torch.tensor(value) for name, value in own.items()}, layout)
        self.early = EarlyTask(expected_next(LAST), values, lambda: item, self.unpack)

    def unpack(self, assignment, wire, out):
        if wire is None:
            raise InvalidPayload("bad-layout")
        out["line.weight"].fill_(wire)

    def train(self):
        data = ClientData(TensorDataset(torch.ones(1, 1), torch.full((1, 1), 4.0)), torch.arange(1), batch_size=1)
        self.early.train(self.trainer, data, ALONE)
        return self.early


def test_a_task_that_comes_as_expected_is_trained_on():
    """8, 7, 6.25, mixed with 0 to 3.125, 3.34375."""
    early = Table((NEXT, 0.0)).train()
    assert early.update.assignment == 9 and early.update.num_steps == 3
    assert early.update.tensors["replica/line.weight"].item() == early.update.tensors["line.weight"].item() == 3.34375
    assert early.values["line.weight"].item() == 0.0


@pytest.mark.parametrize(
    "item",
    [
        (replace(NEXT, seed=8), 0.0),
        (replace(NEXT, num_steps=4), 0.0),
        (replace(NEXT, lr_scale=1.0), 0.0),
        (replace(NEXT, task=2), 0.0),
        (NEXT, None),
        "max_updates",
        OSError("the link is gone"),
    ],
    ids=["seed", "steps", "rate", "task", "damaged", "stop", "error"],
)
def test_anything_else_is_left_to_the_client(item):
    early = Table(item).train()
    assert early.item is item and early.update is None


def test_a_copy_that_is_not_finite_is_not_trained_from():
    early = Table((NEXT, 0.0), replica=float("nan")).train()
    assert early.item is None and early.update is None


class Broken(Slope):
    def training_step(self, batch, index):
        raise RuntimeError("out of words")


def test_code_that_fails_before_the_task_comes_is_run_again_with_it():
    early = Table((NEXT, 0.0), module=Broken()).train()
    assert early.item is None and early.update is None


class LateBroken(Slope):
    def training_step(self, batch, index):
        if self.line.weight.item() < 4.0:  # only once what was received is mixed in
            raise RuntimeError("out of words")
        return super().training_step(batch, index)


def test_code_that_fails_after_the_task_came_is_not_run_again():
    early = Table((NEXT, 0.0), module=LateBroken()).train()
    with pytest.raises(TaskFailed, match="out of words"):
        early.result()


def test_a_lost_gpu_ends_the_client_before_the_task_comes(monkeypatch):
    monkeypatch.setattr("raafl.local.failure._is_lost", lambda device: True)
    with pytest.raises(GpuLost):
        Table((NEXT, 0.0), module=Broken()).train()


def test_steps_end_as_soon_as_another_task_begins_to_arrive():
    table = Table((NEXT, 0.0))
    table.early.watch(NEXT)
    assert not table.early.stop.is_set()
    table.early.watch(replace(NEXT, lr_scale=1.0))
    early = table.train()
    assert early.item is None and early.result() is None


def test_no_step_is_made_early_with_a_proximal_term():
    local = streaming_diloco(1, sync_delay=2).local
    assert local.traits.steps_ahead == 2 and replace(local, prox=0.1).traits.steps_ahead == 0


def test_a_task_without_the_next_ones_seed_is_not_followed_by_an_early_one():
    assert expected_next(replace(LAST, next_seed=None)) is None
