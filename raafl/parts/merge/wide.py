"""Merge half-precision models and complex parameters as real numbers of single precision or wider.

Every merge, guard and privacy mechanism computes in float32 or float64. Sums in bfloat16 would lose terms below 1/256 of the
total. Order, sign, maximum and square are undefined for complex numbers; norm, noise and moments are computed on their real and
imaginary parts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from raafl.core.payload import Bundles
from raafl.core.state import GlobalState
from raafl.core.types import Update
from raafl.parts.merge.wrapped import Wrapped
from raafl.submodel import FULL, FlatTensors, Layout, Spec, Submodels
from raafl.submodel.cost import Cost
from raafl.submodel.flat import reals, same_layout
from raafl.submodel.submodels import Caches, Part

VALUES = "wide values"
"""Key in `GlobalState.scratch` of the wide values, and of the change counters of the values from which they were copied."""


def widened(values: FlatTensors, out: FlatTensors | None = None) -> FlatTensors:
    """Convert values exactly to the layout for sums (`Layout.wide`), in new storage or in ``out``; return the result."""
    if values.layout.wide is values.layout:
        return values
    out = FlatTensors.empty(values.layout.wide, values.device) if out is None else out
    for own, wide in _as_reals(values, out):
        wide.copy_(own)
    return out


def round_(values: FlatTensors, wide: FlatTensors) -> FlatTensors:
    """Round the values of ``wide``, whose layout is `Layout.wide`, into the storage of ``values``; return ``values``."""
    for own, other in _as_reals(values, wide):
        own.copy_(other)
    return values


def _as_reals(values: FlatTensors, wide: FlatTensors) -> Iterator[tuple[Tensor, Tensor]]:
    """Return pairs of tensors of equal size: one of ``values`` as real numbers, and one of ``wide``."""
    same_layout(values.layout.wide, wide.layout)
    if len(wide.buffers) == len(values.buffers):  # no two dtypes share a wide dtype, so whole buffers match
        return zip((reals(one).view(-1) for one in values.buffers.values()), wide.buffers.values(), strict=True)
    return ((reals(tensor), wide[name]) for name, tensor in values.items())


class WideSubmodels(Submodels):
    """Submodels of the same model with "wide" tensors: real numbers of at least single precision, without frozen parameters.

    Half precision becomes float32. A complex tensor gets an additional last dimension of 2. Axes, names and costs stay
    those of the model.
    """

    def __init__(self, own: Submodels) -> None:
        """Create submodels of wide dtypes: they have the axes of the run's submodels ``own``, and caches of their own layouts."""
        _ = own.axes  # finds the axes now, on the model's own shapes
        self.__dict__.update(own.__dict__)
        self.own, self._caches = own, Caches()

    def _layout(self, spec: Spec, part: Part) -> Layout:
        return self.narrow_layout(spec, part).wide

    def narrow_layout(self, spec: Spec = FULL, part: Part = "present") -> Layout:
        """Return the layout of a submodel's tensors that are not frozen, in the model's own dtypes.

        The submodel's complete layout has the same tensors first, then the frozen ones.

        Args:
            spec: submodel whose layout is returned.
            part: tensors to include, such as "present" or "trained".
        """
        layout = self.own.layout(spec, part)
        return layout.only([e.name for e in layout.entries if e.name not in self.frozen])

    def cost(self, spec: Spec = FULL, batch_size: int = 1) -> Cost:
        """Return the cost of training ``spec`` in the model's own precision.

        Args:
            spec: submodel to train.
            batch_size: local batch size.
        """
        return self.own.cost(spec, batch_size)

    def shrink(self, *args: Any, **options: Any) -> Any:
        """Build the module of a submodel, in the model's own precision."""
        return self.own.shrink(*args, **options)

    def widen(self, values: FlatTensors, out: FlatTensors | None = None) -> FlatTensors:
        """Convert values from the model's own dtypes to wide tensors.

        Args:
            values: values in the model's own dtypes.
            out: wide tensors to overwrite; None = new ones.
        """
        return widened(values.prefix(self.cached("narrow", "", self.narrow_layout)), out)

    def round_(self, values: FlatTensors, wide: FlatTensors) -> None:
        """Round wide tensors into the model's own values, in place.

        Args:
            values: values in the model's own dtypes, which are overwritten.
            wide: wide tensors to round.
        """
        round_(values.prefix(self.cached("narrow", "", self.narrow_layout)), wide)


@dataclass(frozen=True)
class WideMerge(Wrapped):
    """Wrapper of a merge that computes in wide tensors (`WideSubmodels`) and rounds the result once, to the model's precision.

    All that the wrapped merge stores (sums, moments, control variates) is wide, also in checkpoints. The model keeps
    its own precision, so a change below half a unit in the last place is lost in a merge. This wrapper encloses all
    others. Memory: a wide copy of all values except frozen ones, and of one update.

    Attributes:
        submodels: submodels of the model with wide tensors.
    """

    merges_means: ClassVar[bool] = True

    submodels: WideSubmodels = field(repr=False)

    def view(self, state: GlobalState) -> GlobalState:
        """Return ``state`` with wide values; all other fields are shared, and changed in place."""
        # `_version`, private to torch, counts all writes to a storage, through any view: by a merge, a resume or a
        # callback
        counters = [buffer._version for buffer in state.values.buffers.values()]
        values, seen_counters = state.scratch.get(VALUES, (None, None))
        if counters != seen_counters:
            values = self.submodels.widen(state.values, values)
            state.scratch[VALUES] = values, counters
        return replace(state, submodels=self.submodels, values=values)

    @property
    def personalizes(self) -> bool:
        """Whether the wrapped merge sends each client values of its own."""
        return self.inner.personalizes

    def personalize(self, state: GlobalState, client: int, spec: Spec, values: FlatTensors, bundles: Bundles) -> None:
        """Let the wrapped merge write the client's values in wide tensors, then round them."""
        wide, wide_bundles = widened(values), {name: widened(bundle) for name, bundle in bundles.items()}
        self.inner.personalize(self.view(state), client, spec, wide, wide_bundles)
        for target, written in ((values, wide), *((bundles[name], written) for name, written in wide_bundles.items())):
            if written is not target:
                round_(target, written)

    def reject_reason(self, state: GlobalState, update: Update, spec: Spec, staleness: int) -> str | None:
        """Convert the update to wide tensors and return the wrapped merge's reason to refuse it; None = it accepts the update."""
        return self.inner.reject_reason(self.view(state), _wide_update(state, update), spec, staleness)

    def receive(self, state: GlobalState, update: Update, spec: Spec, staleness: int) -> None:
        """Pass a copy of the update, in at least single precision, to the wrapped merge."""
        self.inner.receive(self.view(state), _wide_update(state, update), spec, staleness)

    def apply(self, state: GlobalState) -> None:
        """Let the wrapped merge compute in at least single precision, then round the result into the model."""
        wide = self.view(state)
        self.inner.apply(wide)
        self.submodels.round_(state.values, wide.values)


def _wide_update(state: GlobalState, update: Update) -> Update:
    """Copy an update to wide dtypes, in memory that the next update will overwrite."""
    bundles = {name: widened(bundle, _room(state, name, bundle)) for name, bundle in update.bundles.items()}
    return replace(update, tensors=widened(update.tensors, _room(state, "", update.tensors)), bundles=bundles)


def _room(state: GlobalState, name: str, flat: FlatTensors) -> FlatTensors | None:
    """Return reusable memory for a copy of ``flat`` in wide dtypes; None if its dtypes are wide already."""
    wide = flat.layout.wide
    if wide is flat.layout:
        return None
    storage = state.scratch.setdefault(f"wide update {name}", {})
    for dtype, numel in wide.numel.items():
        if dtype not in storage or len(storage[dtype]) < numel or storage[dtype].device != flat.device:
            storage[dtype] = torch.empty(numel, dtype=dtype, device=flat.device)
    return FlatTensors(wide, {dtype: storage[dtype][:numel] for dtype, numel in wide.numel.items()})
