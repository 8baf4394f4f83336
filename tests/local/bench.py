"""One client and one trainer around any module, and the plain loop that says what a task must give."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from lightning import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from raafl.core.algorithm import Local, Task, Training
from raafl.core.types import Assignment, Update
from raafl.data.federated import ClientData
from raafl.local.context import ALONE, TaskContext
from raafl.local.train import FabricOptions, LocalTrainer
from raafl.submodel import FULL, FlatTensors, Layout, Spec, Submodels
from raafl.submodel.submodels import Shrunk

NUM_SAMPLES, BATCH_SIZE = 22, 5  # five batches to an epoch, the last of two samples


class Net(LightningModule):
    """Six inputs, eight hidden units, three classes; subclasses change one thing each."""

    dropout = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.drop, self.fc2 = nn.Linear(6, 8), nn.Dropout(self.dropout), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.drop(torch.relu(self.fc1(x))))

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Any:
        x, y = batch
        return F.cross_entropy(self(x), y)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Norm(Net):
    """Has running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x))


def samples(seed: int = 0) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(
        torch.randn(NUM_SAMPLES, 6, generator=generator), torch.randint(0, 3, (NUM_SAMPLES,), generator=generator)
    )


def assignment(spec: Spec = FULL, seed: int = 11, epochs: int | None = None, steps: int | None = None) -> Assignment:
    return Assignment(
        id=1,
        client=1,
        incarnation=0,
        task=0,
        version=0,
        spec=spec,
        region=0,
        num_epochs=epochs,
        num_steps=steps,
        seed=seed,
        assigned_s=0.0,
    )


def task_in(module: nn.Module, submodels: Submodels, given: Assignment, **changes: Any) -> Task:
    """Return a task around a module: its own training step and backward pass, and no step, unless ``changes`` say."""
    fields = {
        "optimizer": torch.optim.SGD([torch.zeros(1)], lr=0.0),
        "received": FlatTensors.empty(Layout(())),
        "num_batches": 1,
        "generator": torch.Generator(),
        "loss": lambda batch, index: module.training_step(batch, index),
        "backward": lambda loss: loss.backward(),
        "update": lambda: None,
    }
    return Task(given, submodels, module, **(fields | changes))


def filled(submodels: Submodels, spec: Spec, full: FlatTensors, **options: Any) -> Shrunk:
    """Cut a submodel, and give it its part of the whole model's values."""
    shrunk = submodels.shrink(spec, **options)
    submodels.plan(spec, "present").gather(full, out=shrunk.present)
    return shrunk


@dataclass
class Bench:
    """A trainer, the values a task starts from, and the client's data."""

    trainer: LocalTrainer
    submodels: Submodels
    values: FlatTensors
    data: ClientData
    module: nn.Module

    @classmethod
    def of(
        cls,
        make: Callable[[], LightningModule],
        *,
        local: Local | None = None,
        sends: Any = "values",
        training: Training | None = None,
        data: Any = None,
        max_built: int = 1,
        **options: Any,
    ) -> Bench:
        torch.manual_seed(3)
        module = make()
        dataset = data if data is not None else samples()
        client = ClientData(dataset, torch.arange(len(dataset)), BATCH_SIZE)
        submodels = Submodels(module, dataset[:2] if isinstance(dataset, TensorDataset) else None)
        trainer = LocalTrainer(
            submodels, local or Local(), sends, training or Training(), FabricOptions(**options), max_built=max_built
        )
        return cls(trainer, submodels, submodels.state(module), client, module)

    def run(self, task: Assignment, context: TaskContext = ALONE) -> tuple[Update, FlatTensors]:
        """Train, and return the update with a copy of its tensors."""
        received = self.submodels.plan(task.spec, "present").gather(self.values)
        update = self.trainer.run(task, received, self.data, context)
        return update, update.tensors.clone()


def batches(seed: int, epochs: int | None = None, steps: int | None = None, data: Any = None) -> Iterator[Any]:
    """The batches of a task: for each epoch one permutation, from the task's seed."""
    x, y = (data or samples()).tensors
    generator = torch.Generator().manual_seed(seed)
    given, epoch = 0, 0
    while epochs is None or epoch < epochs:
        order = torch.randperm(len(x), generator=generator)
        for start in range(0, len(x), BATCH_SIZE):
            if steps is not None and given == steps:
                return
            rows = order[start : start + BATCH_SIZE]
            yield x[rows], y[rows]
            given += 1
        epoch += 1


def plain_loop(
    bench: Bench, task: Assignment, *, clip: float | None = None, prox: float = 0.0, accumulate: int = 1
) -> dict[str, Tensor]:
    """Train a fresh copy of the bench's module in the obvious way and return its state."""
    torch.manual_seed(3)
    module = type(bench.module)()
    module.load_state_dict(bench.module.state_dict())
    anchors = [p.detach().clone() for p in module.parameters()]
    optimizer = module.configure_optimizers()
    random.seed(task.seed)
    np.random.seed(task.seed % 2**32)
    torch.manual_seed(task.seed)
    per_epoch = -(-NUM_SAMPLES // BATCH_SIZE)
    todo = list(batches(task.seed, task.num_epochs, task.num_steps))
    for number, batch in enumerate(todo, start=1):
        loss = module.training_step(batch, number - 1) / accumulate
        if prox:
            squares = [((p - a) ** 2).sum() for p, a in zip(module.parameters(), anchors, strict=True)]
            loss = loss + prox / 2 * torch.stack(squares).sum()
        loss.backward()
        if number % per_epoch % accumulate and number % per_epoch and number < len(todo):
            continue
        if clip is not None:
            torch.nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], clip)
        optimizer.step()
        optimizer.zero_grad()
    return {name: tensor.detach() for name, tensor in module.state_dict().items()}


def same(update: FlatTensors, expected: Any) -> bool:
    """Check that every tensor that came back is the expected one, bit for bit."""
    return all(torch.equal(tensor, expected[name]) for name, tensor in update.items())
