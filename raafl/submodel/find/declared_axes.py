"""Read the axes that a model declares, without tracing it, and leave out those that overlap."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from raafl.submodel.spec import Axis, Member, Shapes, SpecError, check_member


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
        # a tied tensor may be declared under both of its names
        unique = tuple(dict.fromkeys(members))
        axes.append(Axis(name, _size(name, unique, shapes), unique))
    return axes


def _size(axis: str, members: Sequence[Member], shapes: Shapes) -> int:
    """Return the number of units of an axis: the largest that fits into the dimension of each member."""
    sizes: dict[tuple[str, int], int] = {}
    for member in members:
        check_member(Axis(axis, 1, ()), member, shapes)
        together = [m for m in members if (m.name, m.dim) == (member.name, member.dim)]
        room = shapes[member.name][member.dim] - min(m.offset for m in together)
        sizes[member.name, member.dim] = room // sum(m.unit for m in together)
    if not sizes:
        raise SpecError(f"axis '{axis}' is declared without members: give at least one (parameter name, dim)")
    # the smallest size counts: if only q of a fused qkv tensor is on the axis, the dimension has room for more units
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
