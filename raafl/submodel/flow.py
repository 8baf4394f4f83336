"""What discovery knows of a value in the traced model: which axis it carries, and where."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import gcd
from typing import Literal

from raafl.submodel.axes import Axis, Member, Shapes

Form = Literal["last", "channels", "flat", "repeat", "tuple", "both"]


@dataclass(frozen=True, slots=True)
class Flow:
    """A value one of whose dimensions is a candidate axis.

    Attributes:
        group: candidate in `Groups`.
        form: where the axis is: the last dimension; dimension 1 with pixels after it; flattened together with the
            pixels after it (index i is a run of elements); the last dimension, which holds the axis several times;
            the last dimension of each tensor in a tuple; or the same where the first tensor holds it twice.
        ndim: number of dimensions, where known; always for channels.
    """

    group: int
    form: Form
    ndim: int = 0


class Groups:
    """Candidate axes while a model is followed: joined when tensors couple them, pinned when they may not shrink."""

    def __init__(self, shapes: Shapes, aliases: Mapping[str, str], *, residual_width: bool = False) -> None:
        """Start with no candidates; ``aliases`` maps other names of tied tensors to the name in ``shapes``.

        With ``residual_width``, a width may shrink though norms take statistics across it.
        """
        self.shapes, self.aliases, self.residual_width = shapes, aliases, residual_width
        self.names: list[str] = []
        self.sizes: list[int] = []
        self._parents: list[int] = []
        self._grains: list[int] = []
        self._members: list[tuple[int, Member]] = []
        self._pinned: dict[int, str] = {}
        self._fixed: dict[tuple[str, int], str] = {}

    def new(self, name: str, size: int) -> int:
        """Return a new candidate with ``size`` indices, or the one that the same layer began before."""
        if name in self.names:
            return self.names.index(name)
        self.names.append(name)
        self.sizes.append(size)
        self._parents.append(len(self._parents))
        self._grains.append(1)
        return len(self.names) - 1

    def find(self, group: int) -> int:
        """Return the candidate that ``group`` is now part of: of those joined, the earliest."""
        while self._parents[group] != group:
            group = self._parents[group]
        return group

    def join(self, one: int, other: int) -> None:
        """Make two candidates of the same size one."""
        first, second = sorted((self.find(one), self.find(other)))
        if first == second:
            return
        self._parents[second] = first
        self._grains[first] = _lcm(self._grains[first], self._grains[second])
        if second in self._pinned:
            self._pinned.setdefault(first, self._pinned[second])

    def pin(self, group: int, reason: str) -> None:
        """Keep the candidate whole, for this reason."""
        self._pinned.setdefault(self.find(group), reason)

    def fix(self, name: str, dim: int, reason: str) -> None:
        """Keep whole every candidate that a dimension of this tensor belongs to."""
        self._fixed.setdefault((self.aliases.get(name, name), dim), reason)

    def coarsen(self, group: int, grain: int) -> None:
        """Drop only whole runs of ``grain`` indices: the channels of a norm group."""
        root = self.find(group)
        self._grains[root] = _lcm(self._grains[root], grain)

    def add(self, group: int, name: str, dim: int, unit: int = 1, offset: int = 0) -> None:
        """Put a tensor dimension on the candidate, ``unit`` elements for each index from ``offset`` on."""
        self._add(group, Member(self.aliases.get(name, name), dim, unit, offset))

    def consume(self, flow: Flow, name: str, dim: int, layer: str) -> None:
        """Put a tensor dimension that a value's last dimension meets on the value's candidate."""
        name = self.aliases.get(name, name)
        if name not in self.shapes:
            self.pin(flow.group, f"'{name}' of layer '{layer}' is not a plain parameter")
            return
        size, length = self.sizes[flow.group], self.shapes[name][dim]
        times = length // size
        if length % size or (flow.form in ("last", "channels") and times != 1):
            self.pin(flow.group, f"layer '{layer}' takes {length} features of a value with {size}")
        elif flow.form == "repeat":
            for i in range(times):
                self._add(flow.group, Member(name, dim, 1, i * size))
        else:
            self._add(flow.group, Member(name, dim, times))

    def _add(self, group: int, member: Member) -> None:
        if member.name not in self.shapes:
            self.pin(group, f"'{member.name}' is not a plain parameter")
        else:
            self._members.append((group, member))

    def settle(self) -> tuple[list[Axis], dict[str, str]]:
        """Return the axes, in the order of their first layers, and why other layers' widths were kept whole."""
        self._couple_shared_tensors()
        members: dict[int, dict[Member, None]] = {}
        for group, member in self._members:
            members.setdefault(self.find(group), {})[member] = None
        axes, whole = [], {}
        for root in dict.fromkeys(map(self.find, range(len(self.names)))):
            grain, size = self._grains[root], self.sizes[root]
            reason = self._pinned.get(root)
            if reason is None and size // grain < 2:
                reason = "its channels are one norm group" if size > 1 else "it has one unit"
            if reason is not None:
                whole[self.names[root]] = reason
                continue
            scaled = tuple(Member(m.name, m.dim, m.unit * grain, m.offset) for m in members.get(root, {}))
            axes.append(Axis(self.names[root], size // grain, scaled))
        return axes, whole

    def _couple_shared_tensors(self) -> None:
        """Join candidates that one dimension of a tied or reused tensor belongs to; pin what cannot be joined."""
        by_place: dict[tuple[str, int], list[tuple[int, Member]]] = {}
        for group, member in self._members:
            by_place.setdefault((member.name, member.dim), []).append((group, member))
        for place, users in by_place.items():
            if place in self._fixed:
                for group, _ in users:
                    self.pin(group, self._fixed[place])
            first_group, first = users[0]
            own = {member for group, member in users if group == first_group}
            for group, member in users[1:]:
                if self.sizes[group] == self.sizes[first_group] and member in own:
                    self.join(first_group, group)
                elif self.find(group) != self.find(first_group) or member.unit != first.unit:
                    self.pin(first_group, f"'{place[0]}' is used with different shapes")
                    self.pin(group, f"'{place[0]}' is used with different shapes")


def _lcm(one: int, other: int) -> int:
    return one * other // gcd(one, other)
