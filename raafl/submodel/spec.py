"""Specify a submodel: which units of each axis, which blocks, which parameters train, which exits, which precision of the base."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from raafl.errors import BadInput, nearest

Kept = range | tuple[int, ...]
"""Kept indices of an axis: a contiguous range, or increasing indices that are not contiguous."""


class SpecError(BadInput):
    """Raised for a submodel that does not fit the model; the message names the axis, the value and the remedy."""


@dataclass(frozen=True, slots=True)
class Spec:
    """Description of one submodel: the units, blocks and exits that it keeps, and the parameters that train.

    `FULL` is the whole model. A spec is hashable; build one with `Spec.select`. Fields are sorted by name, and
    contiguous indices are stored as a range.

    Attributes:
        kept: pairs ``(axis, indices)`` of the units that are kept; an axis that is not named is kept whole.
        blocks: pairs ``(stack, indices)`` of the blocks that are present; a stack that is not named is kept whole.
        trained: names of the parameters that train, or of modules that contain them; None = all that the model trains.
        exits: names of the exits (output heads) that are present; None = all.
        base: precision of the frozen parameters (`raafl.submodel.frozen`); None = the model's own, or not chosen yet.
    """

    kept: tuple[tuple[str, Kept], ...] = ()
    blocks: tuple[tuple[str, Kept], ...] = ()
    trained: tuple[str, ...] | None = None
    exits: tuple[str, ...] | None = None
    base: str | None = None
    _hash: int = field(init=False, repr=False, compare=False, default=0)

    def __post_init__(self) -> None:
        """Normalise the fields; raise `SpecError` for an empty selection, a bad index, or a name given twice."""
        put = object.__setattr__
        put(self, "kept", _pairs("axis", self.kept))
        put(self, "blocks", _pairs("blocks of", self.blocks))
        put(self, "trained", None if self.trained is None else tuple(sorted(set(self.trained))))
        put(self, "exits", None if self.exits is None else tuple(sorted(set(self.exits))))
        # compute the hash once: specs are keys of many caches, and may have long index lists
        put(self, "_hash", hash((self.kept, self.blocks, self.trained, self.exits, self.base)))

    @classmethod
    def select(
        cls,
        kept: Mapping[str, Iterable[int]] | None = None,
        *,
        blocks: Mapping[str, Iterable[int]] | None = None,
        trained: Iterable[str] | None = None,
        exits: Iterable[str] | None = None,
    ) -> Spec:
        """Return the submodel that keeps the given units, such as ``Spec.select({"fc1": range(40)}, trained=["fc2"])``.

        Args:
            kept: indices of the units to keep, by axis; other axes stay whole. None = all axes stay whole.
            blocks: indices of the blocks to keep, by stack; other stacks stay whole. None = all stacks stay whole.
            trained: names of the layers that train; None = all.
            exits: names of the exits to keep; None = all.
        """
        return cls(
            tuple((kept or {}).items()),  # type: ignore[arg-type]  # normalised on construction
            tuple((blocks or {}).items()),  # type: ignore[arg-type]
            None if trained is None else tuple(trained),
            None if exits is None else tuple(exits),
        )

    def __hash__(self) -> int:
        """Return the hash that was computed at construction."""
        return self._hash

    @property
    def is_full(self) -> bool:
        """Whether this is the whole model, with all parameters training that the model itself trains."""
        return self is FULL or self == FULL

    @property
    def leading(self) -> Spec:
        """The submodel that keeps the first units of each axis, as many as this one keeps; it costs the same."""
        kept = tuple((name, range(len(indices))) for name, indices in self.kept)
        return Spec(kept, self.blocks, self.trained, self.exits, self.base)

    @property
    def without_base(self) -> Spec:
        """The same submodel with no precision named for its frozen parameters, since training and merging ignore it."""
        return self if self.base is None else replace(self, base=None)

    def indices(self, axis: str) -> Kept | None:
        """Return the indices of the kept units of ``axis``; None if it is kept whole."""
        return next((indices for name, indices in self.kept if name == axis), None)

    def __str__(self) -> str:
        """Describe the spec briefly: ``full``, or ``fc1[0:40] conv1[3 of them] blocks[0,2] trains fc2 on nf4``.

        More than four axes with equal units are counted: ``12 axes[0:8]``.
        """
        alike: dict[str, list[str]] = {}
        for name, kept in self.kept:
            is_run = isinstance(kept, range) and kept.step == 1
            alike.setdefault(f"[{kept[0]}:{kept[-1] + 1}]" if is_run else f"[{len(kept)} of them]", []).append(name)
        words: list[str] = []
        for which, axes in alike.items():
            words += [f"{len(axes)} axes{which}"] if len(axes) > 4 else [name + which for name in axes]
        words += [f"{name}[{','.join(map(str, kept))}]" for name, kept in self.blocks]
        for verb, names in (("trains", self.trained), ("exits", self.exits)):
            if names is not None:
                words.append(f"{verb} {','.join(names) or 'nothing'}")
        return (" ".join(words) or "full") + ("" if self.base is None else f" on {self.base}")

    def to_json(self) -> dict[str, Any]:
        """Return the spec as plain data; the whole model is ``{}``."""
        data: dict[str, Any] = {}
        for name, pairs in (("kept", self.kept), ("blocks", self.blocks)):
            if pairs:
                data[name] = {
                    key: {"range": [k.start, k.stop]} if isinstance(k, range) else list(k) for key, k in pairs
                }
        for name, names in (("trained", self.trained), ("exits", self.exits)):
            if names is not None:
                data[name] = list(names)
        return data if self.base is None else {**data, "base": self.base}

    @classmethod
    def from_json(cls, data: object) -> Spec:
        """Restore a spec from the result of `to_json`.

        Raises:
            SpecError: ``data`` has another form; the message names the field.
        """
        if not isinstance(data, dict):
            raise SpecError(
                f"spec is {str(data)[:80]!r}: give an object such as {{'kept': {{'fc1': {{'range': [0, 40]}}}}}}"
            )
        unknown = sorted(set(data) - {"kept", "blocks", "trained", "exits", "base"})
        if unknown:
            raise SpecError(f"spec has the field '{unknown[0]}': use kept, blocks, trained, exits or base")
        base = data.get("base")
        if base is not None and not isinstance(base, str):
            raise SpecError(f"spec.base is {str(base)[:80]!r}: give the name of a precision, such as bf16")
        return cls(
            _read_pairs("kept", data.get("kept", {})),
            _read_pairs("blocks", data.get("blocks", {})),
            _read_names("trained", data.get("trained")),
            _read_names("exits", data.get("exits")),
            base,
        )


def _pairs(what: str, pairs: Iterable[tuple[str, Iterable[int]]]) -> tuple[tuple[str, Kept], ...]:
    result = sorted(((name, _normal(what, name, indices)) for name, indices in pairs), key=lambda pair: pair[0])
    for (name, _), (following, _) in pairwise(result):
        if name == following:
            raise SpecError(f"spec names {what} '{name}' twice: join the indices")
    return tuple(result)


def _normal(what: str, name: str, indices: Iterable[int]) -> Kept:
    if not (isinstance(indices, range) and indices.step == 1):
        indices = tuple(sorted(map(int, indices)))
        if len(set(indices)) < len(indices):
            twice = next(index for index, following in pairwise(indices) if index == following)
            raise SpecError(f"spec keeps index {twice} of {what} '{name}' twice: give each index once")
    if len(indices) == 0:
        raise SpecError(f"spec keeps nothing of {what} '{name}': keep at least one index")
    if indices[0] < 0:
        raise SpecError(f"spec keeps index {indices[0]} of {what} '{name}': give indices from 0")
    if indices[-1] - indices[0] == len(indices) - 1:
        return range(indices[0], indices[-1] + 1)
    return indices


def _is_index(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**40


def _read_pairs(field_name: str, data: object) -> tuple[tuple[str, Kept], ...]:
    if not isinstance(data, dict):
        raise SpecError(f"spec.{field_name} is {str(data)[:80]!r}: give an object that maps names to indices")
    pairs: list[tuple[str, Kept]] = []
    for name, value in data.items():
        bounds = value.get("range") if isinstance(value, dict) and len(value) == 1 else None
        if isinstance(bounds, list) and len(bounds) == 2 and all(map(_is_index, bounds)):
            pairs.append((str(name), range(*bounds)))
        elif isinstance(value, list) and all(map(_is_index, value)):
            pairs.append((str(name), tuple(value)))
        else:
            raise SpecError(
                f"spec.{field_name}['{name}'] is {str(value)[:80]!r}: give {{'range': [start, stop]}} or a list "
                "of indices"
            )
    return tuple(pairs)


def _read_names(field_name: str, data: object) -> tuple[str, ...] | None:
    if data is None:
        return None
    if not isinstance(data, list) or not all(isinstance(name, str) for name in data):
        raise SpecError(f"spec.{field_name} is {str(data)[:80]!r}: give a list of names")
    return tuple(data)


def runs(kept: Kept) -> list[tuple[int, int]]:
    """Return the longest contiguous ranges ``[start, stop)`` in a list of increasing indices."""
    if isinstance(kept, range):
        return [(kept.start, kept.stop)]
    starts = [0, *(i + 1 for i, (a, b) in enumerate(pairwise(kept)) if b != a + 1), len(kept)]
    return [(kept[a], kept[b - 1] + 1) for a, b in pairwise(starts)]


FULL = Spec()
"""The whole model."""


Runs = list[tuple[int, int]]
Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Member:
    """One tensor dimension of an axis (a group of dimensions that shrink together when units, such as neurons, are dropped).

    Unit i of the axis covers the elements ``offset + [i * unit, (i + 1) * unit)`` of the dimension.
    """

    name: str  # name of the parameter or buffer
    dim: int  # index of the dimension, from 0
    unit: int = 1  # number of elements for each unit of the axis, as the width of an attention head
    offset: int = 0  # element at which unit 0 begins, as the start of k in a fused qkv tensor


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


class AxisTable:
    """All axes of a model (groups of tensor dimensions that shrink together), checked against its tensors."""

    def __init__(self, axes: Iterable[Axis], shapes: Shapes) -> None:
        """Store the axes; raise `SpecError` for a member that exceeds its tensor or overlaps another axis."""
        self.axes = {axis.name: axis for axis in axes}
        self.shapes = shapes
        self._places: dict[tuple[str, int], list[tuple[int, int, Axis]]] = {}
        for axis in self.axes.values():
            for member in axis.members:
                check_member(axis, member, shapes)
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


def check_member(axis: Axis, member: Member, shapes: Shapes) -> None:
    """Raise `SpecError` if a member of an axis does not fit its tensor."""
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
