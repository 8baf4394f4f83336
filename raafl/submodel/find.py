"""Finds a model's axes: a step is followed, and what goes together in it is an axis where nothing is in the way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from raafl.submodel.axes import Axis
from raafl.submodel.candidates import Candidates
from raafl.submodel.labels import Reason
from raafl.submodel.sizes import Sizes
from raafl.submodel.trace import trace

_REMEDY = "declare `submodel_axes` on the model, or train the full model"


@dataclass(frozen=True, slots=True)
class Found:
    """What was found of a model.

    Attributes:
        axes: in the order of the tensors in which they begin.
        whole: (parameter, dimension) -> why it stays whole.
        made: the dimensions in it that make features, by layer: what a reader looks for first.
        sizes: what has to follow in a small module.
        spanned: the axes across which norms take statistics.
        problem: why no step could be followed to its end.
    """

    axes: list[Axis] = field(default_factory=list)
    whole: Mapping[tuple[str, int], Reason] = field(default_factory=dict)
    made: Mapping[str, Reason] = field(default_factory=dict)
    sizes: Sizes = field(default_factory=Sizes)
    spanned: frozenset[str] = frozenset()
    problem: str | None = None


def find_axes(module: nn.Module, batch: Any, *, residual_width: bool = False) -> Found:
    """Find the axes of ``module``, which may be a skeleton, from a step on ``batch``."""
    seen = trace(module, batch)
    if seen.problem is not None:
        return Found(problem=f"axes of {type(module).__name__} were not found: {seen.problem}; {_REMEDY}")
    candidates = Candidates(seen, module, residual_width)
    axes, whole = candidates.found(), candidates.whole()
    made: dict[str, Reason] = {}
    for (name, dim), reason in whole.items():
        if seen.dims[name][dim].is_made or len(seen.dims[name]) == 1:
            made.setdefault(name.rpartition(".")[0] or name, reason)
    return Found(
        axes, whole, made, seen.watch.solve(candidates.extent, {axis.name: axis.size for axis in axes}),
        frozenset(name for name, c in candidates.axes.items() if c.atom.span is not None),
    )  # fmt: skip
