"""Rank units by the size of their weights."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from raafl.errors import BadInput
from raafl.parts.select.units import Axes, Rate, counts, size_of, spec_of
from raafl.submodel import Axis, Spec, Stack
from raafl.submodel.flat import reals

State = Mapping[str, Tensor]
"""Tensors of the full model by name; tensors that are left out, such as running statistics, do not count."""


def magnitude(axes: Axes, rate: Rate, *, state: State | None = None, seed: int = 0, round: int = 0) -> Spec:
    """Select the units with the largest L2 norm of all their weights (for an attention head: q, k, v and o).

    Raises:
        BadInput: ``state`` is None, or lacks a parameter of an axis.
    """
    if state is None:
        raise BadInput("state is None, but units are chosen by importance: give the model's parameters")
    units = {}
    for name, number in counts(axes, rate).items():
        scores = unit_scores(axes[name], state)
        # a stable sort: among units of equal norm the first wins, on every machine
        units[name] = torch.sort(scores, descending=True, stable=True).indices[:number].tolist()
    return spec_of(axes, units)


@torch.no_grad()
def unit_scores(axis: Axis | Stack, state: State, *, squared: bool = True) -> Tensor:
    """Return a score for each unit, such as a neuron: the sum of its weights' squares, shape (size,), float64, on the CPU.

    Raises:
        BadInput: ``state`` has no tensor that lies on the axis.
    """
    scores = torch.zeros(size_of(axis), dtype=torch.float64)
    has_tensor = False
    if isinstance(axis, Stack):
        blocks = {axis.block(i): i for i in range(len(axis))}
        for name, tensor in state.items():
            block = next((i for path, i in blocks.items() if name.startswith(f"{path}.")), None)
            if block is not None:
                scores[block] += _sums(tensor.reshape(1, -1), squared).item()
                has_tensor = True
    else:
        for member in axis.members:
            if member.name in state:
                tensor = state[member.name].narrow(member.dim, member.offset, member.unit * axis.size)
                scores += _sums(tensor.movedim(member.dim, 0).reshape(axis.size, -1), squared)
                has_tensor = True
    if not has_tensor:
        named = axis.path if isinstance(axis, Stack) else axis.name
        raise BadInput(f"state has no tensor on the axis '{named}': give the model's parameters by name")
    return scores


def _sums(rows: Tensor, squared: bool) -> Tensor:
    # float32 elements, float64 sums: half precision would overflow in the squares, and long sums would lose small terms
    rows = reals(rows.detach()).flatten(1).float()
    return (rows.square() if squared else rows).sum(1, dtype=torch.float64).cpu()
