"""Define models and batches for benchmarks of single steps, and a client that trains their submodels as raafl's clients do."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Workload:
    """A model, a tiny one of the same kind, and a batch.

    `make`: makes the model, with True the tiny one. `batch`: draws a number of samples. `batch_size`: samples per step.
    `windows`: windows of the submodels below rate 1.
    """

    make: Callable[[bool], Any]
    batch: Callable[[int], list[Any]]
    batch_size: int = 32
    windows: tuple[str, ...] = ("bottom",)


def _vit(tiny: bool) -> Any:
    from model_zoo import ViT

    return ViT("micro" if tiny else "tiny")


def _vit_mini(tiny: bool) -> Any:
    from model_zoo import ViT

    return ViT("micro" if tiny else "mini")


def _bert(tiny: bool) -> Any:
    from model_zoo import BERT

    return BERT("micro" if tiny else "small")


def _cnn(tiny: bool) -> Any:
    from model_zoo import CNN

    return CNN(3, 32, channels=(4, 4) if tiny else (32, 64))


def _mlp(tiny: bool) -> Any:
    from model_zoo import MLP

    return MLP(3072, (16, 16) if tiny else (2048, 2048), 10)


def _resnet(tiny: bool) -> Any:
    from model_zoo import ResNet

    return ResNet(8 if tiny else 20)


def _images(num: int) -> list[Any]:
    import torch

    return [torch.randn(num, 3, 32, 32), torch.randint(0, 10, (num,))]


def _vectors(num: int) -> list[Any]:
    images, labels = _images(num)
    return [images.flatten(1), labels]


def _texts(num: int) -> list[Any]:
    import torch

    tokens = torch.randint(1, 30522, (num, 64))
    return [tokens, torch.ones_like(tokens), torch.randint(0, 2, (num,))]


WORKLOADS = {
    "vit-tiny": Workload(_vit, _images, windows=("bottom", "top")),
    "bert-small": Workload(_bert, _texts),
    "cnn": Workload(_cnn, _images, batch_size=128),
    "mlp": Workload(_mlp, _vectors),
    "resnet20": Workload(_resnet, _images),
    "vit-mini": Workload(_vit_mini, _images, batch_size=8, windows=("bottom", "top")),
}


def spec_of(submodels: Any, rate: float, window: str) -> Any:
    """Return the submodel that keeps sqrt(rate) of every axis and of the blocks, at least one of each.

    `window`: blocks that train, "bottom" or "top", of a model with a stack of blocks.
    """
    from raafl.submodel import FULL, Spec, depth_window

    if rate == 1:
        return FULL
    share = math.sqrt(rate)
    kept = {name: range(max(1, round(share * axis.size))) for name, axis in submodels.axes.items()}
    if not submodels.stacks:
        return Spec.select(kept)
    depth = len(next(iter(submodels.stacks.values())))
    trained = max(1, round(share * depth))
    start = 0 if window == "bottom" else depth - trained
    return depth_window(submodels, start, start + trained, kept=kept)


def submodels_of(work: Workload, tiny: bool = False) -> Any:
    """Return the submodels of a workload's model, or of its tiny model."""
    from raafl.submodel import Submodels, skeleton

    with skeleton():
        module = work.make(tiny)
    return Submodels(module, work.batch(2))


def values_of(layout: Any) -> Any:
    """Draw small random values, with which a training step takes its usual time."""
    from raafl.submodel import FlatTensors

    flat = FlatTensors.zeros(layout)
    for buffer in flat.buffers.values():
        if buffer.dtype.is_floating_point:
            buffer.normal_(0.0, 0.02)
    return flat


class Client:
    """Client that trains tasks on its data as raafl does, and records when each step begins."""

    def __init__(self, work: Workload, data: Any, clock: Callable[[], float], options: Any = None) -> None:
        """Store the client's data; ``options``: Fabric's options."""
        from raafl.core.algorithm import Local, Training
        from raafl.data.federated import ClientData
        from raafl.local.train import LocalTrainer

        marks: list[float] = []

        class Noted(ClientData):
            def batches(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
                for sized in super().batches(*args, **kwargs):
                    marks.append(clock())
                    yield sized
                marks.append(clock())

        import torch

        self.marks, self.clock, self.work = marks, clock, work
        self.data = Noted(data, torch.arange(len(data)), work.batch_size)
        self.make: Callable[[Any], Any] = lambda submodels: LocalTrainer(
            submodels, Local(), "delta", Training(num_steps=1, batch_size=work.batch_size), options
        )

    def train(self, trainer: Any, spec: Any, received: Any, num_steps: int) -> tuple[float, list[float]]:
        """Run one task of ``num_steps``; return the seconds before its first step, and those of each step."""
        from raafl.core.types import Assignment

        self.marks.clear()
        begin = self.clock()
        task = Assignment(
            id=1,
            client=1,
            incarnation=0,
            task=0,
            version=0,
            spec=spec,
            region=0,
            num_epochs=None,
            num_steps=num_steps,
            seed=1,
            assigned_s=0.0,
        )
        trainer.run(task, received, self.data)
        steps = [after - before for before, after in zip(self.marks, self.marks[1:], strict=False)]
        return self.marks[0] - begin, steps


def client_of(work: Workload, clock: Callable[[], float], options: Any = None) -> Client:
    """Make a client with its data, in a process that has trained a tiny model; ``options``: Fabric's options."""
    import torch
    from torch.utils.data import TensorDataset

    torch.manual_seed(0)
    client = Client(work, TensorDataset(*work.batch(2 * work.batch_size)), clock, options)
    tiny = submodels_of(work, tiny=True)
    spec = spec_of(tiny, 1.0, "all")
    client.train(client.make(tiny), spec, values_of(tiny.layout(spec)), 2)
    return client
