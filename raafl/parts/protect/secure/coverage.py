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


def _with_dtype(layout: Layout, dtype: torch.dtype) -> Layout:
    """Return a layout with the same tensors as ``layout`` and another dtype."""
    return Layout.pack((entry.name, entry.shape, dtype) for entry in layout.entries)


class IntegerLayouts:
    """Layouts of the integers that encode clients' updates in secure aggregation; each trained value becomes one int32.

    `submodels`: submodels of the model; all trained parameters must be float32.
    """

    def __init__(self, submodels: Submodels) -> None:
        """Use and fill the caches of ``submodels``."""
        self.submodels = submodels

    def layout(self, spec: Spec = FULL, dtype: torch.dtype = torch.int32) -> Layout:
        """Return the layout of the integers that encode a submodel's trained values."""
        spec = self.submodels.normal(spec.without_base)
        return self.submodels.cached(
            "integer layout", (spec, dtype), lambda: _with_dtype(self.submodels.layout(spec, "trained"), dtype)
        )

    def plan(self, spec: Spec, dtype: torch.dtype = torch.int32) -> CopyPlan:
        """Return the copy plan (which elements go where) between the encoded values of a submodel and of the whole model."""
        spec = self.submodels.normal(spec.without_base)

        def make() -> CopyPlan:
            return CopyPlan(spec, self.layout(FULL, dtype), self.layout(spec, dtype), self.submodels.selections(spec))

        return self.submodels.cached("integer plan", (spec, dtype), make)

    def zeros(self, spec: Spec = FULL, dtype: torch.dtype = torch.int32) -> FlatTensors:
        """Return a tensor of zeros on the CPU for the integers that encode a submodel's trained values."""
        return FlatTensors.zeros(self.layout(spec, dtype))


def buffer_of(flat: FlatTensors) -> torch.Tensor:
    """Return the one buffer with all elements of flat tensors that share a dtype; an empty one if there are no tensors."""
    return next(iter(flat.buffers.values()), torch.zeros(0, dtype=torch.int32))


class Coverage:
    """Division of a model's elements into cells: a cell has all elements that the same clients of a group train.

    A group is a set of clients whose updates are summed together in secure aggregation.

    Attributes:
        holders: ids of the clients (members of the group) that train the elements of a cell, for each cell.
        specs: submodel of each member, by id.
    """

    def __init__(self, layouts: IntegerLayouts, specs: Mapping[int, Spec]) -> None:
        """Partition the model's elements into cells, each covered by the same members.

        Args:
            layouts: layouts of the model's integers.
            specs: submodel of each member, by its id.

        Raises:
            BadInput: there are more than `MAX_SPECS` distinct submodels, or more than `MAX_CELLS` cells.
        """
        self._layouts = layouts
        self.specs = {member_id: layouts.submodels.normal(spec.without_base) for member_id, spec in specs.items()}
        distinct = list(dict.fromkeys(self.specs.values()))
        if len(distinct) > MAX_SPECS:
            raise BadInput(
                f"secure_aggregation: a group has {len(distinct)} different submodels, at most {MAX_SPECS} can be summed: "
                "use fewer rates or smaller groups"
            )
        codes = layouts.zeros(dtype=torch.int64)
        for bit, spec in enumerate(distinct):
            layouts.plan(spec, torch.int64).cover_(codes, 1 << bit)
        found, cells = _numbered(buffer_of(codes).numpy(), len(distinct))
        if len(found) > MAX_CELLS:
            raise BadInput(
                f"secure_aggregation: a group's submodels overlap in {len(found)} different ways, at most {MAX_CELLS} can be "
                "summed: use fewer rates or smaller groups"
            )
        self.holders = [
            frozenset(member_id for member_id, spec in self.specs.items() if int(code) >> distinct.index(spec) & 1)
            for code in found
        ]
        whole = layouts.zeros(dtype=torch.int64)
        buffer_of(whole).copy_(torch.from_numpy(cells))
        self._whole = whole
        self._cells: dict[Spec, np.ndarray] = {}

    def cells_of(self, member_id: int) -> np.ndarray:
        """Return, for each element of a member's submodel in order, the index of its cell.

        A cell is a set of elements that the same members train.
        """
        spec = self.specs[member_id]
        if spec not in self._cells:
            plan = self._layouts.plan(spec, torch.int64)
            self._cells[spec] = buffer_of(plan.gather(self._whole)).numpy().astype(np.int16)
        return self._cells[spec]

    def cells_in(self, member_id: int) -> list[int]:
        """Return the cells (sets of elements that the same members train) in a member's submodel, ascending."""
        return [cell for cell, holders in enumerate(self.holders) if member_id in holders]

    def open_cells(self, survivors: frozenset[int], min_cover: int) -> list[int]:
        """Return the cells whose sums the server may learn: those that enough remaining members train, ascending.

        A cell is a set of elements that the same members train.

        Args:
            survivors: ids of the members that have not dropped out.
            min_cover: smallest number of members that must train a cell.
        """
        return [cell for cell, holders in enumerate(self.holders) if len(holders & survivors) >= min_cover]

    def shared_elements(self, member_id: int, other: int) -> np.ndarray | slice:
        """Return an index of the elements of a member's submodel that another member has, too: a boolean mask, or slice(None).

        Args:
            member_id: id of the member.
            other: id of the other member.
        """
        held = np.array([other in holders for holders in self.holders])
        cells = self.cells_of(member_id)
        return slice(None) if held[cells].all() else held[cells]

    def elements_in(self, member_id: int, cell: int) -> np.ndarray | slice:
        """Return an index of the elements of a member's submodel that lie in a cell: a boolean mask, or slice(None).

        A cell is a set of elements that the same members train.

        Args:
            member_id: id of the member.
            cell: number of the cell.
        """
        cells = self.cells_of(member_id)
        chosen = cells == cell
        return slice(None) if chosen.all() else chosen


def _numbered(codes: np.ndarray, num_bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the distinct codes, ascending, and the index of each code among them; codes of few bits are not sorted."""
    if num_bits > 16:
        found, places = np.unique(codes, return_inverse=True)
        return found, places.reshape(-1)
    found = np.flatnonzero(np.bincount(codes, minlength=1 << num_bits))
    places = np.zeros(1 << num_bits, np.int64)
    places[found] = np.arange(len(found))
    return found, places[codes]
