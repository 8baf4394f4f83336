"""Models that the submodel tests cut: one for each way in which layers couple."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from model_zoo import CNN, MLP
from raafl.submodel import FlatTensors, Spec, Submodels


class WrongAxes(MLP):
    """Says that its classes may shrink."""

    def submodel_axes(self) -> dict[str, list[tuple[str, int]]]:
        return {
            "hidden": [("layers.1.weight", 0), ("layers.1.bias", 0), ("layers.3.weight", 1)],
            "classes": [("layers.3.weight", 0), ("layers.3.bias", 0)],
        }


class Residual(nn.Module):
    """A stem, two residual blocks with batch norm, a mean over the pixels; all of them share one width."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, padding=1)
        self.conv1 = nn.Conv2d(6, 5, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(5)
        self.conv2 = nn.Conv2d(5, 6, 1)
        self.depthwise = nn.Conv2d(6, 6, 3, padding=1, groups=6)
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = x + self.conv2(F.relu(self.norm1(self.conv1(x))))
        x = F.relu(x + self.depthwise(x))
        return self.head(x.mean((2, 3)))


class Groups(nn.Module):
    """Group norm and a grouped convolution over three groups of two channels: channels can only go in twos."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3)
        self.norm = nn.GroupNorm(3, 6)
        self.grouped = nn.Conv2d(6, 6, 1, groups=3)
        self.head = nn.Linear(6 * 36, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.flatten(F.gelu(self.grouped(self.norm(self.conv(x)))), 1))


class Tied(nn.Module):
    """Token scores from a tied embedding: one tensor, whose width is an axis and whose vocabulary is not."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.position = nn.Parameter(torch.randn(5, 6))
        self.up = nn.Linear(6, 8)
        self.down = nn.Linear(8, 6)
        self.score = nn.Linear(6, 11, bias=False)
        self.score.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.position
        return self.score(x + self.down(torch.tanh(self.up(x))))


class FusedAttention(nn.Module):
    """Four query heads in two groups, one key and value head for each group, all in one projection."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(5, 4 * 3 + 2 * 3 + 2 * 3)
        self.out = nn.Linear(4 * 3, 4)

    def forward(self, x: Tensor) -> Tensor:
        groups = self.qkv.out_features // 12
        q, k, v = self.qkv(x).split([groups * 6, groups * 3, groups * 3], -1)
        q = q.unflatten(-1, (groups, 2, 3)).permute(0, 2, 3, 1, 4)
        k, v = (part.unflatten(-1, (groups, 1, 3)).permute(0, 2, 3, 1, 4) for part in (k, v))
        return self.out((torch.softmax(q @ k.transpose(-1, -2), -1) @ v).permute(0, 3, 1, 2, 4).flatten(2))

    def submodel_axes(self) -> dict[str, list[tuple[str, int, int, int]]]:
        fused = [
            (name, 0, unit, offset)
            for name in ("qkv.weight", "qkv.bias")
            for unit, offset in ((6, 0), (3, 12), (3, 18))
        ]
        return {"heads": [*fused, ("out.weight", 1, 6, 0)]}


class Declared(nn.Module):
    """A forward that cannot be traced, and says its axes itself."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2, self.fc3 = nn.Linear(8, 7), nn.Linear(7, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 1e9:
            return x
        return self.fc3(torch.sigmoid(self.fc2(torch.sigmoid(self.fc1(x.flatten(1))))))

    def submodel_axes(self) -> dict[str, list[tuple[str, int]]]:
        return {
            "first": [("fc1.weight", 0), ("fc1.bias", 0), ("fc2.weight", 1)],
            "second": [("fc2.weight", 0), ("fc2.bias", 0), ("fc3.weight", 1)],
        }


class Blocks(nn.Module):
    """A stack of blocks, any of which may be absent."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = nn.ModuleList(nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4)) for _ in range(4))
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.stack:
            x = x + block(x)
        return self.head(x)

    def submodel_blocks(self) -> dict[str, str]:
        return {"depth": "stack"}


@dataclass(frozen=True)
class Case:
    """A model, an input for it, and the axes it is known to have."""

    make: Callable[[], nn.Module]
    inputs: Callable[[], Tensor]
    axes: Mapping[str, int]


CASES = {
    "mlp1": Case(lambda: MLP(8, (7,), 3), lambda: torch.randn(4, 2, 4), {"layers.1": 7}),
    "mlp2": Case(lambda: MLP(8, (7, 5), 3, dropout=0.5), lambda: torch.randn(4, 8), {"layers.1": 7, "layers.4": 5}),
    "mlp3": Case(
        lambda: MLP(8, (4, 6, 5), 3), lambda: torch.randn(4, 8), {"layers.1": 4, "layers.3": 6, "layers.5": 5}
    ),
    "cnn": Case(
        lambda: CNN(2, 8, (3, 5), (6, 4), 3),
        lambda: torch.randn(4, 2, 8, 8),
        {"conv1": 3, "conv2": 5, "fc1": 6, "fc2": 4},
    ),
    "cnn_norm": Case(
        lambda: CNN(2, 8, (3, 5), (6, 4), 3, batch_norm=True),
        lambda: torch.randn(4, 2, 8, 8),
        {"conv1": 3, "conv2": 5, "fc1": 6, "fc2": 4},
    ),
    "residual": Case(Residual, lambda: torch.randn(4, 3, 5, 5), {"stem": 6, "conv1": 5}),
    "groups": Case(Groups, lambda: torch.randn(4, 3, 8, 8), {"conv": 3}),
    "tied": Case(Tied, lambda: torch.randint(0, 11, (4, 5)), {"embed": 6, "up": 8}),
    "fused": Case(FusedAttention, lambda: torch.randn(4, 6, 5), {"heads": 2}),
    "declared": Case(Declared, lambda: torch.randn(4, 8), {"first": 7, "second": 5}),
}


def built(name: str) -> tuple[nn.Module, Submodels, FlatTensors]:
    """A model in evaluation mode with random parameters and running statistics, its submodels, and its state."""
    torch.manual_seed(0)
    module = CASES[name].make().eval()
    with torch.no_grad():
        for tensor in [*module.parameters(), *(b for b in module.buffers() if b.is_floating_point())]:
            tensor.uniform_(0.2, 1.0)
            tensor.mul_(torch.randint(0, 2, tensor.shape) * 2 - 1 if tensor.dim() > 1 else 1)
        for buffer in module.buffers():
            if not buffer.is_floating_point():
                buffer.fill_(3)
    submodels = Submodels(module, [CASES[name].inputs()])
    return module, submodels, submodels.state(module)


@st.composite
def specs(draw: st.DrawFn, axes: Mapping[str, int]) -> Spec:
    """Any spec over these axes: each whole, a range, or any list of indices."""
    kept = {}
    for name, size in axes.items():
        how = draw(st.sampled_from(["whole", "range", "list"]))
        if how == "range":
            start = draw(st.integers(0, size - 1))
            kept[name] = range(start, draw(st.integers(start + 1, size)))
        elif how == "list":
            kept[name] = draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=size, unique=True))
    return Spec.select(kept)


named_specs = st.sampled_from(sorted(CASES)).flatmap(lambda name: st.tuples(st.just(name), specs(CASES[name].axes)))


def slow_masks(submodels: Submodels, spec: Spec) -> dict[str, Tensor]:
    """What a spec keeps of each tensor, element by element: the obvious reference."""
    full = submodels.layout()
    masks = {entry.name: torch.ones(entry.shape, dtype=torch.bool) for entry in full.entries}
    for axis in submodels.axes.values():
        kept = spec.indices(axis.name)
        for index in range(axis.size) if kept is not None else ():
            for member in axis.members if index not in kept else ():
                start = member.offset + index * member.unit
                masks[member.name].narrow(member.dim, start, member.unit).fill_(False)
    return masks
