"""Find which elements of a group's submodels the same clients have, so that masks agree and thin regions stay shut.

A *cell* is the set of all elements that the same distinct submodels of a group contain. Server and clients find the same cells in
the same order, since both derive them from the specs alone. Whole models have one cell; nested widths have one for each width.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from raafl.errors import BadInput
from raafl.submodel import FULL, FlatTensors, Layout, Spec, Submodels
from raafl.submodel.extract import CopyPlan

MAX_SPECS = 62
"""Distinct submodels in a group: bits of a whole number."""

MAX_CELLS = 4096
"""Cells of a group; each has a seed of 32 bytes, shared among all members."""


def typed(layout: Layout, dtype: torch.dtype) -> Layout:
    """Return a layout with the same tensors as ``layout`` and another dtype.

    Args:
        layout: layout to copy.
        dtype: dtype of all tensors.
    """
    return Layout.pack((entry.name, entry.shape, dtype) for entry in layout.entries)


class Ring:
    """Layouts and copy plans for secure aggregation, in which integers (int32) take the place of a submodel's trained values.

    Attributes:
        submodels: submodels of the model; all trained parameters must be float32.
    """

    def __init__(self, submodels: Submodels) -> None:
        """Derive everything from ``submodels``; results are cached there."""
        self.submodels = submodels

    def layout(self, spec: Spec = FULL, dtype: torch.dtype = torch.int32) -> Layout:
        """Return the layout of the integers that take the place of a submodel's trained values.

        Args:
            spec: submodel whose values are replaced.
            dtype: dtype of the integers.
        """
        spec = self.submodels.normal(spec.cut)
        return self.submodels.cached(
            "ring layout", (spec, dtype), lambda: typed(self.submodels.layout(spec, "trained"), dtype)
        )

    def plan(self, spec: Spec, dtype: torch.dtype = torch.int32) -> CopyPlan:
        """Return the plan that copies such integers between the whole model and a submodel.

        Args:
            spec: submodel whose values are replaced.
            dtype: dtype of the integers.
        """
        spec = self.submodels.normal(spec.cut)

        def make() -> CopyPlan:
            return CopyPlan(spec, self.layout(FULL, dtype), self.layout(spec, dtype), self.submodels.selections(spec))

        return self.submodels.cached("ring plan", (spec, dtype), make)

    def zeros(self, spec: Spec = FULL, dtype: torch.dtype = torch.int32) -> FlatTensors:
        """Return integers for a submodel's trained values, all zero, on the CPU.

        Args:
            spec: submodel whose values are replaced.
            dtype: dtype of the integers.
        """
        return FlatTensors.zeros(self.layout(spec, dtype))


def buffer_of(flat: FlatTensors) -> torch.Tensor:
    """Return the buffer of flat tensors with a single dtype; an empty one if there are no tensors."""
    return next(iter(flat.buffers.values()), torch.zeros(0, dtype=torch.int32))


class Coverage:
    """Division of a model's elements into cells: two elements are in the same cell if the same members of the group train them.

    Attributes:
        holders: keys of the members that train the elements of each cell.
        specs: submodel of each member of the group, by key.
    """

    def __init__(self, ring: Ring, specs: Mapping[int, Spec]) -> None:
        """Find the cells.

        Args:
            ring: of the model.
            specs: spec of each member, by its key.

        Raises:
            BadInput: there are more than `MAX_SPECS` distinct submodels, or more than `MAX_CELLS` cells.
        """
        self._ring = ring
        self.specs = {key: ring.submodels.normal(spec.cut) for key, spec in specs.items()}
        distinct = list(dict.fromkeys(self.specs.values()))
        if len(distinct) > MAX_SPECS:
            raise BadInput(
                f"a group has {len(distinct)} different submodels, at most {MAX_SPECS} can be summed securely"
            )
        codes = ring.zeros(dtype=torch.int64)
        for bit, spec in enumerate(distinct):
            ring.plan(spec, torch.int64).cover_(codes, 1 << bit)
        found, cells = _numbered(buffer_of(codes).numpy(), len(distinct))
        if len(found) > MAX_CELLS:
            raise BadInput(
                f"a group's submodels overlap in {len(found)} different ways (cells), at most {MAX_CELLS} can be "
                "summed securely"
            )
        self.holders = [
            frozenset(key for key, spec in self.specs.items() if int(code) >> distinct.index(spec) & 1)
            for code in found
        ]
        whole = ring.zeros(dtype=torch.int64)
        buffer_of(whole).copy_(torch.from_numpy(cells))
        self._whole = whole
        self._cells: dict[Spec, np.ndarray] = {}

    def cells_of(self, key: int) -> np.ndarray:
        """Return, for each element of a member's submodel in order, the index of its cell.

        A cell is a set of elements that the same members train.
        """
        spec = self.specs[key]
        if spec not in self._cells:
            plan = self._ring.plan(spec, torch.int64)
            self._cells[spec] = buffer_of(plan.gather(self._whole)).numpy().astype(np.int16)
        return self._cells[spec]

    def own(self, key: int) -> list[int]:
        """Return the cells in a member's submodel, ascending."""
        return [cell for cell, holders in enumerate(self.holders) if key in holders]

    def open_cells(self, survivors: frozenset[int], min_cover: int) -> list[int]:
        """Return the cells that at least ``min_cover`` of the remaining members have, ascending.

        Args:
            survivors: keys of the members that have not dropped out.
            min_cover: smallest number of members.
        """
        return [cell for cell, holders in enumerate(self.holders) if len(holders & survivors) >= min_cover]

    def common(self, key: int, other: int) -> np.ndarray | slice:
        """Return the elements of a member's submodel that another member has, too: a mask, or a slice if it has all.

        Args:
            key: key of the member.
            other: key of the other member.
        """
        held = np.array([other in holders for holders in self.holders])
        cells = self.cells_of(key)
        return slice(None) if held[cells].all() else held[cells]

    def within(self, key: int, cell: int) -> np.ndarray | slice:
        """Return the elements of a member's submodel that lie in a cell: a mask, or a slice if all do.

        Args:
            key: key of the member.
            cell: number of the cell.
        """
        cells = self.cells_of(key)
        chosen = cells == cell
        return slice(None) if chosen.all() else chosen


def _numbered(codes: np.ndarray, num_bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the distinct codes, ascending, and for each code its place among them; few bits need no sorting."""
    if num_bits > 16:
        found, places = np.unique(codes, return_inverse=True)
        return found, places.reshape(-1)
    found = np.flatnonzero(np.bincount(codes, minlength=1 << num_bits))
    places = np.zeros(1 << num_bits, np.int64)
    places[found] = np.arange(len(found))
    return found, places[codes]
