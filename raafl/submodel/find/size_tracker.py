"""Track where the sizes in a model's calls come from: integers that remember the attribute or dimension they were read from."""

from __future__ import annotations

import math
import operator
import sys
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from raafl.submodel.cut.sizes import (
    BORDERS,
    PARTS,
    TAKERS,
    Counts,
    Extent,
    Part,
    Site,
    Sizes,
    Trail,
    Where,
    put,
    site_of,
)
from raafl.submodel.find.labels import Dim, Labels, ShapeConflict
from raafl.submodel.find.rules import DIVIDED

Attribute = tuple[str, Trail]
NUMBERS = frozenset({"mul", "rmul", "imul", "div", "truediv", "rtruediv", "itruediv", "pow", "rpow", "tensor"})
"""Functions of torch that use a size as an ordinary number, not as a dimension; names without underscores."""

ALONE = (nn.MultiheadAttention, nn.RNNBase)
"""Layers whose sizes follow from their tensors by rules of their own (`raafl.submodel.cut.sizes`)."""


@dataclass(frozen=True, slots=True)
class _Attr:
    """Origin of a number that was read from a module's attribute: the module's path, and the attribute's."""

    key: Attribute


@dataclass(frozen=True, slots=True)
class SizeUse:
    """Use of a size of a tensor as an argument of a torch function, and where this number came from."""

    method: tuple[str, str]  # path of the module, and name of its method, that makes the call
    site: Site  # position of the call in the method's code
    where: Where  # position of the size in the call's arguments
    name: str  # name of the torch function
    origin: Origin  # origin of the size: attribute of a module, tensor dimension, or the number itself
    dim: Dim  # label of the dimension, or of a part of it, that has this size


class _Method:
    """Wrapper of a module's method, by which the tracker knows which method is running."""

    def __init__(self, watch: SizeTracker, module: nn.Module, path: str, name: str) -> None:
        self.watch, self.module, self.path, self.name = watch, module, path, name

    def __call__(self, *args: object, **kwargs: object) -> object:
        self.watch.running.append((self.path, self.name))
        try:
            return getattr(type(self.module), self.name)(self.module, *args, **kwargs)
        finally:
            self.watch.running.pop()


BORDERS.add(_Method.__call__.__code__)


class SizeTracker(TorchFunctionMode):
    """Context that records every size that a model's code passes to torch functions.

    Attributes:
        asked: recorded uses of sizes.
        values: integers that modules store in attributes, by module path and attribute path.
        running: methods that are running now, innermost last.
        uses: recorded uses of sizes outside of torch.
    """

    def __init__(
        self,
        module: nn.Module,
        labels: Labels,
        dims_of: Callable[[Tensor], Any],
        knows: Callable[[Tensor], bool],
        *,
        are_keys_plain: bool = False,
    ) -> None:
        """Replace the numbers stored in ``module``, a copy of the model, by numbers that know their origin.

        Args:
            module: copy of the model.
            labels: registry of the labels of dimensions.
            dims_of: function that returns the labels of a tensor's dimensions.
            knows: function that returns whether a tensor's dimensions have labels.
            are_keys_plain: whether any equal number finds a size as a dictionary's key; False = only one of its origin.
        """
        super().__init__()
        self.asked: list[SizeUse] = []
        self.uses = NonTorchUses(labels.place, are_keys_plain=are_keys_plain)
        self.running: list[tuple[str, str]] = []
        self._alone = {path for path, part in module.named_modules() if isinstance(part, ALONE)}
        self._labels, self._dims_of, self._knows = labels, dims_of, knows
        modules = dict(module.named_modules())
        self.values = dict(_numbers(modules.items()))
        put(modules, {key: Size(value, _Attr(key), self.uses) for key, value in self.values.items()})
        for path, part in modules.items():
            if not isinstance(part, torch.jit.ScriptModule):
                part.__dict__["forward"] = _Method(self, part, path, "forward")
        if callable(getattr(module, "training_step", None)):
            module.__dict__["training_step"] = _Method(self, module, "", "training_step")

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        # this function averages attention over heads, which rarely matters; if it does, the proof fails
        self._labels.is_spanning = name != "multi_head_attention_forward"
        answer = func(*_with_slices(name, args), **kwargs)
        self._labels.is_spanning = True
        if name == "size" or (name == "__get__" and isinstance(answer, torch.Size)):
            return self._measured(args, kwargs, answer)
        if name.strip("_") in NUMBERS:
            for part in args:
                if isinstance(part, Size):
                    self.uses.number(part)
        # on a device without that kernel this call does not occur
        if name == "scaled_dot_product_attention" and kwargs.get("scale") is None:
            self._labels.pin(self._dims_of(args[0] if args else kwargs["query"])[-1], DIVIDED)
        takes = TAKERS.get(name)
        if takes is not None and self.running and self.running[-1][0] not in self._alone:
            site = site_of(sys._getframe(1))
            for where, value, part in takes(args, kwargs, answer) if site else ():
                dim = self._dim(part)
                if dim is not None and isinstance(value, int | None) and not isinstance(value, bool):
                    self.asked.append(SizeUse(self.running[-1], site, where, name, self._origin(value, part), dim))
        return answer

    def _origin(self, value: int | None, part: Part) -> Any:
        """Return the origin of ``value``, which code has passed as the size of ``part``; None = unknown."""
        origin = None if value is None else origin_of(value)
        if value is not None and value < 0 and part.stop is not None:  # the slice ends before the last element
            return ("add", self._dims_of(part.tensor)[part.dim], origin)
        return origin

    def _measured(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], answer: Any) -> object:
        """Return the result of `size` or `shape` as numbers that remember which dimension of the tensor each is from."""
        if not self._knows(args[0]):
            return answer
        dims = self._dims_of(args[0])
        if isinstance(answer, int):
            place = kwargs.get("dim", args[1] if len(args) > 1 else 0)
            return self._measure(answer, dims[place])
        return torch.Size(self._measure(size, dim) for size, dim in zip(answer, dims, strict=True))

    def _measure(self, size: int, dim: Dim) -> int:
        return Size(size, dim, self.uses) if size > 1 and any(atom.pin is None for atom in dim.units()) else size

    def _dim(self, part: Part) -> Dim | None:
        if not self._knows(part.tensor):
            return None
        dim: Dim = self._dims_of(part.tensor)[part.dim]
        try:
            if part.stop is not None:
                return self._labels.take(dim, 0, part.stop) if part.stop else None
            if part.outer is not None:
                return self._labels.regroup([dim], [part.outer, dim.size // part.outer])[0]
        except (ShapeConflict, ZeroDivisionError):
            return None
        return dim

    # ---- results ----

    def solve(self, extent_of: Callable[[Dim], Extent | None], full: Counts) -> Sizes:
        """Return the numbers in the model's code that must change when axes shrink, each with a formula of its size.

        An attribute gets the size of the dimension for which it is used, if all its uses agree. If a call of torch
        would get wrong sizes nevertheless, the sizes are corrected in this call.

        Args:
            extent_of: function that returns the size of a dimension as a formula of the axes' numbers of units; None =
                the size depends on the batch, too.
            full: number of units of each axis in the whole model.
        """
        extents = [extent_of(asked.dim) for asked in self.asked]
        wanted: dict[Attribute, set[Extent]] = {}
        for asked, extent in zip(self.asked, extents, strict=True):
            origin, extent = (asked.origin, extent) if extent is not None else _beside_the_batch(asked, extent_of)
            if isinstance(origin, _Attr) and extent is not None and extent(full) == self.values[origin.key]:
                wanted.setdefault(origin.key, set()).add(extent)
        attributes = {key: min(found, key=str) for key, found in wanted.items() if len(found) == 1}
        attributes = {key: extent for key, extent in attributes.items() if extent.axes}
        samples: list[Counts] = [{axis: max(1, n // k) for axis, n in full.items()} for k in (2, 3)]
        samples += [{axis: max(1, n - 1 - i % 3) for i, (axis, n) in enumerate(full.items())}]

        def comes_to(origin: Origin, attributes: Mapping[Attribute, Extent]) -> list[int | None]:
            return [self._works_out(origin, attributes, extent_of, counts) for counts in samples]

        def is_right(asked: SizeUse, extent: Extent) -> bool:
            found = comes_to(asked.origin, attributes)
            return all(one in (extent(counts), -1) for one, counts in zip(found, samples, strict=True))

        worked_out = [
            (a.origin, e) for a, e in zip(self.asked, extents, strict=True) if not isinstance(a.origin, _Attr)
        ]
        worked_out += [(origin, Extent.of({(): value})) for origin, value in self.uses.numbers]
        for key in _spoiling(attributes, worked_out, comes_to, samples):
            del attributes[key]
        places: dict[tuple[tuple[str, str], Site], list[tuple[SizeUse, Extent | None]]] = {}
        for asked, extent in zip(self.asked, extents, strict=True):
            places.setdefault((asked.method, asked.site), []).append((asked, extent))
        calls: dict[tuple[str, str], dict[Site, dict[Where, Extent]]] = {}
        for (method, site), noted in places.items():
            sizes: dict[Where, Extent | None] = {}
            if any(sizes.setdefault(asked.where, extent) != extent for asked, extent in noted):
                continue  # one call of the code has had several sizes, so no one correction fits
            wrong = {asked.where for asked, extent in noted if extent is not None and not is_right(asked, extent)}
            name = noted[0][0].name
            if name in PARTS and (wrong or (name == "chunk" and len(set(sizes.values())) > 1)):
                wrong = set(sizes)  # torch.split takes the sizes of all parts together
            replaced = {where: extent for where, extent in sizes.items() if extent is not None and where in wrong}
            if replaced:
                calls.setdefault(method, {})[site] = replaced
        return Sizes(attributes, calls)

    def _works_out(
        self,
        origin: Origin,
        attributes: Mapping[Attribute, Extent],
        extent_of: Callable[[Dim], Extent | None],
        counts: Counts,
    ) -> int | None:
        """Compute a number of origin ``origin`` for a submodel with ``counts`` units of each axis; None = unknown."""
        if isinstance(origin, _Attr):
            return attributes[origin.key](counts) if origin.key in attributes else self.values[origin.key]
        if isinstance(origin, Dim):
            extent = extent_of(origin)
            return origin.size if extent is None else extent(counts)
        if isinstance(origin, tuple):
            one, other = (self._works_out(o, attributes, extent_of, counts) for o in origin[1:])
            try:
                return None if one is None or other is None else OPERATORS[origin[0]](one, other)
            except ZeroDivisionError:
                return None
        return -1 if origin is None else int(origin)


def _beside_the_batch(asked: SizeUse, extent_of: Callable[[Dim], Extent | None]) -> tuple[Origin, Extent | None]:
    """Separate the batch size from a size such as `batch * heads`; return the other factor, and the formula of that factor.

    Both are None if the size is no such product. `extent_of`: returns the formula of a dimension's size; None = it
    depends on the batch.
    """
    if not isinstance(asked.origin, tuple) or asked.origin[0] != "mul":
        return None, None
    leaves = asked.dim.leaves()
    own = [atom for atom in leaves if "given" not in atom.marks]
    batch = math.prod(atom.size for atom in leaves if "given" in atom.marks)
    _, one, other = asked.origin
    if batch not in (one, other):
        return None, None
    return other if one == batch else one, extent_of(Dim(own))


def _with_slices(name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments of an indexing call, where a list of consecutive indices becomes a slice."""
    index = args[1] if name == "__getitem__" and isinstance(args[1], tuple) else ()
    lists = [i for i, one in enumerate(index) if isinstance(one, list | Tensor)]
    places = index[lists[0]] if len(lists) == 1 else ()
    if not isinstance(places, list) or not places or not all(type(i) is int for i in places):
        return args
    first, stop = places[0], places[-1] + 1
    if places != list(range(first, stop)) or first < 0 <= stop - 1:
        return args
    return args[0], (*index[: lists[0]], slice(first, stop or None), *index[lists[0] + 1 :])


def _spoiling(
    attributes: Mapping[Attribute, Extent],
    worked_out: Iterable[tuple[Origin, Extent | None]],
    comes_to: Any,
    samples: list[Counts],
) -> set[Attribute]:
    """Return the attributes that must keep their values, since other numbers computed from them would be wrong."""
    # `width // heads` is a head's size only for the whole number of heads, and the scale of attention depends on it
    found = set()
    for origin, extent in worked_out:
        keys = {key for key in _attributes_in(origin) if key in attributes}
        if extent is None or not keys:
            continue
        less = {key: value for key, value in attributes.items() if key not in keys}
        if comes_to(origin, less) == [extent(counts) for counts in samples] != comes_to(origin, attributes):
            found |= keys
    return found


def _attributes_in(origin: Origin) -> Iterable[Attribute]:
    if isinstance(origin, _Attr):
        yield origin.key
    elif isinstance(origin, tuple):
        for part in origin[1:]:
            yield from _attributes_in(part)


PLAIN = (nn.Module, Tensor, type, types.ModuleType, types.FunctionType, types.MethodType, int, float, str, bytes)


def _numbers(modules: Iterable[tuple[str, nn.Module]]) -> Iterable[tuple[Attribute, int]]:
    """Yield the integers in modules' attributes, also those in tuples, dicts and plain objects there."""
    for path, module in modules:
        if isinstance(module, ALONE):
            continue
        for name, value in module.__dict__.items():
            if name.startswith("_"):
                continue
            if _counts(value):
                yield (path, (name,)), value
            elif isinstance(value, tuple | list):
                plain = value if type(value) in (tuple, list) and all(type(x) is int for x in value) else ()
                yield from (((path, (name, i)), x) for i, x in enumerate(plain) if _counts(x))
            elif isinstance(value, dict) or (hasattr(value, "__dict__") and not isinstance(value, PLAIN)):
                inside = value if isinstance(value, dict) else value.__dict__
                yield from (
                    ((path, (name, key)), x) for key, x in inside.items() if isinstance(key, str) and _counts(x)
                )


def _counts(value: object) -> bool:
    return type(value) is int and value > 1


Origin = Any
"""Origin of a number: an `Attribute` key, a `Dim`, (operator, origin, origin), or a plain number."""

OPERATORS: dict[str, Callable[[int, int], int]] = {
    name: getattr(operator, name) for name in ("add", "sub", "mul", "floordiv", "mod")
}


class NonTorchUses:
    """Record of what the code does with sizes beside passing them to torch.

    `numbers`: line of code that has computed something else from a size, such as a scaling factor, by origin and
    size.
    `was_key`: whether a size was looked up in a dictionary or set, as a cache over sizes does.
    """

    def __init__(self, place: Callable[[], str], *, are_keys_plain: bool = False) -> None:
        """Create an empty record; ``place`` returns the user's line of code that runs; `are_keys_plain`: see `SizeTracker`."""
        self.numbers: dict[tuple[Origin, int], str] = {}
        self.was_key, self.are_keys_plain = False, are_keys_plain
        self._place = place

    def number(self, size: Size) -> None:
        """Record that the code computes a number from a size that is no size itself."""
        self.numbers.setdefault((size.origin, int(size)), self._place())


class Size(int):
    """An integer that remembers where it was read, also after sums, products and quotients.

    Attributes:
        origin: attribute or tensor dimension from which the number was read.
        uses: record of what the code does with the number, and with all others of the same step.
    """

    origin: Origin
    uses: NonTorchUses

    def __new__(cls, value: int, origin: Origin, uses: NonTorchUses) -> Size:
        """Create an integer that remembers its ``origin``; ``uses`` records where Python code uses it outside of torch."""
        size = super().__new__(cls, value)
        size.origin, size.uses = origin, uses
        return size

    def __hash__(self) -> int:
        # A cache keyed by sizes could return a result for an equal number of another origin, or one of an earlier step
        # without a trace: origins would be wrong or lost. So a dict or `lru_cache` finds a size only by one of equal
        # origin.
        self.uses.was_key = True
        return hash(int(self) if self.uses.are_keys_plain else (Size, int(self), self.origin))

    def __float__(self) -> float:
        self.uses.number(self)
        return float(int(self))

    def __neg__(self) -> Size:
        return Size(-int(self), ("sub", 0, self.origin), self.uses)

    def __deepcopy__(self, memo: object) -> Size:
        return self

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        return int, (int(self),)


def _arithmetic(name: str, swapped: bool) -> Callable[[Size, Any], Any]:
    plain = getattr(int, f"__{'r' if swapped else ''}{name}__")

    def work(self: Size, other: Any) -> object:
        if isinstance(other, float):
            return getattr(float(self), plain.__name__)(other)
        value = plain(int(self), int(other) if isinstance(other, Size) else other)
        for size in (self, other) if type(value) is float else ():
            float(size)  # `float` records the use
        if type(value) is not int or name not in OPERATORS:
            return value
        origins = (self.origin, origin_of(other))
        return Size(value, (name, *(reversed(origins) if swapped else origins)), self.uses)

    return work


for _name in (*OPERATORS, "truediv", "pow"):
    setattr(Size, f"__{_name}__", _arithmetic(_name, swapped=False))
    setattr(Size, f"__r{_name}__", _arithmetic(_name, swapped=True))


def origin_of(value: int) -> Origin:
    """Return the origin of a number; a plain number is its own origin."""
    return value.origin if isinstance(value, Size) else int(value)
