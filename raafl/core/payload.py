"""What travels with a task: the submodel's values, and bundles of tensors that a method names beside them.

A bundle has a tensor for each one that the submodel trains, of the same shape, so that it is cut as the submodel is: of a
control variate of a weight a client gets the rows and columns that it gets of the weight. A method may give a bundle a layout
of its own, such as a score for each unit; it travels as it is, uncompressed. Values and bundles lie one after the other in
one flat storage whose layout both ends work out from the spec, before anything is allocated. So they are checked,
compressed, counted and recorded as one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, Literal, Protocol

import torch

from raafl.submodel.cost import Cost
from raafl.submodel.extract import CopyPlan
from raafl.submodel.flat import FlatTensors, Layout
from raafl.submodel.spec import FULL, Spec
from raafl.submodel.submodels import Submodels

Way = Literal["sent", "trained"]
UpAs = Literal["bits", "scalars"]
"""Values that are all 0 or 1, a bit each; or no tensor at all, but numbers in `Update.extra`."""

Bundles = Mapping[str, FlatTensors]
"""Bundles by name, each in the layout of what a submodel trains, or in its own."""

OwnLayout = Callable[[str, Spec | None], Layout | None]
"""Layout of a bundle for a task of a spec, or, of None, of all that there is of it; None = it is as what trains."""

MAX_CACHED = 256
"""Specs of which layouts and plans are remembered."""


class Payload:
    """Layouts and plans of what travels each way: "sent" is down, "trained" is up. Without bundles they are the submodel's own.

    Attributes:
        submodels: of the model, or of the part of it that travels.
        up_as: what the values always go up as, whatever `compress.up` says of other algorithms; None = as it says.
    """

    def __init__(
        self, submodels: Submodels, down: tuple[str, ...] = (), up: tuple[str, ...] = (), up_as: UpAs | None = None,
        own: OwnLayout = lambda name, spec: None,
    ) -> None:  # fmt: skip
        """Take the names of the bundles that go ``down`` and ``up``, and the layouts of those that have their ``own``."""
        self.submodels, self.up_as, self._own = submodels, up_as, own
        self._bundles: dict[Way, tuple[str, ...]] = {"sent": down, "trained": up}
        self._layout = lru_cache(MAX_CACHED)(self._make_layout)
        self._plan = lru_cache(MAX_CACHED)(self._make_plan)

    @property
    def names(self) -> frozenset[str]:
        """Names of the tensors that may be compressed: parameters, and those of bundles."""
        bundles = {name for names in self._bundles.values() for name in names if self._own(name, None) is None}
        more = {_name(bundle, entry.name) for bundle in bundles for entry in self._bundle(bundle).entries}
        return frozenset(self.submodels.parameter_names) | more

    def layout(self, spec: Spec | None = None, way: Way = "sent") -> Layout:
        """Return the layout of all that travels one way for a task of ``spec``; the values come first.

        None = of the whole model, with all that there is of each bundle.
        """
        if not self._bundles[way]:
            return self.submodels.layout(spec or FULL, way)
        return self._layout(None if spec is None else self.submodels.normal(spec), way)

    def _make_layout(self, spec: Spec | None, way: Way) -> Layout:
        values, bundles = self.submodels.layout(spec or FULL, way), self._bundles[way]
        more = [
            (_name(bundle, e.name), e.shape, e.dtype) for bundle in bundles for e in self._bundle(bundle, spec).entries
        ]
        return Layout.pack([*((e.name, e.shape, e.dtype) for e in values.entries), *more])

    def _bundle(self, name: str, spec: Spec | None = None) -> Layout:
        own = self._own(name, spec)
        return self.submodels.layout(spec or FULL, "trained") if own is None else own

    def plan(self, spec: Spec, way: Way) -> CopyPlan:
        """Return the plan between what travels one way of the whole model and of ``spec``."""
        if not self._bundles[way]:
            return self.submodels.plan(spec, way, way)
        return self._plan(self.submodels.normal(spec), way)

    def _make_plan(self, spec: Spec, way: Way) -> CopyPlan:
        selections = dict(self.submodels.selections(spec))
        for bundle in self._bundles[way]:
            if self._own(bundle, None) is None:
                selections |= {_name(bundle, tensor): runs for tensor, runs in self.submodels.selections(spec).items()}
        return CopyPlan(spec, self.layout(way=way), self.layout(spec, way), selections)

    def split(self, flat: FlatTensors, spec: Spec, way: Way) -> tuple[FlatTensors, Bundles]:
        """Return the values and the bundles in what travels one way for a task of ``spec``; they share its storage."""
        names = self._bundles[way]
        if not names:
            return flat, {}
        ends = dict.fromkeys(flat.buffers, 0)
        values = _next(flat, self.submodels.layout(spec, way), ends)
        return values, {name: _next(flat, self._bundle(name, self.submodels.normal(spec)), ends) for name in names}

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
