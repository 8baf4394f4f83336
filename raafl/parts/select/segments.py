"""Split axes into segments that a mask keeps or drops whole, and emulate masks by gates without cutting (Co-S2P, section IV-A).

A head of an attention is a segment; any other axis, such as the hidden units of a feed-forward part, is split into ranges.

Shapes: a weight is (rows, columns, ...), where columns read the units of an axis; gates are (segments,), one per segment.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from raafl.submodel import Axis, Stack, Submodels
from raafl.submodel.spec import Member


@dataclass(frozen=True, slots=True)
class Segments:
    """Division of one axis into segments, each of which a mask keeps or drops as a whole.

    Segment i contains the units ``bounds[i]`` to ``bounds[i + 1] - 1``.
    """

    bounds: tuple[int, ...]  # first unit of each segment in ascending order, and then the size of the axis
    is_heads: bool = False  # whether the units are attention heads
    # index of the block that contains the axis; None = no single one does, or the model has no stack or several
    block: int | None = None
    can_train: bool = True  # whether a mask over the axis can be trained; see `readers`

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def units(self, chosen: Iterable[int]) -> list[int]:
        """Return the indices of the units in the chosen segments (ranges of an axis's units), ascending."""
        return [unit for i in sorted(chosen) for unit in range(self.bounds[i], self.bounds[i + 1])]


def cuts_of(submodels: Submodels, number: int) -> dict[str, Segments]:
    """Return the segments of each axis, by name: one per attention head, or else ``number`` nearly equal ranges of units."""
    return submodels.cached(
        "segments", number, lambda: {name: _cut(submodels, axis, number) for name, axis in submodels.axes.items()}
    )


def _cut(submodels: Submodels, axis: Axis, number: int) -> Segments:
    stack, is_heads = stack_of(submodels), axis.name.rpartition(".")[2].endswith("heads")
    count = axis.size if is_heads else min(number, axis.size)
    paths = [] if stack is None else [f"{stack.block(i)}." for i in range(len(stack))]
    inside = {next((i for i, path in enumerate(paths) if m.name.startswith(path)), None) for m in axis.members}
    bounds = tuple(i * axis.size // count for i in range(count + 1))
    return Segments(bounds, is_heads, inside.pop() if len(inside) == 1 else None, bool(readers(submodels, axis)))


def stack_of(submodels: Submodels) -> Stack | None:
    """Return the only stack of blocks (such as a transformer's layers) in the model; None if there is none, or several."""
    return next(iter(submodels.stacks.values())) if len(submodels.stacks) == 1 else None


def readers(submodels: Submodels, axis: Axis) -> tuple[Member, ...]:
    """Return the weights that multiply an axis's units, so that zeroing their columns has the effect of removing units.

    The result is empty if no columns have this effect, as for the state of a recurrent layer, or a width over which a
    layer norm computes statistics.
    """
    weights = []
    for member in axis.members:
        path, _, kind = member.name.rpartition(".")
        layer = submodels.module.get_submodule(path)
        plain = isinstance(layer, nn.Linear | _ConvNd) and not isinstance(layer, _ConvTransposeNd)
        if member.dim == 0 and (plain or isinstance(layer, nn.MultiheadAttention | _BatchNorm | nn.GroupNorm)):
            continue
        if not plain or (kind, member.dim) != ("weight", 1) or getattr(layer, "groups", 1) != 1:
            return ()
        if member.name in submodels.aliases.values() or _is_shared(submodels, axis, member):
            return ()
        weights.append(member)
    return tuple(weights)


def _is_shared(submodels: Submodels, axis: Axis, member: Member) -> bool:
    """Check whether another axis is on the same tensor dimension as this member."""
    others = (m for other in submodels.axes.values() if other.name != axis.name for m in other.members)
    return any((m.name, m.dim) == (member.name, member.dim) for m in others)


class Gates:
    """Factors (gates) on segments of units, with which the whole module computes as if some segments were removed.

    A gate multiplies the weights that read its segment's units. With gates of 0 and 1, the loss and the gradients of
    kept parameters equal those of the small module that the mask would give. Gates between 0 and 1 have gradients.
    """

    def __init__(self, module: nn.Module, submodels: Submodels, segments: Mapping[str, Segments]) -> None:
        """Find the weights whose input columns are units of an axis, and map these columns to the axis's segments."""
        self._places: list[tuple[nn.Module, str, Tensor]] = []
        for axis, cut in segments.items():
            layers: dict[str, list[Member]] = {}
            for member in readers(submodels, submodels.axes[axis]):
                layers.setdefault(member.name.rpartition(".")[0], []).append(member)
            for path, members in layers.items():
                layer: Any = module.get_submodule(path)
                self._places.append((layer, axis, _spread(cut, members, layer.weight)))

    @contextmanager
    def set(self, gates: Mapping[str, Tensor]) -> Iterator[None]:
        """Return a context in which the module computes with the given gates (factors on segments of units).

        `gates`: a factor for each segment, shape (segments,), by axis.
        """
        own: list[Any] = [layer._parameters["weight"] for layer, _, _ in self._places]
        try:
            for (layer, axis, spread), weight in zip(self._places, own, strict=True):
                factor = spread[:, :-1] @ gates[axis].to(spread.dtype) + spread[:, -1]
                layer._parameters["weight"] = weight * factor.view(-1, *[1] * (weight.dim() - 2))
            yield
        finally:
            for (layer, _, _), weight in zip(self._places, own, strict=True):
                layer._parameters["weight"] = weight


def _spread(cut: Segments, members: Iterable[Member], weight: Tensor) -> Tensor:
    """Return the one-hot segment of each column of ``weight``, (columns, segments + 1), in which the last is "no segment"."""
    spread = torch.zeros(weight.shape[1], len(cut) + 1, dtype=weight.dtype)
    spread[:, -1] = 1.0
    for member in members:
        for i in range(len(cut)):
            rows = slice(member.offset + cut.bounds[i] * member.unit, member.offset + cut.bounds[i + 1] * member.unit)
            spread[rows, -1], spread[rows, i] = 0.0, 1.0
    return spread.to(weight.device)
