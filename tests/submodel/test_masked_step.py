"""Training with a mask is training the shrunk model: momentum steps of both, in double precision, from the same values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import pytest
import torch
from lightning import LightningModule
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from model_zoo import CNN, MLP, ViT
from raafl.submodel import FlatTensors, Spec
from tests.local.bench import NUM_SAMPLES, Bench, assignment, batches

STEPS, LR, MOMENTUM = 3, 0.1, 0.9
CLOSE = {"rtol": 1e-10, "atol": 1e-13}

Sides = Mapping[str, list[tuple[str, int, int]]]
"""By axis: tensors that have it, on which dimension, and how many entries there belong to one unit. Written by hand."""


class SmallViT(ViT):
    """The zoo's smallest, with momentum SGD instead of AdamW."""

    def __init__(self) -> None:
        super().__init__("micro", image_size=8, patch_size=4, num_classes=3)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=LR, momentum=MOMENTUM)


def sides_of_block(number: int) -> dict[str, list[tuple[str, int, int]]]:
    """Two heads of sixteen, and 64 units between two linear layers."""
    block = f"model.vit.layers.{number}"
    into_heads = [(f"{block}.attention.{x}_proj.{kind}", 0, 16) for x in "qkv" for kind in ("weight", "bias")]
    return {
        f"{block}.heads": [*into_heads, (f"{block}.attention.o_proj.weight", 1, 16)],
        f"{block}.ffn": [
            (f"{block}.mlp.fc1.weight", 0, 1),
            (f"{block}.mlp.fc1.bias", 0, 1),
            (f"{block}.mlp.fc2.weight", 1, 1),
        ],
    }


def sides_of_norm(name: str) -> list[tuple[str, int, int]]:
    return [(f"{name}.{kind}", 0, 1) for kind in ("weight", "bias", "running_mean", "running_var")]


@dataclass(frozen=True)
class Case:
    """A model, the shape of one sample, what is kept of which axis, what has that axis, and what has no gradient at all."""

    make: Callable[[], LightningModule]
    sample: tuple[int, ...]
    kept: Mapping[str, list[int]]
    sides: Sides
    idle: tuple[str, ...] = ()


CASES = {
    "MLP": Case(
        lambda: MLP(6, (7, 5), 3, lr=LR, momentum=MOMENTUM),
        (6,),
        {"layers.1": [0, 2, 3, 6], "layers.3": [1, 4]},
        {
            "layers.1": [("layers.1.weight", 0, 1), ("layers.1.bias", 0, 1), ("layers.3.weight", 1, 1)],
            "layers.3": [("layers.3.weight", 0, 1), ("layers.3.bias", 0, 1), ("layers.5.weight", 1, 1)],
        },
    ),
    "CNN with batch norm": Case(
        lambda: CNN(2, 8, (4, 5), (6, 4), 3, lr=LR, momentum=MOMENTUM, batch_norm=True),
        (2, 8, 8),
        {"conv1": [0, 3], "conv2": [1, 2, 4], "fc1": [0, 1, 5], "fc2": [2, 3]},
        {
            "conv1": [("conv1.weight", 0, 1), ("conv1.bias", 0, 1), *sides_of_norm("norm1"), ("conv2.weight", 1, 1)],
            # after two poolings 2 x 2 pixels of each channel are left, side by side
            "conv2": [("conv2.weight", 0, 1), ("conv2.bias", 0, 1), *sides_of_norm("norm2"), ("fc1.weight", 1, 4)],
            "fc1": [("fc1.weight", 0, 1), ("fc1.bias", 0, 1), ("fc2.weight", 1, 1)],
            "fc2": [("fc2.weight", 0, 1), ("fc2.bias", 0, 1), ("fc3.weight", 1, 1)],
        },
        idle=("conv1.bias", "conv2.bias"),  # the norm after it takes the mean away
    ),
    "ViT": Case(
        SmallViT,
        (3, 8, 8),
        {
            "model.vit.layers.0.heads": [1],
            "model.vit.layers.1.heads": [0],
            "model.vit.layers.0.ffn": list(range(0, 64, 3)),
            "model.vit.layers.1.ffn": list(range(40, 64)),
        },
        {**sides_of_block(0), **sides_of_block(1)},
        # moves every score of a query alike, which softmax does not see
        idle=tuple(f"model.vit.layers.{number}.attention.k_proj.bias" for number in range(2)),
    ),
}


def masks_by_hand(case: Case, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return which elements of each tensor are kept: True, but for rows and columns of dropped units."""
    masks = {name: torch.ones(tensor.shape, dtype=torch.bool) for name, tensor in tensors.items()}
    for axis, sides in case.sides.items():
        for name, dim, unit in sides:
            for i in range(tensors[name].shape[dim] // unit):
                if i not in case.kept[axis]:
                    masks[name].narrow(dim, i * unit, unit).fill_(False)
    return masks


def masked_training(
    module: LightningModule, masks: Mapping[str, Tensor], todo: list[tuple[Tensor, Tensor]]
) -> dict[str, Tensor]:
    """Train the full model with zeros in the place of what is dropped; return its values, running statistics included.

    ``g = mask * grad L(mask * theta);  v <- momentum v + g;  theta <- theta - lr mask * v``
    """
    module.train()
    theta = {name: p.detach().clone() for name, p in module.named_parameters()}
    velocity = {name: torch.zeros_like(value) for name, value in theta.items()}
    for x, y in todo:
        used = {name: (value * masks[name]).requires_grad_() for name, value in theta.items()}
        loss = F.cross_entropy(functional_call(module, used, (x,)), y)
        gradients = torch.autograd.grad(loss, list(used.values()))
        for name, gradient in zip(used, gradients, strict=True):
            velocity[name] = MOMENTUM * velocity[name] + masks[name] * gradient
            theta[name] = theta[name] - LR * (masks[name] * velocity[name])
    return {**theta, **{name: b.detach() for name, b in module.named_buffers()}}


@pytest.fixture(params=CASES)
def case(request) -> Case:
    if request.param == "ViT":
        pytest.importorskip("transformers")
    return CASES[request.param]


@pytest.fixture
def data(case) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(NUM_SAMPLES, *case.sample, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.randint(3, (NUM_SAMPLES,), generator=generator))


@pytest.fixture
def bench(case, data) -> Bench:
    """The real trainer, and values of which none is exactly zero or one."""
    bench = Bench.of(lambda: case.make().double(), data=data)
    generator = torch.Generator().manual_seed(0)
    for name, tensor in bench.module.state_dict().items():
        if tensor.is_floating_point():
            tensor.add_(0.1 * torch.randn(tensor.shape, generator=generator, dtype=torch.float64))
            assert "running_var" not in name or tensor.min() > 0
    bench.values = bench.submodels.state(bench.module)
    return bench


def test_the_trained_shrunk_model_is_the_full_one_trained_with_its_mask(case, bench, data):
    spec = Spec.select(case.kept)
    before = {name: tensor.clone() for name, tensor in bench.values.items()}
    masks = masks_by_hand(case, before)
    task = assignment(spec, steps=STEPS)

    update, trained = bench.run(task)
    merged = FlatTensors.from_named(before, bench.values.layout)
    bench.submodels.plan(spec, "trained").scatter_(merged, trained)
    expected = masked_training(bench.module, masks, list(batches(task.seed, steps=STEPS, data=data)))

    assert update.num_steps == STEPS
    for name in bench.submodels.layout(part="trained").by_name:
        kept, after = masks[name], merged[name]
        torch.testing.assert_close(after[kept], expected[name][kept], **CLOSE)
        assert torch.equal(after[~kept], before[name][~kept])
        if "running" not in name:
            assert torch.equal(expected[name][~kept], before[name][~kept])
        if name not in case.idle:
            assert (after[kept] - before[name][kept]).abs().max() > 1e-3
