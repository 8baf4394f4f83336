"""Average output rows over the clients that have their class, for clients that mask classes in their loss.

This is ``label_split`` in the code of HeteroFL and FedRolex.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch

from raafl.core.algorithm import Merge
from raafl.core.masked_loss import CLASSES, output_layer, why_unmasked
from raafl.core.state import GlobalState, MergeMemory
from raafl.core.types import Update
from raafl.parts.merge.mean import Mean
from raafl.parts.merge.wrapped import Wrapped
from raafl.submodel import FlatTensors, Layout, Spec, Submodels
from raafl.submodel.extract import CopyPlan


@dataclass
class RowsMemory(MergeMemory):
    """Running sums of a merge for the rows of the output layer, one row per class."""

    key = "label_split"
    sum: FlatTensors  # weighted sum of the rows in the updates
    weight: FlatTensors  # for each element, total weight of the updates that trained it
    masked: bool = False  # whether any update lacks a class


@dataclass(frozen=True)
class LabelSplit(Wrapped):
    """Wrapper of a mean that averages each output row only over the clients that have samples of the row's class.

    A client without a class does not train that class's row of the output layer (weight and bias), and sends it back as
    received (see `Local.masked`). In an ordinary mean this would hold back the clients that have the class. So each row
    is the mean over the clients that trained it; a row that nobody trained stays unchanged. All other values, and
    merges in which every client has all classes, come from the wrapped mean.

    A client lists its classes in its update (`CLASSES`), as ascending row numbers; anything else is refused as
    ``bad-classes``. An update without the list has all classes.

    Attributes:
        inner: wrapped mean, with alpha 1 and no staleness.
    """

    inner: Mean

    def notes(self, state: GlobalState, num_clients: int) -> list[str]:
        """Return notes for the user: the wrapped merge's, and one if the model has no output rows that belong to classes."""
        notes = super().notes(state, num_clients)
        if state.submodels.example_batch is None or why_unmasked(state.submodels) or _output(state.submodels):
            return notes
        return [
            *notes,
            "masked loss: no trained linear layer was found that computes the logits, so rows of classes that a "
            "client has masked are averaged over all clients",
        ]

    def reject_reason(self, state: GlobalState, update: Update, spec: Spec, staleness: int) -> str | None:
        """Return "bad-classes" unless the update's classes are an ascending list of rows; then ask the wrapped merge."""
        output = _output(state.submodels)
        if (
            output is not None
            and CLASSES in update.extra
            and not _are_rows(update.extra[CLASSES], output.entries[0].shape[0])
        ):
            return "bad-classes"
        return super().reject_reason(state, update, spec, staleness)

    def receive(self, state: GlobalState, update: Update, spec: Spec, staleness: int) -> None:
        """Add the update's output rows to separate sums, and pass the update to the wrapped merge."""
        output = _output(state.submodels)
        if output is not None:
            weight, _ = self.inner.weigh(update, staleness)
            total, on = (FlatTensors.zeros(output, state.values.device) for _ in range(2))
            memory = state.memory.of(RowsMemory, lambda: RowsMemory(total, on))
            rows = update.extra.get(CLASSES)
            plan = state.submodels.plan(spec, "trained", "trained", frozenset(output.by_name))
            _add(memory, plan, update.tensors, weight, rows)
            memory.masked = memory.masked or rows is not None
        super().receive(state, update, spec, staleness)

    def apply(self, state: GlobalState) -> None:
        """Apply the wrapped merge; if any update lacked a class, set output rows to their means over clients that trained them."""
        memory = state.memory.pop(RowsMemory)
        if memory is None or not memory.masked:
            super().apply(state)
            return
        before = {name: state.values[name].clone() for name in memory.sum.layout.by_name}
        super().apply(state)
        for name, old in before.items():
            total, weight = memory.sum[name], memory.weight[name]
            state.values[name].copy_(torch.where(weight > 0, total / weight, old))

    def __str__(self) -> str:
        return f"{self.inner}, output rows over the clients that have the class"


def joint_notes(merge: Merge) -> list[str]:
    """Return a note if ``merge`` averages by class (`LabelSplit`), which has no effect on already combined updates.

    A combined update does not say which of its clients lack a class.
    """
    if not isinstance(merge, LabelSplit):
        return []
    return [
        "masked loss: updates are combined before the merge, so rows of classes that a client has masked count "
        "like all others"
    ]


def _are_rows(rows: object, num_classes: int) -> bool:
    return (
        isinstance(rows, list)
        and 0 < len(rows) <= num_classes
        and all(type(row) is int and 0 <= row < num_classes for row in rows)
        and all(first < second for first, second in pairwise(rows))
    )


def _add(memory: RowsMemory, plan: CopyPlan, tensors: FlatTensors, weight: float, rows: list[int] | None) -> None:
    """Add an update's ``rows`` (None = all) to the weighted sum, and its weight to the total weight of these rows."""
    ones, values = (FlatTensors.zeros(plan.layout, tensors.device) for _ in range(2))
    chosen = slice(None) if rows is None else rows
    for name, view in values.items():
        view[chosen] = tensors[name][chosen]
        ones[name][chosen] = 1.0
    plan.add_(memory.sum, values, weight)
    plan.add_(memory.weight, ones, weight)


def _output(submodels: Submodels) -> Layout | None:
    """Return the layout of the layer that computes the logits, one row for each class; None if its rows are shared."""
    return submodels.cached("output layer", "", lambda: _found(submodels))


def _found(submodels: Submodels) -> Layout | None:
    path, trained = output_layer(submodels), submodels.layout(part="trained")
    names = set() if path is None else {f"{path}.weight".lstrip("."), f"{path}.bias".lstrip(".")}
    cut = {m.name for axis in submodels.axes.values() for m in axis.members if m.dim == 0}
    is_own = not names & (cut | set(submodels.aliases) | set(submodels.aliases.values()))
    return trained.only(names) if is_own and names & trained.by_name.keys() else None
