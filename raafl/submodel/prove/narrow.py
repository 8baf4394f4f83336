"""Prepare the models on which axes are proven: random values, and for a large model a narrow copy of the same structure."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from raafl.errors import USER_ERRORS
from raafl.submodel import lora
from raafl.submodel.cut.layers import persistent_buffers, select, statistics_of, without_values
from raafl.submodel.flat import FlatTensors, is_merged
from raafl.submodel.isolated_run import draw_, noise_like
from raafl.submodel.nested_batch import batch_tensors, mapped
from raafl.submodel.spec import Spec

if TYPE_CHECKING:
    from raafl.submodel.submodels import Submodels

NARROW = 16
"""Divisor of each axis's units in a narrow copy, which keeps at least two."""

WIDEST = 64
"""Largest residual width of a narrow copy, since tables of a large vocabulary are as wide."""


LONGEST = 64
"""Largest number of tokens of each text for the proof on a narrow copy of a model without values."""


def narrowed(submodels: Submodels, module: nn.Module, batch: object) -> tuple[Submodels, nn.Module] | None:
    """Return a narrow copy of a large model with the same axes, on which these can be checked faster; None if that fails.

    The copy has the same structure, but need not compute the same. So the residual width is narrowed, too, where
    possible, and so are frozen layers beside LoRA ranks; the ranks stay.
    """
    ranks = {axis.members for axis in lora.ranks(module)}
    for wide in dict.fromkeys([True, submodels.residual_width]):
        try:
            large = type(submodels)(
                _plain(module), batch, residual_width=wide, batch_norm=submodels.batch_norm, only_ranks=False
            )
            least = {name: min(axis.size, max(2, axis.size // NARROW)) for name, axis in large.axes.items()}
            least |= {name: min(least[name], WIDEST) for name in (large.discovered.spanned if large.discovered else ())}
            least |= {name: axis.size for name, axis in large.axes.items() if axis.members in ranks}
            copy = _cut(large, module, large.normal(Spec.select({name: range(size) for name, size in least.items()})))
            narrow = type(submodels)(
                copy, batch, residual_width=submodels.residual_width, batch_norm=submodels.batch_norm
            )
            if {name: axis.size for name, axis in narrow.axes.items()} == {
                name: least.get(name, axis.size) for name, axis in submodels.axes.items()
            }:
                return narrow, copy
        except USER_ERRORS:  # the user's code may fail at other sizes, as with axes declared for one size
            continue
    return None


def _plain(module: nn.Module) -> nn.Module:
    """Replace quantised layers, whose packed weights cannot be cut, by ordinary ones without values and of one dtype."""
    if not any(hasattr(layer, "submodel_plain") for layer in module.modules()):
        return module
    module = without_values(module)
    for path, layer in list(module.named_modules()):
        if hasattr(layer, "submodel_plain"):
            module.set_submodule(path, layer.submodel_plain())
    return module.float()


def _cut(submodels: Submodels, module: nn.Module, spec: Spec) -> nn.Module:
    """Build the module of a submodel, whose parameters are all zero and whose buffers are cut out of those of ``module``."""
    small = submodels.shrink(spec, present=FlatTensors.zeros(submodels.layout(spec)))
    selections = submodels.selections(spec)
    for name, buffer in persistent_buffers(module).items():
        if buffer.device.type != "meta" and name in small.present.layout.by_name:
            small.present[name].copy_(select(buffer, selections.get(name, {})))
    return small.module


def random_values(submodels: Submodels, module: nn.Module) -> FlatTensors:
    """Return values for the whole model: parameters are random, like freshly initialised ones, and no two are equal."""
    generator, values = torch.Generator().manual_seed(7), FlatTensors.zeros(submodels.layout())
    buffers = persistent_buffers(module)
    statistics = {name for pair in statistics_of(module) for name in pair}
    for name, value in values.items():
        noise = noise_like(value, generator)
        if name in buffers and buffers[name].device.type != "meta":
            value.copy_(buffers[name])
            if name in statistics:
                value.add_(0.3 * noise.abs())
        elif name in buffers:  # no zeros, by which a spectral norm would divide
            value.copy_(noise.abs()) if is_merged(value.dtype) else value.zero_()
        else:
            draw_(name, value, noise)
    return values


def shortened(batch: object) -> object:
    """Shorten each text of a batch to its first `LONGEST` tokens; other batches are returned unchanged."""
    tensors = batch_tensors(batch)
    if not tensors or any(x.dim() != 2 or x.is_floating_point() or x.shape != tensors[0].shape for x in tensors):
        return batch
    return mapped(batch, lambda x: x[:, :LONGEST])


def num_values(submodels: Submodels) -> int:
    """Return the number of elements in all parameters of the whole model."""
    return sum(submodels.parameters.values())
