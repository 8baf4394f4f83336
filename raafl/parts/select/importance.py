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
"""Tensors of the full model by name. What is not in it does not count, such as running statistics."""


def magnitude(axes: Axes, rate: Rate, *, state: State | None = None, seed: int = 0, round: int = 0) -> Spec:
    """Return the units with the largest L2 norm over all coupled slices of a unit (for a head: q, k, v and o).

    ``state`` holds the model's parameters; seed and round are ignored.

    Raises:
        BadInput: no state, or no parameter of an axis in it.
    """
    if state is None:
        raise BadInput("state is None: units are chosen by importance, give the model's parameters")
    kept = {}
    for name, number in counts(axes, rate).items():
        scores = unit_scores(axes[name], state)
        # a stable sort: of equals the first
        kept[name] = torch.sort(scores, descending=True, stable=True).indices[:number].tolist()
    return spec_of(axes, kept)


@torch.no_grad()
def unit_scores(axis: Axis | Stack, state: State, *, squared: bool = True) -> Tensor:
    """Return for each unit the sum over its elements, or of their squares; shape (size,), float64, on the CPU.

    Raises:
        BadInput: ``state`` has no parameter of the axis.
    """
    scores = torch.zeros(size_of(axis), dtype=torch.float64)
    found = False
    if isinstance(axis, Stack):
        places = {axis.block(i): i for i in range(len(axis))}
        for name, tensor in state.items():
            place = next((i for path, i in places.items() if name.startswith(f"{path}.")), None)
            if place is not None:
                scores[place] += _sums(tensor.reshape(1, -1), squared).item()
                found = True
    else:
        for member in axis.members:
            if member.name in state:
                tensor = state[member.name].narrow(member.dim, member.offset, member.unit * axis.size)
                scores += _sums(tensor.movedim(member.dim, 0).reshape(axis.size, -1), squared)
                found = True
    if not found:
        named = axis.path if isinstance(axis, Stack) else axis.name
        raise BadInput(f"state has no tensor of the axis '{named}': give the model's parameters by name")
    return scores


def _sums(rows: Tensor, squared: bool) -> Tensor:
    rows = reals(rows.detach()).flatten(1).float()
    return (rows.square() if squared else rows).sum(1, dtype=torch.float64).cpu()
