"""Find a model's axes: follow a step, and take each group of coupled dimensions as an axis where nothing prevents it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from raafl.submodel import lora
from raafl.submodel.axes import Axis, Member, Shapes, declared_axes
from raafl.submodel.cut.sizes import Sizes
from raafl.submodel.declared import declarations
from raafl.submodel.find.candidates import Candidates
from raafl.submodel.find.labels import Reason
from raafl.submodel.find.trace import TraceResult, trace

_REMEDY = "declare `submodel_axes` on the model, or train the full model"


@dataclass(frozen=True, slots=True)
class DiscoveredAxes:
    """Result of the search for the axes of a model (groups of dimensions that can shrink together)."""

    # axes that were found, in the order of the tensors in which they begin
    axes: list[Axis] = field(default_factory=list)
    # reason for which a dimension cannot shrink, by (parameter, dimension)
    whole: Mapping[tuple[str, int], Reason] = field(default_factory=dict)
    # reason for which a layer's width cannot shrink, by layer
    kept_whole: Mapping[str, str] = field(default_factory=dict)
    sizes: Sizes = field(default_factory=Sizes)  # numbers in the module's own code that must shrink with the axes
    # names of axes over which a norm computes statistics, such as the width of the residual stream
    spanned: frozenset[str] = frozenset()
    # layers whose output is not rescaled when they lose units (see `Submodels.shrink`)
    unscaled: frozenset[str] = frozenset()
    problem: str | None = None  # reason for which no training step could be traced to its end; None = one was

    def structure_arguments(self) -> dict[str, Any]:
        """Return the arguments of `raafl.submodel.cut.shrink.Structure` that this result determines, by name."""
        full = {axis.name: axis.size for axis in self.axes}
        return {"sizes": self.sizes, "full": full, "unscaled": self.unscaled}


def discover_axes(
    module: nn.Module,
    batch: object,
    shapes: Shapes,
    aliases: Mapping[str, str],
    *,
    residual_width: bool = False,
    only_ranks: bool = True,
) -> DiscoveredAxes:
    """Find the axes of ``module`` by following its dimensions through the operations of a training step.

    Dimensions of the model's outputs never belong to an axis.

    `batch`: batch of real data; None = generate one that fits the first layer.
    `shapes`: shape of each parameter and buffer.
    `aliases`: names of tied tensors, each mapped to the tensor's name in ``shapes``.
    """
    ranks = lora.ranks(module)
    if ranks and only_ranks:
        one = {axis.name: "it has one unit" for axis in ranks if axis.size == 1}
        return DiscoveredAxes([axis for axis in ranks if axis.size > 1], kept_whole=one, unscaled=lora.unscaled(module))
    declared = [axis for path, part in _parts(module) for axis in _declared(path, part, shapes, aliases)]
    seen = trace(module, batch)
    problem = None
    if seen.problem is not None:
        problem = f"axes of {type(module).__name__} were not found: {seen.problem}; {_REMEDY}"
        seen = TraceResult({}, seen.labels, frozenset(), seen.watch)
    candidates = Candidates(seen, module, residual_width, declared)
    places = {name: place for place, name in enumerate(shapes)}
    found = candidates.as_axes()
    axes = sorted([*found, *declared], key=lambda axis: min(places.get(m.name, len(places)) for m in axis.members))
    whole = candidates.whole()
    kept_whole: dict[str, str] = {}
    for (name, dim), reason in whole.items():
        if seen.dims[name][dim].is_made or len(seen.dims[name]) == 1:
            kept_whole.setdefault(name.rpartition(".")[0] or name, str(reason))
    return DiscoveredAxes(
        axes,
        whole,
        kept_whole,
        seen.watch.solve(candidates.extent, {axis.name: axis.size for axis in found}),
        frozenset(name for name, c in candidates.axes.items() if c.atom.span is not None),
        candidates.unscaled(),
        problem,
    )


def _parts(module: nn.Module) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the parts that declare their axes, without those inside such a part."""
    paths: list[str] = []
    for path, declaration in declarations(module, "submodel_axes"):
        if not any(path.startswith(f"{other}.") for other in paths):
            paths.append(path)
            yield path, declaration


def _declared(path: str, declaration: Mapping[str, Any], shapes: Shapes, aliases: Mapping[str, str]) -> Iterator[Axis]:
    """Yield the axes of a part by the names that it has in the whole model."""
    prefix = f"{path}."
    inner = {name.removeprefix(prefix): shape for name, shape in shapes.items() if name.startswith(prefix)}
    own = {name.removeprefix(prefix): other for name, other in aliases.items() if name.startswith(prefix)}
    for axis in declared_axes(declaration, inner | {other: shapes[other] for other in own.values()}, own):
        members = (
            m if m.name in own.values() else Member(prefix + m.name, m.dim, m.unit, m.offset) for m in axis.members
        )
        yield Axis(prefix + axis.name, axis.size, tuple(members))
