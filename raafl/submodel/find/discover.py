"""Find a model's axes: follow a step, and take each group of coupled dimensions as an axis where nothing prevents it."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from raafl.submodel import lora
from raafl.submodel.cut.sizes import TORCHVISION, Extent, Sizes, hugging_face, is_packaged, produces, type_names
from raafl.submodel.declared import above, declarations, join, within
from raafl.submodel.find.declared_axes import declared_axes
from raafl.submodel.find.labels import Atom, Dim, Reason
from raafl.submodel.find.trace import TraceResult, trace
from raafl.submodel.spec import Axis, Member, Shapes

_REMEDY = "declare `submodel_axes` on the model, or train the full model"


@dataclass(frozen=True, slots=True)
class DiscoveredAxes:
    """Result of the search for the axes of a model (groups of dimensions that can shrink together)."""

    # found axes, in the order of the tensors in which each first occurs
    axes: list[Axis] = field(default_factory=list)
    # by (parameter, dimension): reason for which that dimension cannot shrink
    whole: Mapping[tuple[str, int], Reason] = field(default_factory=dict)
    # by layer: reason for which its width cannot shrink
    kept_whole: Mapping[str, str] = field(default_factory=dict)
    sizes: Sizes = field(default_factory=Sizes)  # numbers in the module's own code that shrink with the axes
    # names of axes over which a norm computes statistics, as over the width of the residual stream
    spanned: frozenset[str] = frozenset()
    # layers whose output is not rescaled when units are missing (see `Submodels.shrink`)
    unscaled: frozenset[str] = frozenset()
    problem: str | None = None  # reason for which no training step could be traced to its end; None if one was

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
    """Yield path and declaration of each outermost module that declares its axes."""
    paths: list[str] = []
    for path, declaration in declarations(module, "submodel_axes"):
        if not any(path.startswith(f"{other}.") for other in paths):
            paths.append(path)
            yield path, declaration


def _declared(path: str, declaration: Mapping[str, Any], shapes: Shapes, aliases: Mapping[str, str]) -> Iterator[Axis]:
    """Yield the axes declared by the module at ``path``, which precedes their names."""
    prefix = f"{path}."
    inner = {name.removeprefix(prefix): shape for name, shape in shapes.items() if name.startswith(prefix)}
    own = {name.removeprefix(prefix): other for name, other in aliases.items() if name.startswith(prefix)}
    for axis in declared_axes(declaration, inner | {other: shapes[other] for other in own.values()}, own):
        members = (
            m if m.name in own.values() else Member(prefix + m.name, m.dim, m.unit, m.offset) for m in axis.members
        )
        yield Axis(prefix + axis.name, axis.size, tuple(members))


MOST_MEMBERS = 512
"""Largest number of places of an axis within one dimension; with more the axis stays whole."""

_LISTS = (nn.ModuleList, nn.Sequential)
_LAYERS = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)


@dataclass(frozen=True, slots=True)
class Occurrence:
    """Place of the units of a possible axis (dimensions that might shrink together) in one dimension of one tensor.

    The same units may occur several times in a dimension, for example if two copies of them are concatenated.
    """

    name: str  # name of the tensor
    dim: int  # index of the dimension, from 0
    # index of the first element of each occurrence, from which each unit has ``unit`` elements
    starts: tuple[int, ...]
    unit: int  # number of elements for each unit
    is_read: bool  # whether a matrix product sums over the dimension, as over the inputs of a weight
    is_made: bool  # whether a product or a look-up creates the dimension, as the outputs of a weight


@dataclass
class Candidate:
    """A possible axis: units that might be dropped, and their positions in all tensors."""

    atom: Atom  # label of the units; units with one label must be dropped together
    # positions of the units in the model's tensors, in the order of the tensors
    spots: list[Occurrence] = field(default_factory=list)
    # labels of units around these in one flattened dimension, as heads are around their features
    outside: set[Atom] = field(default_factory=set)

    @property
    def producers(self) -> list[str]:
        """Names of the tensors that compute the candidate's units, such as the weight of a layer whose outputs they are.

        If no tensor computes them, names of all tensors that have the units.
        """
        made = [spot.name for spot in self.spots if spot.is_made]
        made = made or [spot.name for spot in self.spots if not spot.is_read]
        return made or [spot.name for spot in self.spots]


class Candidates:
    """All possible axes of a model, divided into real axes and dimensions that must stay whole.

    `axes`: accepted axes by name, in the order of the model's tensors.
    `whole`: reason for which a dimension, or a part of it, cannot shrink, by (tensor, dimension).
    """

    def __init__(
        self, seen: TraceResult, module: nn.Module, residual_width: bool, declared: Iterable[Axis] = ()
    ) -> None:
        """Find the axes of ``module`` in its trace ``seen``, except those that its modules declare."""
        self._declared = {(member.name, member.dim) for axis in declared for member in axis.members}
        self.seen, self.module = seen, module
        self._held = dict(self._hold())
        self._pin_numbers()
        self._by_atom: dict[Atom, Candidate] = {}
        self._places = {name: place for place, name in enumerate(seen.dims)}
        for name, dims in seen.dims.items():
            for place, dim in enumerate(dims):
                if dim.size:
                    self._collect(name, place, dim)
        self._copy_to_exits()
        self._pin_outputs()
        self.reasons: dict[Atom, Reason] = {}
        picked: list[Candidate] = []
        for candidate in sorted(self._by_atom.values(), key=lambda c: len(c.outside)):
            if (reason := self._why_whole(candidate, residual_width)) is not None:
                self.reasons[candidate.atom] = reason
            elif not any(other.atom in candidate.outside for other in picked):
                picked.append(candidate)
        picked.sort(key=lambda c: (self._places[c.spots[0].name], c.spots[0].dim, c.spots[0].starts))
        self.axes = dict(zip(self._names(picked), picked, strict=True))
        self._name_of = {candidate.atom: name for name, candidate in self.axes.items()}

    def _hold(self) -> Iterator[tuple[tuple[str, int], Reason]]:
        """Prevent the layers of `WHOLE_LAYERS` from shrinking; yield their dimensions with the reason."""
        for path, is_wide in whole_layers(self.module):
            name = f"{path}.weight"
            if name not in self.seen.dims:
                continue  # this model lacks the layer
            _, place = produces(self.module.get_submodule(path)) or ("", 0)
            made, read = self.seen.dims[name][place], self.seen.dims[name][1 - place]
            if is_wide:
                self.seen.labels.unify(made, read)
                yield (name, place), Reason("its features are hidden states, which shrink only with the residual width")
            else:
                self.seen.labels.pin(
                    made, Reason("raafl leaves it whole, so that runs of version 0.1.0 can be replayed")
                )

    def _pin_numbers(self) -> None:
        """Prevent axes from shrinking whose size the code uses as a number, as in a scale, unless a norm spans them."""
        for (origin, _), place in self.seen.watch.uses.numbers.items():
            units = list(origin.units()) if isinstance(origin, Dim) else []
            if not any(atom.span is not None for atom in units):
                for atom in units:
                    atom.pin = atom.pin or Reason("its size is used as a number", place)

    def _collect(self, name: str, place: int, dim: Dim) -> None:
        for atom, starts, unit, outside in _spots(dim, (0,), 1, ()):
            candidate = self._by_atom.setdefault(atom, Candidate(atom))
            candidate.spots.append(Occurrence(name, place, starts, unit, dim.is_read, dim.is_made))
            candidate.outside.update(other for other in outside if other is not atom)

    def _copy_to_exits(self) -> None:
        """Copy axes from each replaced module to the exit that replaces it, since the trace did not call the exit."""
        places = [
            (join(prefix, place), join(prefix, path))
            for prefix, exits in declarations(self.module, "submodel_exits")
            for one in exits.values()
            for place, path in (one.items() if isinstance(one, Mapping) else ())
        ]
        for candidate in self._by_atom.values():
            for spot, (place, path) in itertools.product(list(candidate.spots), places):
                own = path + spot.name.removeprefix(place)
                if within(spot.name, (place,)) and own in self.seen.dims:
                    candidate.spots.append(replace(spot, name=own))
                    self.seen.untouched.discard(own)

    def _pin_outputs(self) -> None:
        """Prevent axes from shrinking that are within one module and in its output, whose shape must stay."""
        for path, dims in self.seen.given:
            for atom in (atom for dim in dims for atom in dim.units()):
                candidate = self._by_atom.get(atom)
                if candidate is not None and all(within(spot.name, (path,)) for spot in candidate.spots):
                    reason = Reason(f"it is an output of '{path}'" if path else "it is an output of the model")
                    atom.pin = reason  # replaces an earlier reason, since this one is more specific

    def _why_whole(self, candidate: Candidate, residual_width: bool) -> Reason | None:
        atom = candidate.atom
        if atom.pin is not None:
            return atom.pin
        if atom.span is not None and not residual_width:
            return Reason(f"{atom.span.text}: it shrinks only with residual_width: true", atom.span.place)
        if any((spot.name, spot.dim) in self._declared for spot in candidate.spots):
            return Reason("a part of the model declares its axes")
        places = {(spot.name, spot.dim) for spot in candidate.spots if spot.name in self.seen.parameters}
        if len(places) < 2 or "read" not in atom.marks:
            return Reason("no other dimension of the model shrinks with it")
        if any(len(spot.starts) > MOST_MEMBERS for spot in candidate.spots):
            return Reason(f"each unit lies in more than {MOST_MEMBERS} places of a dimension")
        home = _common(spot.name.rpartition(".")[0] for spot in candidate.spots)
        sizes = {self.seen.dims[spot.name][spot.dim].size for spot in candidate.spots}
        for name in sorted(self.seen.untouched):
            if within(name, (home,)) and sizes & {dim.size for dim in self.seen.dims[name]}:
                return Reason(f"'{name}', which may belong to it, was not used in the traced steps")
        return None

    # ---- name the axes ----

    def _names(self, picked: Sequence[Candidate]) -> list[str]:
        """Name the axes: heads and feed-forward units by their block, all others by the first layer that creates them."""
        blocks = [self._block(c) for c in picked]
        heads = {block for c, block in zip(picked, blocks, strict=True) if "batch" in c.atom.marks}
        alone = [b for c, b in zip(picked, blocks, strict=True) if "batch" not in c.atom.marks and c.atom.span is None]
        names: list[str] = []
        for candidate, block in zip(picked, blocks, strict=True):
            made = candidate.producers[0].rpartition(".")[0] or candidate.producers[0]
            options, is_wide = [made], candidate.atom.span is not None
            if "batch" in candidate.atom.marks:
                options = [join(block, "heads"), join(block, "cross_heads"), made]
            elif not is_wide and block in heads and alone.count(block) == 1:
                options = [join(block, "ffn"), made]
            elif is_wide and any(within(spot.name, heads) for spot in candidate.spots):
                options = [*self._width(candidate), made]
            number = (f"{made}.{i}" for i in range(2, len(picked) + 2))
            names.append(next(name for name in (*options, *number) if name not in names))
        return names

    def _block(self, candidate: Candidate) -> str:
        """Return the path of the innermost block that contains the whole axis, or of the innermost module if no block does."""
        home = _common(spot.name.rpartition(".")[0] for spot in candidate.spots)
        for path in filter(None, (home, *reversed(above(home)))):
            parent = self.module.get_submodule(path.rpartition(".")[0])
            if isinstance(parent, _LISTS) or isinstance(self.module.get_submodule(path), _LAYERS):
                return path
        return home

    def _width(self, candidate: Candidate) -> list[str]:
        """Suggest a name for the axis: the path of the Hugging Face or torchvision model around its layers, and `.width`."""
        home = _common(name.rpartition(".")[0] for name in candidate.producers)
        packages = (path for path in (*above(home), home) if is_packaged(self.module.get_submodule(path)))
        return [join(path, "width") for path in packages][:1]

    # ---- results ----

    def as_axes(self) -> list[Axis]:
        """Return the accepted candidates as `Axis` objects."""
        axes = []
        for name, candidate in self.axes.items():
            members = dict.fromkeys(
                Member(spot.name, spot.dim, spot.unit, start) for spot in candidate.spots for start in spot.starts
            )
            axes.append(Axis(name, candidate.atom.size, tuple(members)))
        return axes

    def whole(self) -> dict[tuple[str, int], Reason]:
        """Return the reason for which a dimension cannot shrink, for each parameter dimension that belongs to no axis."""
        found: dict[tuple[str, int], Reason] = {}
        for name, dims in self.seen.dims.items():
            for place, dim in enumerate(dims if name in self.seen.parameters else ()):
                units = list(dim.units())
                if units and not any(atom in self._name_of for atom in units):
                    why = next((self.reasons[a] for a in units if a in self.reasons), Reason("it has one unit"))
                    found[name, place] = self._held.get((name, place), why)
        return found

    def unscaled(self) -> frozenset[str]:
        """Return the layers whose output must not be rescaled when some of their units are dropped.

        These are layers for queries and keys, whose products are summed over all features of a head that is kept whole,
        and gates, which multiply a value that was already rescaled.
        """
        found: set[str] = set()
        for candidate in self.axes.values():
            made = [spot for spot in candidate.spots if spot.is_made]
            for spot in made:
                units = self.seen.dims[spot.name][spot.dim].units()
                if "batch" in candidate.atom.marks and any("scored" in unit.marks for unit in units):
                    found.add(spot.name.rpartition(".")[0])
            if "gated" in candidate.atom.marks:
                found.update(spot.name.rpartition(".")[0] for spot in made[:-1])
        return frozenset(found)

    def extent(self, dim: Dim) -> Extent | None:
        """Return the size of a tensor dimension as a formula of the sizes of axes; None if it depends on the batch."""
        terms: dict[tuple[str, ...], int] = {(): 1}
        for atom in dim.leaves():
            factor = self._terms(atom)
            if factor is None:
                return None
            product: dict[tuple[str, ...], int] = {}
            for axes, number in terms.items():
                for others, times in factor.items():
                    key = tuple(sorted((*axes, *others)))
                    product[key] = product.get(key, 0) + number * times
            terms = product
        return Extent.of(terms)

    def _terms(self, atom: Atom) -> Mapping[tuple[str, ...], int] | None:
        if atom in self._name_of:
            return {(self._name_of[atom],): 1}
        if not atom.parts:
            return None if "given" in atom.marks else {(): atom.size}
        terms: dict[tuple[str, ...], int] = {}
        for part in atom.parts:
            extent = self.extent(part)
            if extent is None:
                return None
            for number, axes in extent.terms:
                terms[axes] = terms.get(axes, 0) + number
        return terms


def _spots(
    dim: Dim, starts: tuple[int, ...], unit: int, outside: tuple[Atom, ...]
) -> Iterator[tuple[Atom, tuple[int, ...], int, tuple[Atom, ...]]]:
    """Yield each undivided factor of a dimension, with the offsets of its units, the elements per unit, and outer factors."""
    unit *= dim.size
    for atom in dim.leaves():
        unit //= atom.size
        if atom.parts:
            done = 0
            for part in atom.parts:
                yield from _spots(part, tuple(start + done * unit for start in starts), unit, outside)
                done += part.size
        else:
            yield atom, starts, unit, outside
        starts = tuple(start + i * unit for start in starts for i in range(min(atom.size, MOST_MEMBERS + 1)))
        starts = starts[: MOST_MEMBERS + 1]
        outside = (*outside, *Dim([atom]).units())


def _common(paths: Iterable[str]) -> str:
    """Return the longest module path that is a prefix of all ``paths``."""
    first, *others = ([*path.split(".")] if path else [] for path in dict.fromkeys(paths))
    for other in others:
        while other[: len(first)] != first:
            first.pop()
    return ".".join(first)


WHOLE_LAYERS: dict[str, tuple[str, bool]] = {
    **dict.fromkeys(
        hugging_face("bert.BertPooler roberta.RobertaPooler vit.ViTPooler deit.DeiTPooler"), ("dense", True)
    ),
    **dict.fromkeys(hugging_face("roberta.RobertaClassificationHead"), ("dense", True)),
    **dict.fromkeys(hugging_face("distilbert.DistilBertForSequenceClassification"), ("pre_classifier", True)),
    **dict.fromkeys(hugging_face("distilbert.DistilBertForMultipleChoice"), ("pre_classifier", True)),
    **dict.fromkeys(hugging_face("albert.AlbertModel"), ("pooler", True)),
    **dict.fromkeys(hugging_face("albert.AlbertEmbeddings"), ("word_embeddings", False)),
    TORCHVISION: ("heads.pre_logits", False),
}
"""Types, and a layer in each that stays whole.

Whether the features that it makes are hidden states as those that it reads are, and go with the residual width; else they
stay whole.
"""


def whole_layers(module: nn.Module) -> Iterator[tuple[str, bool]]:
    """Yield the path of each layer that is never narrowed, and whether its width is that of the residual stream."""
    for path, part in module.named_modules():
        for base in type_names(part):
            if base in WHOLE_LAYERS:
                layer, is_wide = WHOLE_LAYERS[base]
                yield f"{path}.{layer}".removeprefix("."), is_wide
