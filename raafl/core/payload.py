"""What travels with a task: the submodel's values, and bundles of tensors that a method names beside them.

A bundle has a tensor for each one that the submodel trains, of the same shape, so that it is cut as the submodel is: of a
control variate of a weight a client gets the rows and columns that it gets of the weight. Values and bundles lie one after
the other in one flat storage whose layout both ends work out from the spec, before anything is allocated. So they
are checked, compressed, counted and recorded as one.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Literal, Protocol

import torch

from raafl.submodel.cost import Cost
from raafl.submodel.extract import CopyPlan
from raafl.submodel.flat import FlatTensors, Layout
from raafl.submodel.spec import FULL, Spec
from raafl.submodel.submodels import Submodels

Way = Literal["sent", "trained"]
Bundles = Mapping[str, FlatTensors]
"""Bundles by name, each in the layout of what a submodel trains."""

MAX_CACHED = 256
"""Specs of which layouts and plans are remembered."""


class Payload:
    """Layouts and plans of what travels each way: "sent" is down, "trained" is up. Without bundles they are the submodel's own.

    Attributes:
        submodels: of the model, or of the part of it that travels.
    """

    def __init__(self, submodels: Submodels, down: tuple[str, ...] = (), up: tuple[str, ...] = ()) -> None:
        """Take the names of the bundles that go ``down`` and ``up``."""
        self.submodels = submodels
        self._bundles: dict[Way, tuple[str, ...]] = {"sent": down, "trained": up}
        self._layout = lru_cache(MAX_CACHED)(self._make_layout)
        self._plan = lru_cache(MAX_CACHED)(self._make_plan)

    @property
    def names(self) -> frozenset[str]:
        """Names of the tensors that may be compressed: parameters, and those of bundles."""
        bundles = {name for names in self._bundles.values() for name in names}
        trained = self.submodels.layout(part="trained").entries if bundles else ()
        more = {_name(bundle, entry.name) for bundle in bundles for entry in trained}
        return frozenset(self.submodels.parameter_names) | more

    def layout(self, spec: Spec = FULL, way: Way = "sent") -> Layout:
        """Return the layout of all that travels one way for a task of ``spec``; the values come first."""
        if not self._bundles[way]:
            return self.submodels.layout(spec, way)
        return self._layout(self.submodels.normal(spec), way)

    def _make_layout(self, spec: Spec, way: Way) -> Layout:
        values, one = self.submodels.layout(spec, way), self.submodels.layout(spec, "trained")
        more = [(_name(bundle, e.name), e.shape, e.dtype) for bundle in self._bundles[way] for e in one.entries]
        return Layout.pack([*((e.name, e.shape, e.dtype) for e in values.entries), *more])

    def plan(self, spec: Spec, way: Way) -> CopyPlan:
        """Return the plan between what travels one way of the whole model and of ``spec``."""
        return self._plan(self.submodels.normal(spec), way)

    def _make_plan(self, spec: Spec, way: Way) -> CopyPlan:
        selections = dict(self.submodels.selections(spec))
        for bundle in self._bundles[way]:
            selections |= {_name(bundle, tensor): runs for tensor, runs in self.submodels.selections(spec).items()}
        return CopyPlan(spec, self.layout(FULL, way), self.layout(spec, way), selections)

    def split(self, flat: FlatTensors, spec: Spec, way: Way) -> tuple[FlatTensors, Bundles]:
        """Return the values and the bundles in what travels one way for a task of ``spec``; they share its storage."""
        names = self._bundles[way]
        if not names:
            return flat, {}
        plain, one = self.submodels.layout(spec, way), self.submodels.layout(spec, "trained")
        ends = dict.fromkeys(flat.buffers, 0)
        values = _next(flat, plain, ends)
        return values, {name: _next(flat, one, ends) for name in names}

    @property
    def has_bundles(self) -> bool:
        """Whether anything travels beside the values."""
        return any(self._bundles.values())


class Wire(Protocol):
    """How a payload travels, as far as those who choose submodels care."""

    def cost(self, cost: Cost, spec: Spec) -> Cost:
        """Return the cost of a task of ``spec`` as it travels, where ``cost`` is that of the plain submodel."""
        ...

    def notes(self, num_clients: int) -> list[str]:
        """List the notes for the user at the start."""
        ...


def _name(bundle: str, tensor: str) -> str:
    return f"{bundle}/{tensor}"


def _next(flat: FlatTensors, layout: Layout, ends: dict[torch.dtype, int]) -> FlatTensors:
    """Return the next tensors in ``flat``, of ``layout``, and move ``ends`` behind them."""
    buffers: dict[Any, torch.Tensor] = {}
    for dtype, numel in layout.numel.items():
        buffers[dtype] = flat.buffers[dtype][ends[dtype] : ends[dtype] + numel]
        ends[dtype] += numel
    return FlatTensors(layout, buffers)
