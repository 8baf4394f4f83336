"""Lay out what travels with a task: the submodel's values, followed by bundles of tensors that a method adds.

A bundle has one tensor for each trained parameter, of the same shape, and is cut like the submodel: of a control variate, a
client receives the rows and columns that it receives of the weight. A method may define a layout of its own for a bundle, such
as one score per unit; such a bundle travels whole and uncompressed. Values and bundles lie one after the other in one flat
storage, whose layout both ends derive from the spec before anything is allocated. They are checked, compressed, counted and
recorded as one.

A *resident* payload stays on the client between its tasks: of the values only those travel that a task names, bundles never do
(`raafl.compression.streams`).
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
"""Form of an update without float tensors: values that are all 0 or 1 (one bit each), or numbers in `Update.extra`."""

Bundles = Mapping[str, FlatTensors]
"""Bundles by name, each in the layout of what a submodel trains, or in its own."""

Travels = Callable[[Mapping[str, Any], Way], frozenset[str] | None]
"""Names of the values that travel one way for a task, by its `Work.extra`; None = all."""

OwnLayout = Callable[[str, Spec | None], Layout | None]
"""Layout of a bundle for a task of a spec, or, of None, of all that there is of it; None = it is as what trains."""

MAX_CACHED = 256
"""Largest number of specs whose layouts and plans are cached."""


class Payload:
    """Layouts of all tensors that travel with a task: "sent" to the client, and "trained" back to the server.

    `submodels`: submodels of the model, or in split learning of the part that clients train.
    `up_as`: compressor for the values sent to the server, which replaces the setting ``compress.up``; None =
    ``compress.up``.
    """

    def __init__(
        self,
        submodels: Submodels,
        down: tuple[str, ...] = (),
        up: tuple[str, ...] = (),
        up_as: UpAs | None = None,
        own: OwnLayout = lambda name, spec: None,
        travels: Travels | None = None,
    ) -> None:
        """Create the layouts of a run's payloads; ``travels``: names of what is sent if clients keep the rest (None = all)."""
        self.submodels, self.up_as, self._own, self._travels = submodels, up_as, own, travels
        self._bundles: dict[Way, tuple[str, ...]] = {"sent": down, "trained": up}
        self._layout = lru_cache(MAX_CACHED)(self._make_layout)
        self._plan = lru_cache(MAX_CACHED)(self._make_plan)
        self._part = lru_cache(MAX_CACHED)(self._make_part)

    @property
    def names(self) -> frozenset[str]:
        """Names of the tensors that may be compressed: parameters, and tensors of bundles (extra tensors of a method)."""
        bundles = {name for names in self._bundles.values() for name in names if self._own(name, None) is None}
        more = {_name(bundle, entry.name) for bundle in bundles for entry in self._bundle(bundle).entries}
        return frozenset(self.submodels.parameter_names) | more

    def layout(self, spec: Spec | None = None, way: Way = "sent") -> Layout:
        """Return the layout of all tensors that travel in one direction for a task: the submodel's values, then the bundles.

        `spec`: submodel of the task; None = the whole model with all of its bundles.
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

    @property
    def is_resident(self) -> bool:
        """Whether clients keep the tensors of a task for their next task, so that not all are sent each time."""
        return self._travels is not None

    def travelling(self, spec: Spec, way: Way, extra: Mapping[str, Any] | None = None) -> Layout:
        """Return the layout of the tensors that are sent in one direction for a task, before compression.

        If the method lets clients keep tensors between tasks, only the tensors that the task names in ``extra`` are
        sent.

        `extra`: further settings of the task (`Work.extra`); None = all tensors are sent, since the client keeps none
        yet.
        """
        if self._travels is None:
            return self.layout(spec, way)
        names = None if extra is None else self._travels(extra, way)
        return self._part(self.submodels.normal(spec), way, names)

    def _make_part(self, spec: Spec, way: Way, names: frozenset[str] | None) -> Layout:
        values = self.submodels.layout(spec, way)
        return values if names is None else values.only(names)

    def returned(self, spec: Spec) -> Layout:
        """Return the layout of an update as the server gets it: without bundles (extra tensors) that the client keeps."""
        return self.layout(spec, "trained") if self._travels is None else self.submodels.layout(spec, "trained")

    def plan(self, spec: Spec, way: Way) -> CopyPlan:
        """Return the copy plan of a submodel: for each of its tensors, where in the whole model the elements are."""
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
        """Split the storage of a task's tensors: return views of the submodel's values, and of the bundles by name.

        Bundles are extra tensors of the method.
        """
        names = self._bundles[way]
        stay = self.is_resident and flat.layout == self.submodels.layout(spec, way)
        if not names or stay:
            return flat, {}
        ends = dict.fromkeys(flat.buffers, 0)
        values = _next(flat, self.submodels.layout(spec, way), ends)
        return values, {name: _next(flat, self._bundle(name, self.submodels.normal(spec)), ends) for name in names}

    @property
    def has_bundles(self) -> bool:
        """Whether bundles, extra tensors of the method, travel beside the submodel's values."""
        return any(self._bundles.values())


class TransferCost(Protocol):
    """Interface to predict how many bytes a task transfers, for parts that choose submodels."""

    def cost(self, cost: Cost, spec: Spec, extra: Mapping[str, Any] | None = None) -> Cost:
        """Return the cost of a task with compression: fewer bytes are sent, but the client needs memory for it.

        `extra`: further settings of the task (`Work.extra`); None = unknown.
        """
        ...

    def notes(self, num_clients: int) -> list[str]:
        """Return remarks on compression, for the user at the start of a run, one line each."""
        ...


def _name(bundle: str, tensor: str) -> str:
    return f"{bundle}/{tensor}"


def _next(flat: FlatTensors, layout: Layout, ends: dict[torch.dtype, int]) -> FlatTensors:
    """Return the part of ``flat`` that starts at the offsets ``ends`` and has ``layout``; advance the offsets."""
    buffers: dict[Any, torch.Tensor] = {}
    for dtype, numel in layout.numel.items():
        buffers[dtype] = flat.buffers[dtype][ends[dtype] : ends[dtype] + numel]
        ends[dtype] += numel
    return FlatTensors(layout, buffers)
