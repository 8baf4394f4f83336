"""Run one task of a method on a model with one weight, so that every step can be computed by hand."""

from __future__ import annotations

from dataclasses import replace

import torch
from lightning import LightningModule
from torch import nn
from torch.utils.data import TensorDataset

from model_zoo import MLP
from raafl.core.algorithm import Algorithm, Training
from raafl.core.types import Arrived, Assignment, Update
from raafl.data.federated import ClientData
from raafl.local.train import LocalTrainer
from raafl.submodel import FlatTensors, Submodels
from tests.helpers.coordinators import assigned, coordinator_for, join


class Slope(LightningModule):
    """Model w x with the loss (w x - y)^2 / 2: at x = 1 the gradient is w - y; SGD with learning rate 1/2."""

    def __init__(self, momentum: float = 0.0) -> None:
        super().__init__()
        self.momentum = momentum
        self.line = nn.Linear(1, 1, bias=False)

    def training_step(self, batch, index):
        x, y = batch
        return (self.line(x) - y).square().mean() / 2

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5, momentum=self.momentum)


class SkippingSlope(Slope):
    """`Slope` that skips each batch."""

    def training_step(self, batch, index):
        return None


class SteepSlope(Slope):
    """`Slope` with AdamW."""

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.5, weight_decay=0.1)


class WithAdam(MLP):
    """The zoo's perceptron with Adam."""

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def small_with_adam() -> WithAdam:
    return WithAdam(64, (16,), 10)


def task_of(
    algorithm: Algorithm, module, sent: dict[str, torch.Tensor], steps: int, y: float = 4.0, lr_scale: float = 1.0
) -> tuple:
    """Train on one sample (1, y); return the tensors that the client sends, and the update.

    `sent`: tensors that the client receives, by name; those of a bundle as BUNDLE/NAME.
    """
    submodels = Submodels(module, (torch.ones(1, 1), torch.zeros(1, 1)))
    merge = algorithm.merge
    trainer = LocalTrainer(submodels, algorithm.local, merge.sends, Training(num_steps=steps, num_epochs=None))
    layout = algorithm.local.payload(submodels).layout()
    received = FlatTensors.from_named({name: torch.as_tensor(value) for name, value in sent.items()}, layout)
    (assignment,) = assigned(join(coordinator_for(algorithm), [1])).values()
    assignment = replace(assignment, lr_scale=lr_scale)
    data = ClientData(TensorDataset(torch.ones(1, 1), torch.full((1, 1), y)), torch.arange(1), batch_size=1)
    update = trainer.run(assignment, received, data)
    return {name: tensor.clone() for name, tensor in update.tensors.items()}, update


def give(coordinator, assignment: Assignment, value: float, num_samples: int = 1, extra=None, **bundles: float) -> dict:
    """Answer a task by an update whose elements are all ``value``; return the new assignments.

    `extra`: `Update.extra`. `bundles`: value of all elements of each bundle.
    """
    payload = coordinator.payload
    tensors = FlatTensors.empty(payload.returned(assignment.spec))
    values, known = payload.split(tensors, assignment.spec, "trained")
    for flat, number in ((values, value), *((known[name], number) for name, number in bundles.items())):
        for buffer in flat.buffers.values():
            buffer.fill_(number)
    update = Update(assignment.id, assignment.client, assignment.incarnation, tensors, num_samples, extra=extra or {})
    return assigned(coordinator.handle(Arrived(update), 0.0))


def whole(value: float) -> list[list[float]]:
    """Return the values of a model with one weight, as `Slope` has it."""
    return [[value]]
