"""Present a model's submodels to merges in real numbers of at least single precision, whatever the model computes in."""

from __future__ import annotations

from typing import Any

from raafl.submodel.caches import Caches
from raafl.submodel.cost import Cost
from raafl.submodel.flat import FlatTensors, Layout
from raafl.submodel.spec import FULL, Spec
from raafl.submodel.submodels import Part, Submodels


class WideSubmodels(Submodels):
    """Layouts and plans of the same submodels over wide tensors (`Layout.wide`), without the frozen base.

    Half precision becomes float32. A complex tensor gets a last dimension of 2, which no axis cuts. Everything else (axes,
    specs, names, costs) is the model's own.
    """

    def __init__(self, own: Submodels) -> None:
        """Share everything known of ``own``, whose axes are final by now."""
        _ = own.axes  # found on the model's own shapes
        self.__dict__.update(own.__dict__)
        self.own, self._caches = own, Caches()

    def _layout(self, spec: Spec, part: Part) -> Layout:
        return self.narrow_layout(spec, part).wide

    def narrow_layout(self, spec: Spec = FULL, part: Part = "present") -> Layout:
        """Return the layout of the same tensors in the model's own dtypes; a prefix of the model's own layout."""
        layout = self.own.layout(spec, part)
        return layout.only([e.name for e in layout.entries if e.name not in self.frozen])

    def cost(self, spec: Spec = FULL, batch_size: int = 1) -> Cost:
        """Return the cost of training ``spec`` in the model's own precision."""
        return self.own.cost(spec, batch_size)

    def shrink(self, *args: Any, **options: Any) -> Any:
        """Build the small module in the model's own precision."""
        return self.own.shrink(*args, **options)

    def widen(self, values: FlatTensors, out: FlatTensors | None = None) -> FlatTensors:
        """Copy values in the model's own layout to ``out`` (default: new storage) in the wide layout."""
        return values.prefix(self.cached("narrow", "", self.narrow_layout)).widen(out)

    def round_(self, values: FlatTensors, wide: FlatTensors) -> None:
        """Write ``wide`` into the model's values, in place, each number rounded once."""
        values.prefix(self.cached("narrow", "", self.narrow_layout)).round_(wide)
