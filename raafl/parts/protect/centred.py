"""Combine updates by centred clipping: each is clipped around the mean of the last merge (Karimireddy et al. 2021)."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import Any, Self

from raafl.core.memory import MergeMemory
from raafl.core.state import GlobalState
from raafl.core.types import Update
from raafl.parts.merge.label_split import joint_notes
from raafl.parts.merge.mean import chunks, zeros_like
from raafl.parts.merge.wrapped import Wrapped
from raafl.parts.protect.robust import feed, locate, norm_of
from raafl.submodel import FlatTensors, Spec
from raafl.submodel.flat import is_merged

Stored = tuple[Spec, FlatTensors]
"""Submodel, and a copy of an update's tensors."""


@dataclass
class CentredMemory(MergeMemory):
    """State of `Centred`."""

    key = "centred"
    # copies of the tensors of the updates that wait, in the order of `GlobalState.waiting`
    stored: list[FlatTensors] = field(default_factory=list)
    centre: FlatTensors | None = None  # clipping centre v; None before the first merge

    @classmethod
    def from_plain(cls, data: Any) -> Self:
        """Restore the state; earlier versions stored each copy with its submodel and staleness, before the tensors."""
        copies = [item[-1] if isinstance(item, tuple) else item for item in data["stored"]]
        return super().from_plain({**data, "stored": copies})


@dataclass(frozen=True)
class Centred(Wrapped):
    """Wrapper of a merge for centred clipping: limits how far each update may be from the last merge's mean change v.

    ``v <- v + 1/K sum_i (d_i - v) min(1, tau / ||d_i - v||)`` (Karimireddy et al. 2021, equation 3, one iteration). d_i
    is an update's change of the model, and K the number of updates that trained an element. At the first merge v is the
    coordinate-wise median. tau is the radius, by default the median distance of the updates from v. Distances are over
    parameters; with several submodels they are root mean squares, so that a small submodel is not near just for its
    size. All updates have the same weight. The wrapped merge receives v in place of every update. Elements that no
    update trained keep their v. Memory: K updates, and three tensors of the model's size.

    The paper's clients send momentum, by which honest updates become similar over time. Here they send the change of
    one task. If clients' data differ a lot, honest updates are as far apart as an attacker's, and no distance
    distinguishes them.

    Attributes:
        radius: L2 distance tau beyond which an update is clipped; None = the median distance.
    """

    radius: float | None

    def notes(self, state: GlobalState, num_clients: int) -> list[str]:
        """Return notes for the user: those of the wrapped merge, and a warning if that merge averages by class.

        Averaging by class then has no effect: the wrapped merge receives one update in place of several, which does not
        say which clients have which classes.
        """
        return super().notes(state, num_clients) + joint_notes(self.inner)

    def receive(self, state: GlobalState, update: Update, spec: Spec, staleness: int) -> None:
        """Store a copy of the update until the merge."""
        state.memory.of(CentredMemory).stored.append(update.tensors.clone())

    def apply(self, state: GlobalState) -> None:
        """Move the centre v towards the stored updates, and pass it to the wrapped merge in their place."""
        memory = state.memory.of(CentredMemory)
        stored = [(item.spec, tensors) for item, tensors in zip(state.waiting, memory.stored, strict=True)]
        memory.stored = []
        centre = memory.centre = self._median(state, stored) if memory.centre is None else memory.centre
        self._move(state, centre, stored)
        feed(
            self.inner, state, {spec: self._moved(state, centre, spec) for spec in dict.fromkeys(s for s, _ in stored)}
        )

    def _median(self, state: GlobalState, stored: list[Stored]) -> FlatTensors:
        """Return the coordinate-wise median of the differences; 0 on elements that no update covers."""
        centre = zeros_like(state.values)
        for spec, values in locate(state, stored, "median", 0.0).items():
            change = values.clone()
            self._subtract(state, spec, change)
            state.submodels.plan(spec).scatter_(centre, change)
        return centre

    def _subtract(self, state: GlobalState, spec: Spec, tensors: FlatTensors) -> None:
        """Subtract the global values in place, if the updates are values and not deltas."""
        if self.sends == "values":
            _sub_(tensors, state.submodels.plan(spec).gather(state.values))

    def _move(self, state: GlobalState, centre: FlatTensors, stored: list[Stored]) -> None:
        """Move ``centre`` by the mean of the clipped distances of the updates, whose tensors are overwritten."""
        distances = []
        for spec, tensors in stored:
            self._subtract(state, spec, tensors)
            _sub_(tensors, state.submodels.plan(spec).gather(centre))
            # with a radius in absolute terms distances are L2 norms; the median needs a measure that does not grow with size
            scale = 1.0 if self.radius is not None else _num_parameters(state, tensors) ** -0.5
            distances.append(norm_of(tensors, state.submodels) * scale)
        radius = statistics.median(distances) if self.radius is None else self.radius
        total, count = zeros_like(centre), zeros_like(centre)
        for (spec, tensors), distance in zip(stored, distances, strict=True):
            plan = state.submodels.plan(spec)
            plan.add_(total, tensors, min(1.0, radius / distance) if distance else 1.0)
            plan.cover_(count)
        for dtype in filter(is_merged, centre.buffers):
            for old, step, on in chunks(*(flat.buffers[dtype] for flat in (centre, total, count))):
                old.add_(step.div_(on.clamp_min(1)))

    def _moved(self, state: GlobalState, centre: FlatTensors, spec: Spec) -> FlatTensors:
        """Return the update of ``spec`` whose difference is ``centre``."""
        plan = state.submodels.plan(spec)
        moved = plan.gather(centre)
        if self.sends == "values":
            for dtype, buffer in plan.gather(state.values).buffers.items():
                moved.buffers[dtype].add_(buffer)
        return moved

    def report(self, state: GlobalState) -> dict[str, Any]:
        """Return entries for the run's summary: under "guard" the clipping radius."""
        inner = super().report(state)
        return {**inner, "guard": {**inner.get("guard", {}), "combine": "centred_clip", "radius": self.radius}}

    def __str__(self) -> str:
        radius = "the median distance" if self.radius is None else f"{self.radius:g}"
        return f"centred clipping at {radius}, then {self.inner}"


def _sub_(tensors: FlatTensors, others: FlatTensors) -> None:
    for dtype, buffer in tensors.buffers.items():
        buffer.sub_(others.buffers[dtype])


def _num_parameters(state: GlobalState, tensors: FlatTensors) -> int:
    names = state.submodels.parameter_names
    return max(sum(entry.numel for entry in tensors.layout.entries if entry.name in names), 1)
