"""Define what each simulator trains, with torch alone: the model, the clients' samples, and how many rounds."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

SAMPLES, BATCH, LR = 50, 10, 0.005
STEPS = SAMPLES // BATCH
"""Local steps of a training: one epoch, SGD without momentum."""


@dataclass(frozen=True)
class Workload:
    """Clients and what they train.

    `layers`: makes the model. `shape`: shape of a sample. `clients`: number of clients, each with `SAMPLES` samples.
    `cohort`: clients drawn in each round, or at work at the same time. `rounds`: rounds of the short and of the long
    run.
    """

    name: str
    layers: Callable[[], nn.Sequential]
    shape: tuple[int, ...]
    clients: int
    cohort: int
    rounds: tuple[int, int]


def mlp() -> nn.Sequential:
    """Make a multilayer perceptron 64-32-10 (2,410 parameters)."""
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def cnn() -> nn.Sequential:
    """Make two 5 x 5 convolutions of 16 and 32 channels and a linear layer, for 28 x 28 images (28,938 parameters)."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(1568, 10),
    )


WORKLOADS = {
    "mlp": Workload("mlp", mlp, (64,), 200, 100, (2, 17)),
    "cnn": Workload("cnn", cnn, (1, 28, 28), 100, 50, (1, 7)),
}


class Net(nn.Module):
    """Model of a workload that counts training steps.

    `steps`: forward passes in training mode of all instances in this process.
    """

    steps = 0

    def __init__(self, work: Workload) -> None:
        """Build the layers of the workload's model."""
        super().__init__()
        self.inner = work.layers()

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (batch, 10)."""
        Net.steps += self.training
        logits: Tensor = self.inner(x)
        return logits


def samples(work: Workload) -> tuple[Tensor, Tensor]:
    """Draw inputs and labels of all clients, `SAMPLES` for one client after the other."""
    drawn = torch.Generator().manual_seed(0)
    num = work.clients * SAMPLES
    return torch.randn(num, *work.shape, generator=drawn), torch.randint(0, 10, (num,), generator=drawn)


def client_samples(work: Workload) -> list[tuple[Tensor, Tensor]]:
    """Return inputs and labels of each client."""
    inputs, labels = samples(work)
    return list(zip(inputs.split(SAMPLES), labels.split(SAMPLES), strict=True))


def main(ways: dict[str, Callable[[Workload, int], int | None]]) -> None:
    """Run ``WAY WORKLOAD ROUNDS`` of the command line, and print the number of trainings as a line of JSON.

    `ways`: functions that run a workload for a number of rounds; they return the number of trainings, or None if `Net`
    has counted the steps.
    """
    way, name, rounds = sys.argv[1:]
    torch.set_num_threads(1)
    torch.manual_seed(0)
    trainings = ways[way](WORKLOADS[name], int(rounds))
    print(json.dumps({"trainings": Net.steps / STEPS if trainings is None else trainings}), flush=True)
