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

    Attributes:
        name: key of `WORKLOADS`.
        layers: returns the model.
        shape: shape of a sample.
        clients: number of clients, each with `SAMPLES` samples of its own.
        cohort: clients that are drawn in each round, or that work at the same time.
        rounds: rounds of the short and of the long run.
    """

    name: str
    layers: Callable[[], nn.Sequential]
    shape: tuple[int, ...]
    clients: int
    cohort: int
    rounds: tuple[int, int]


def mlp() -> nn.Sequential:
    """Return a multilayer perceptron 64-32-10 (2,410 parameters)."""
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def cnn() -> nn.Sequential:
    """Return two 5 x 5 convolutions of 16 and 32 channels and a linear layer, for 28 x 28 images (28,938 parameters)."""
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
    """The model of a workload, which counts its training steps.

    Attributes:
        steps: forward passes in training mode of all instances of this process.
    """

    steps = 0

    def __init__(self, work: Workload) -> None:
        """Build the layers.

        Args:
            work: workload whose model this is.
        """
        super().__init__()
        self.inner = work.layers()

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (batch, 10)."""
        Net.steps += self.training
        logits: Tensor = self.inner(x)
        return logits


def samples(work: Workload) -> tuple[Tensor, Tensor]:
    """Return inputs and labels of all clients, `SAMPLES` after each other for each client.

    Args:
        work: workload whose samples these are.
    """
    drawn = torch.Generator().manual_seed(0)
    num = work.clients * SAMPLES
    return torch.randn(num, *work.shape, generator=drawn), torch.randint(0, 10, (num,), generator=drawn)


def client_samples(work: Workload) -> list[tuple[Tensor, Tensor]]:
    """Return inputs and labels for each client.

    Args:
        work: workload whose samples these are.
    """
    inputs, labels = samples(work)
    return list(zip(inputs.split(SAMPLES), labels.split(SAMPLES), strict=True))


def main(ways: dict[str, Callable[[Workload, int], int | None]]) -> None:
    """Run ``WAY WORKLOAD ROUNDS`` of the command line and print the number of trainings as one line of JSON.

    Args:
        ways: functions that run a workload for so many rounds. They return the number of trainings, or None where `Net` counts
            the steps of all of them.
    """
    way, name, rounds = sys.argv[1:]
    torch.set_num_threads(1)
    torch.manual_seed(0)
    trainings = ways[way](WORKLOADS[name], int(rounds))
    print(json.dumps({"trainings": Net.steps / STEPS if trainings is None else trainings}), flush=True)
