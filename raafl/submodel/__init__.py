"""Submodels: physically smaller pieces of a model, where they lie in it, and what they cost.

>>> import torch
>>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
>>> submodels = Submodels(model)
>>> {name: axis.size for name, axis in submodels.axes.items()}
{'0': 8}
>>> spec = Spec.select({"0": range(2)})
>>> small = submodels.shrink(spec)
>>> _ = submodels.plan(spec, "present").gather(submodels.state(model), out=small.present)
>>> small.module
Sequential(
  (0): Linear(in_features=4, out_features=2, bias=True)
  (1): ReLU()
  (2): Linear(in_features=2, out_features=2, bias=True)
)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from raafl.submodel.cost import Cost
from raafl.submodel.declared import Exit, Stack
from raafl.submodel.extract import CopyPlan
from raafl.submodel.flat import FlatTensors, Layout, TensorEntry
from raafl.submodel.spec import FULL, Axis, Member, Spec, SpecError
from raafl.submodel.submodels import Shrunk, Submodels

if TYPE_CHECKING:
    from raafl.submodel.batch_norm import collect_statistics
    from raafl.submodel.cut.shrink import skeleton
    from raafl.submodel.depth import EarlyLogits, add_exits, depth_window, last_fraction

__all__ = [
    "FULL",
    "Axis",
    "CopyPlan",
    "Cost",
    "EarlyLogits",
    "Exit",
    "FlatTensors",
    "Layout",
    "Member",
    "Shrunk",
    "Spec",
    "SpecError",
    "Stack",
    "Submodels",
    "TensorEntry",
    "add_exits",
    "collect_statistics",
    "depth_window",
    "last_fraction",
    "skeleton",
]

_LATER = {
    "collect_statistics": "raafl.submodel.batch_norm",
    "skeleton": "raafl.submodel.cut.shrink",
    **dict.fromkeys(("EarlyLogits", "add_exits", "depth_window", "last_fraction"), "raafl.submodel.depth"),
}


def __getattr__(name: str) -> object:
    """Import at its first use a name that only some runs need."""
    module = _LATER.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(module), name)
