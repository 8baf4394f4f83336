"""A narrow copy of a large model, built alike, on which its axes are proven."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from raafl.submodel.flat import FlatTensors
from raafl.submodel.frozen import select
from raafl.submodel.shrink import persistent_buffers
from raafl.submodel.spec import Spec

if TYPE_CHECKING:
    from raafl.submodel.submodels import Submodels

NARROW = 16
"""What a narrow copy keeps of each axis: one unit in so many, and no fewer than two."""


def narrowed(submodels: Submodels, module: nn.Module, batch: Any) -> tuple[Submodels, nn.Module] | None:
    """Return a narrow copy with the model's own buffers, if the same axes are found in it.

    Where it can be, the residual width is cut, too: the copy need not do what the model does, only be built alike.

    Args:
        submodels: of the model.
        module: the model, real or a skeleton.
        batch: a real one.
    """
    for wide in dict.fromkeys([True, submodels.residual_width]):
        try:
            large = type(submodels)(module, batch, residual_width=wide, batch_norm=submodels.batch_norm)
            least = {name: min(axis.size, max(2, axis.size // NARROW)) for name, axis in large.axes.items()}
            copy = _cut(large, module, large.normal(Spec.keep({name: range(size) for name, size in least.items()})))
            narrow = type(submodels)(
                copy, batch, residual_width=submodels.residual_width, batch_norm=submodels.batch_norm
            )
            if {name: axis.size for name, axis in narrow.axes.items()} == {
                name: least[name] for name in submodels.axes
            }:
                return narrow, copy
        except Exception:  # of the user's code, such as axes that it declares for one size
            continue
    return None


def _cut(submodels: Submodels, module: nn.Module, spec: Spec) -> nn.Module:
    """Return the model of ``spec``, whose parameters are 0 and whose buffers are those of ``module``."""
    small = submodels.shrink(spec, present=FlatTensors.zeros(submodels.layout(spec)))
    selections = submodels._selections(spec)
    for name, buffer in persistent_buffers(module).items():
        if buffer.device.type != "meta" and name in small.present.layout.by_name:
            small.present[name].copy_(select(buffer, selections.get(name, {})))
    return small.module


def num_values(submodels: Submodels) -> int:
    """Count the parameters of the whole model."""
    return sum(submodels.parameters.values())
