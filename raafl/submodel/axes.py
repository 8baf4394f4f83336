"""Axes: sets of coupled tensor dimensions that shrink together, and what a spec keeps of each tensor."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from raafl.errors import nearest
from raafl.submodel.spec import Kept, Spec, SpecError, runs

Runs = list[tuple[int, int]]
Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Member:
    """One tensor dimension of an axis (a group of dimensions that shrink together when units, such as neurons, are dropped).

    Unit i of the axis covers the elements ``offset + [i * unit, (i + 1) * unit)`` of the dimension.
    """

    name: str  # name of the parameter or buffer that has the dimension
    dim: int  # index of the dimension, from 0
    unit: int = 1  # number of elements for each unit of the axis, such as the width of an attention head
    offset: int = 0  # element at which unit 0 begins, such as the beginning of k in a fused qkv tensor


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis: tensor dimensions that shrink together. Each of its ``size`` units is kept or dropped in all of them at once.

    An example is a hidden layer: a neuron lies in its own layer's weight and bias, and in the next layer's weight.
    Several ``members`` may lie on one dimension (q, k and v in one tensor). Elements that no member covers are always
    kept.
    """

    name: str
    size: int
    members: tuple[Member, ...]


def without_overlaps(axes: Sequence[Axis]) -> tuple[list[Axis], dict[str, str]]:
    """Leave out axes that have elements of another one with more members, as two ways to find heads may propose.

    Returns:
        Axes that are left, in their order, and the reason for each axis that is not, by name.
    """
    taken: dict[tuple[str, int], list[tuple[int, int, Axis]]] = {}
    reasons: dict[str, str] = {}
    for axis in sorted(axes, key=lambda axis: -len(axis.members)):
        ranges = [(member, member.offset, member.offset + member.unit * axis.size) for member in axis.members]
        for member, start, stop in ranges:
            others = taken.get((member.name, member.dim), [])
            for other in (other for first, last, other in others if start < last and first < stop):
                reasons.setdefault(axis.name, f"axis '{other.name}' has elements of its '{member.name}', too")
        if axis.name not in reasons:
            for member, start, stop in ranges:
                taken.setdefault((member.name, member.dim), []).append((start, stop, axis))
    return [axis for axis in axes if axis.name not in reasons], reasons


class AxisTable:
    """All axes of a model (groups of tensor dimensions that shrink together), checked against its tensors."""

    def __init__(self, axes: Iterable[Axis], shapes: Shapes) -> None:
        """Validate each axis; raise `SpecError` for a member outside its tensor, or on elements of another axis."""
        self.axes = {axis.name: axis for axis in axes}
        self.shapes = shapes
        self._places: dict[tuple[str, int], list[tuple[int, int, Axis]]] = {}
        for axis in self.axes.values():
            for member in axis.members:
                _check(axis, member, shapes)
                place = (member.offset, member.unit, axis)
                self._places.setdefault((member.name, member.dim), []).append(place)
        for (name, dim), places in self._places.items():
            places.sort(key=lambda place: place[0])
            for (offset, unit, axis), (following, _, other) in pairwise(places):
                if offset + unit * axis.size > following:
                    raise SpecError(
                        f"axes '{axis.name}' and '{other.name}' both have element {following} of dimension {dim} of "
                        f"'{name}': give each element one axis, or join the two"
                    )

    def check(self, spec: Spec) -> None:
        """Raise `SpecError` if the submodel ``spec`` names an axis or a unit that the model does not have."""
        for name, kept in spec.kept:
            axis = self.axes.get(name)
            if axis is None:
                none = "it has none: declare `submodel_axes` on the model, or train the full model"
                raise SpecError(
                    f"spec keeps indices of axis '{name}', which this model does not have; {nearest(name, self.axes, none)}"
                )
            if kept[-1] >= axis.size:
                raise SpecError(
                    f"spec keeps index {kept[-1]} of axis '{name}', which has {axis.size} units: give indices below {axis.size}"
                )

    def is_whole(self, name: str, kept: Kept) -> bool:
        """Check whether ``kept`` contains all units of the axis."""
        return len(kept) == self.axes[name].size

    def lengths(self, spec: Spec) -> dict[str, dict[int, int]]:
        """Return the remaining length of each dimension that a submodel shrinks, by tensor and dimension."""
        result: dict[str, dict[int, int]] = {}
        for axis, indices in spec.kept:
            gone = self.axes[axis].size - len(indices)
            for member in self.axes[axis].members if gone else ():
                dims = result.setdefault(member.name, {})
                dims[member.dim] = dims.get(member.dim, self.shapes[member.name][member.dim]) - gone * member.unit
        return result

    def selections(self, spec: Spec) -> dict[str, dict[int, Runs]]:
        """Return the elements that a submodel keeps, as ranges, by tensor and dimension; only for dimensions that shrink."""
        kept = {name: runs(indices) for name, indices in spec.kept if not self.is_whole(name, indices)}
        touched = dict.fromkeys((m.name, m.dim) for name in kept for m in self.axes[name].members)
        result: dict[str, dict[int, Runs]] = {}
        for name, dim in touched:
            result.setdefault(name, {})[dim] = _elements(self._places[name, dim], kept, self.shapes[name][dim])
        return result


def _elements(places: Sequence[tuple[int, int, Axis]], kept: Mapping[str, Runs], length: int) -> Runs:
    pieces: Runs = []
    end = 0
    for offset, unit, axis in places:
        pieces.append((end, offset))
        end = offset + unit * axis.size
        for start, stop in kept.get(axis.name, [(0, axis.size)]):
            pieces.append((offset + start * unit, offset + stop * unit))
    pieces.append((end, length))
    joined: Runs = []
    for start, stop in pieces:
        if start == stop:
            continue
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return joined


def _check(axis: Axis, member: Member, shapes: Shapes) -> None:
    name, dim, unit, offset = member.name, member.dim, member.unit, member.offset
    shape = shapes.get(name)
    if shape is None:
        raise SpecError(
            f"axis '{axis.name}' names the tensor '{name}', but the model has no such parameter or buffer; "
            f"{nearest(name, shapes)}"
        )
    if not 0 <= dim < len(shape):
        raise SpecError(
            f"axis '{axis.name}' names dimension {dim} of '{name}', but its shape is {shape}: give a dimension from 0 to "
            f"{len(shape) - 1}"
        )
    if unit < 1 or offset < 0 or axis.size < 1:
        raise SpecError(
            f"axis '{axis.name}' has size {axis.size}, and unit {unit} and offset {offset} in '{name}': unit and size must "
            "be 1 or more, offset 0 or more"
        )
    end = offset + unit * axis.size
    if end > shape[dim]:
        raise SpecError(
            f"axis '{axis.name}' with unit {unit} and offset {offset} ends at element {end} of {shape[dim]} in dimension "
            f"{dim} of '{name}': lower unit or offset, or give the axis fewer than {axis.size} indices"
        )


def declared_axes(declaration: Mapping[str, Any], shapes: Shapes, aliases: Mapping[str, str]) -> list[Axis]:
    """Read the axes that a model declares in `submodel_axes`, as plain data.

    `declaration`: tensor dimensions of each axis, by the axis's name: ``(name, dim)``, ``(name, dim, unit)`` or
    ``(name, dim, unit, offset)``. The size of the axis follows from the shapes. `Axis` objects are taken as they are.
    `shapes`: shape of every parameter and buffer.
    `aliases`: names of tied tensors, each mapped to the tensor's name in ``shapes``.

    Raises:
        SpecError: an entry has another form or names an unknown tensor, or the dimensions of an axis have different
            sizes.
    """
    axes = []
    for name, value in declaration.items():
        if isinstance(value, Axis):
            axes.append(value)
            continue
        members = []
        for item in value:
            if not (2 <= len(item) <= 4 and isinstance(item[0], str) and all(type(i) is int for i in item[1:])):
                raise SpecError(
                    f"axis '{name}' is declared with {item!r}: give (parameter name, dim[, unit[, offset]])"
                )
            members.append(Member(aliases.get(item[0], item[0]), *item[1:]))
        # a tied tensor named twice is one member
        unique = tuple(dict.fromkeys(members))
        axes.append(Axis(name, _size(name, unique, shapes), unique))
    return axes


def _size(axis: str, members: Sequence[Member], shapes: Shapes) -> int:
    """Return the one size at which the members fill their dimensions; parts that belong to no member may follow."""
    sizes: dict[tuple[str, int], int] = {}
    for member in members:
        _check(Axis(axis, 1, ()), member, shapes)
        together = [m for m in members if (m.name, m.dim) == (member.name, member.dim)]
        room = shapes[member.name][member.dim] - min(m.offset for m in together)
        sizes[member.name, member.dim] = room // sum(m.unit for m in together)
    if not sizes:
        raise SpecError(f"axis '{axis}' is declared without members: give at least one (parameter name, dim)")
    # a dimension that only partly is on the axis (q, k, v with only q) has room for more units: the smallest counts
    size = min(sizes.values())
    for (name, dim), found in sizes.items():
        alone = sum((m.name, m.dim) == (name, dim) for m in members) == 1 and all(
            m.offset == 0 for m in members if (m.name, m.dim) == (name, dim)
        )
        if alone and found != size:
            raise SpecError(
                f"axis '{axis}' has {found} indices in dimension {dim} of '{name}' but {size} in another: all "
                "dimensions of an axis must have the same size; if an index stands for several elements, give their number as unit"
            )
    return size
