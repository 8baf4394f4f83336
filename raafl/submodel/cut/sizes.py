"""Adjust the sizes that a model's layers store, and those that its own code asks for, to its smaller tensors.

Code asks for sizes in two ways: it reads a number that a module stores (``self.num_heads``), which is set to the small module's
value; or it computes one (``width // 4``, a literal), which is replaced where it is passed to torch. Only calls that would be
wrong are replaced, so that other modules run at full speed.
"""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.overrides import TorchFunctionMode

from raafl.submodel.cut.layers import computed_by

Counts = Mapping[str, int]
"""Number of indices that are there, by axis."""

Trail = tuple[str | int, ...]
"""An attribute of a module, and where it is a tuple, a dictionary or an object: which part of it."""

Where = tuple[str | int, ...]
"""An argument of a call: its place or keyword, and where it is a tuple or slice: which part of it."""

Site = tuple[tuple[str, int], ...]
"""A call in code: function and instruction of each frame, from the call up to the module's method."""


@dataclass(frozen=True, slots=True)
class Extent:
    """Formula for the size of a tensor dimension, given how many units of each axis are kept: a sum of products."""

    # pairs ``(factor, axes)``: the factor times the product of the axes' numbers of kept units; ``(64, ())`` is 64
    terms: tuple[tuple[int, tuple[str, ...]], ...]

    def __call__(self, counts: Counts) -> int:
        """Return the size of the tensor dimension in a submodel with ``counts`` units of each axis."""
        return sum(factor * math.prod(counts[axis] for axis in axes) for factor, axes in self.terms)

    @property
    def axes(self) -> set[str]:
        """Axes on which the size depends, by name."""
        return {axis for _, axes in self.terms for axis in axes}

    @classmethod
    def of(cls, terms: Mapping[tuple[str, ...], int]) -> Extent:
        """Build a formula in canonical form: its terms are sorted, and terms with factor 0 are left out."""
        return cls(tuple((factor, axes) for axes, factor in sorted(terms.items()) if factor))


@dataclass(frozen=True, slots=True)
class Sizes:
    """Numbers in a model's own code that must shrink with its axes, such as the width in `x.view(-1, 64)`.

    Attributes:
        attributes: formula of each number that the code reads from an attribute, by module path and attribute path.
        calls: formulas of the sizes that the code passes to torch, by module path and method, then by the position of
            the call.
    """

    attributes: Mapping[tuple[str, Trail], Extent] = field(default_factory=dict)
    calls: Mapping[tuple[str, str], Mapping[Site, Mapping[Where, Extent]]] = field(default_factory=dict)

    def apply_(self, small: nn.Module, counts: Counts, full: Counts) -> None:
        """Correct the numbers of a module whose axes have shrunk: its attributes, and the sizes that its methods pass to torch.

        Args:
            small: copy of the model, changed in place.
            counts: number of kept units of each axis.
            full: number of units of each axis in the full model.
        """
        modules = dict(small.named_modules(remove_duplicate=False))
        shrunk = {axis for axis, count in counts.items() if full.get(axis, count) != count}
        put(modules, {key: extent(counts) for key, extent in self.attributes.items() if extent.axes & shrunk})
        for (path, method), sites in self.calls.items():
            table = {
                site: {where: extent(counts) for where, extent in arguments.items()}
                for site, arguments in sites.items()
            }
            if shrunk and path in modules:
                set_carried(modules[path], method, Corrected(modules[path], method, table))


def put(modules: Mapping[str, nn.Module], values: Mapping[tuple[str, Trail], int]) -> None:
    """Set attributes of modules; an object that several modules share, such as a config, is first copied for the module."""
    own: set[tuple[str, str]] = set()
    for (path, (name, *inside)), value in values.items():
        if path not in modules or name not in modules[path].__dict__:
            continue  # the submodel lacks this module, or has another in its place
        attributes = modules[path].__dict__
        if not inside:
            set_carried(modules[path], str(name), value)
            continue
        held: Any = attributes[str(name)]
        part: Any = inside[0]
        if isinstance(held, tuple | list):
            set_carried(modules[path], str(name), type(held)([*held[:part], value, *held[part + 1 :]]))
            continue
        if (path, str(name)) not in own:
            own.add((path, str(name)))
            held = shallow(held)
            set_carried(modules[path], str(name), held)
        (held if isinstance(held, dict) else held.__dict__)[part] = value


def shallow(value: object) -> object:
    """Return a shallow copy of a dictionary or plain object."""
    if isinstance(value, dict):
        return value.copy()
    copy = object.__new__(type(value))
    copy.__dict__.update(value.__dict__)
    return copy


# ---- correct the sizes in calls ----


class Corrected:
    """Replacement for a method of a module, which passes corrected sizes to torch; it survives copying and pickling."""

    def __init__(self, module: nn.Module, method: str, table: Mapping[Site, Mapping[Where, int]]) -> None:
        """Create a replacement of a module's method, in whose calls the sizes in ``table`` are corrected."""
        self.module, self.method, self.correct = module, method, _Correct(table)

    def __call__(self, *args: object, **kwargs: object) -> object:
        """Call the method with corrected sizes."""
        with self.correct:
            return getattr(type(self.module), self.method)(self.module, *args, **kwargs)


BORDERS: set[CodeType] = {Corrected.__call__.__code__}
"""Code at which a `Site` ends: what stands between a module's method and whoever calls it."""


def site_of(frame: FrameType | None) -> Site:
    """Return the position in a module's method from which a call was made; empty if it was made outside of one.

    The position is the function and the instruction of each frame, from ``frame`` out to the module's method.
    """
    found = []
    while frame is not None and frame.f_code not in BORDERS:
        found.append((frame.f_code.co_qualname, frame.f_lasti))
        frame = frame.f_back
    return tuple(found) if frame is not None else ()


class _Correct(TorchFunctionMode):
    """Torch-function mode that corrects the sizes in those calls of the user's code that ``table`` lists."""

    def __init__(self, table: Mapping[Site, Mapping[Where, int]]) -> None:
        super().__init__()
        self.table, self.places = table, frozenset(site[0][1] for site in table)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        kwargs, caller = kwargs or {}, sys._getframe(1)
        # the position in the code is cheap to compare, and rules out nearly all calls
        if caller.f_lasti in self.places and func.__name__ in TAKERS and (sizes := self.table.get(site_of(caller))):
            if func.__name__ in PARTS:
                return torch.split(args[0], list(sizes.values()), _along(args, kwargs))
            for where, size in sizes.items():
                args = _replaced(args, where, size)
        return func(*args, **kwargs)


def _replaced(value: Any, where: Where, size: int) -> Any:
    """Return nested arguments (tuples, lists, slices) with ``size`` at the position ``where``."""
    if not where:
        return size
    part, *rest = where
    if isinstance(value, slice):
        ends = {"start": value.start, "stop": value.stop, str(part): size}
        return slice(ends["start"], ends["stop"], value.step)
    items = list(value)
    items[part] = _replaced(items[part], tuple(rest), size)  # type: ignore[index]
    return tuple(items) if isinstance(value, tuple) else items


# ---- find the arguments that are sizes ----

Taken = tuple[Where, int | None, "Part"]
"""An argument that is a size: where, the value (None = torch works it out), and what has that size."""

Sized = Callable[[Sequence[Any], Mapping[str, Any], Any], Iterator[Taken]]
"""``takes(args, kwargs, answer)`` yields each argument that is a size."""

PARTS = ("split", "split_with_sizes", "chunk")
"""Functions that cut a dimension into parts, whose sizes are replaced all together."""

TAKERS: dict[str, Sized] = {}
"""Functions that take sizes, by the name of the function or method."""


def _takes_sizes(*names: str) -> Callable[[Sized], Sized]:
    """Return a decorator that registers a function to find the sizes in the arguments of the torch functions ``names``."""

    def add(function: Sized) -> Sized:
        TAKERS.update(dict.fromkeys(names, function))
        return function

    return add


@dataclass(frozen=True, slots=True)
class Part:
    """Meaning of a number in the code: size of a tensor dimension, number of its first indices, or number of groups in it.

    Attributes:
        tensor: tensor to which the dimension belongs.
        dim: index of the dimension, from 0.
        stop: number of first indices, if the number counts these; None = the whole dimension.
        outer: number of equal groups that the dimension is divided into, if the number counts these; None = it does
            not.
    """

    tensor: Tensor
    dim: int
    stop: int | None = None
    outer: int | None = None


def _along(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """Return the dimension along which a call of torch.split or torch.chunk splits its tensor."""
    dim: int = kwargs.get("dim", args[2] if len(args) > 2 else 0)
    return dim


def _row(args: Sequence[Any], first: int) -> list[tuple[Where, Any]]:
    """Return position and value of each size from argument ``first`` on, which may be several arguments or one tuple."""
    if len(args) > first and isinstance(args[first], tuple | list):
        return [((first, i), size) for i, size in enumerate(args[first])]
    return [((first + i,), size) for i, size in enumerate(args[first:])]


def _shape(first: int) -> Sized:
    """Return a function that finds the sizes in a call whose arguments from ``first`` on are the result's shape."""

    def sized(args: Sequence[Any], kwargs: Mapping[str, Any], answer: Tensor) -> Iterator[Taken]:
        row = _row(args, first)
        for dim, (where, size) in enumerate(row if len(row) == answer.dim() else ()):
            yield where, size, Part(answer, dim)

    return sized


_takes_sizes("view", "reshape", "expand", "new_zeros", "new_ones", "new_empty", "new_full", "broadcast_to")(_shape(1))
_takes_sizes("zeros", "ones", "empty", "full", "rand", "randn")(_shape(0))


@_takes_sizes("unflatten")
def _unflatten(args: Sequence[Any], kwargs: Mapping[str, Any], answer: Tensor) -> Iterator[Taken]:
    if len(args) > 2:
        for place, size in enumerate(args[2]):
            yield (2, place), size, Part(answer, args[1] % args[0].dim() + place)


@_takes_sizes("repeat")
def _repeat(args: Sequence[Any], kwargs: Mapping[str, Any], answer: Tensor) -> Iterator[Taken]:
    for dim, (where, number) in enumerate(_row(args, 1)):
        yield where, number, Part(answer, dim, outer=int(number))


@_takes_sizes("split", "split_with_sizes")
def _split(args: Sequence[Any], kwargs: Mapping[str, Any], answer: Tensor) -> Iterator[Taken]:
    sizes = args[1] if len(args) > 1 else None
    for place, part in enumerate(answer):
        size = sizes[place] if isinstance(sizes, tuple | list) else sizes
        yield (place,), size, Part(part, _along(args, kwargs) % part.dim())


@_takes_sizes("chunk")
def _chunk(args: Sequence[Any], kwargs: Mapping[str, Any], answer: object) -> Iterator[Taken]:
    # without the number of chunks, torch.split's rule applies
    return _split((args[0], None, *args[2:]), kwargs, answer)


@_takes_sizes("narrow")
def _narrow(args: Sequence[Any], kwargs: Mapping[str, Any], answer: Tensor) -> Iterator[Taken]:
    if len(args) == 4 and isinstance(args[2], int):
        dim = args[1] % args[0].dim()
        yield (2,), args[2], Part(args[0], dim, stop=args[2] % args[0].shape[dim])
        yield (3,), args[3], Part(answer, dim)


@_takes_sizes("__getitem__", "__setitem__")
def _item(args: Sequence[Any], kwargs: Mapping[str, Any], answer: object) -> Iterator[Taken]:
    index = args[1] if isinstance(args[1], tuple) else (args[1],)
    if any(isinstance(i, Tensor | list) for i in index):
        return
    behind = sum(i is not None for i in index) - sum(i is Ellipsis for i in index)
    dim = 0
    for place, i in enumerate(index):
        if i is Ellipsis:
            dim += args[0].dim() - behind
            continue
        ends = ("start", "stop") if isinstance(i, slice) and i.step in (None, 1) else ()
        for end, value in ((end, getattr(i, end)) for end in ends):
            if isinstance(value, int) and value:
                stop = min(value + (args[0].shape[dim] if value < 0 else 0), args[0].shape[dim])
                where = (1, place, end) if isinstance(args[1], tuple) else (1, end)
                yield where, value, Part(args[0], dim, stop=max(stop, 0))
        dim += i is not None


@_takes_sizes("group_norm")
def _group_norm(args: Sequence[Any], kwargs: Mapping[str, Any], answer: object) -> Iterator[Taken]:
    if len(args) > 1:
        yield (1,), args[1], Part(args[0], 1, outer=int(args[1]))


@_takes_sizes("layer_norm", "rms_norm")
def _layer_norm(args: Sequence[Any], kwargs: Mapping[str, Any], answer: object) -> Iterator[Taken]:
    for place, size in enumerate(args[1] if len(args) > 1 else ()):
        yield (1, place), size, Part(args[0], args[0].dim() - len(args[1]) + place)


@_takes_sizes("conv1d", "conv2d", "conv3d")
def _convolution(args: Sequence[Any], kwargs: Mapping[str, Any], answer: object) -> Iterator[Taken]:
    if len(args) > 6:
        yield (6,), args[6], Part(args[0], 1 + args[0].dim() - args[1].dim(), outer=int(args[6]))


# Preserve attributes that were set on a layer of a submodel when the layer is copied or pickled.
#
# A layer whose class defines `__getstate__` or `__setstate__`, as einops layers do, is rebuilt when copied and would
# lose corrected sizes. Such a layer gets a subclass that adds them to its state.

_NAMES = "_raafl_carried"
"""Attribute of a layer that lists the names of its carried attributes."""


def set_carried(layer: nn.Module, name: str, value: object) -> None:
    """Set an attribute of a layer such that copies of the layer (deepcopy, pickle) keep it."""
    attributes = layer.__dict__
    attributes[name] = value
    if not isinstance(layer, _Carrying):
        if not _is_made_anew(type(layer)):
            return
        layer.__class__ = _carrying(type(layer))  # type: ignore[arg-type]
    attributes[_NAMES] = tuple(dict.fromkeys((*attributes.get(_NAMES, ()), name)))


def _is_made_anew(kind: type[nn.Module]) -> bool:
    """Check whether a class outside torch customizes copying, so that copies of its instances may lack attributes."""
    names = ("__getstate__", "__setstate__", "__reduce__", "__reduce_ex__", "__deepcopy__")
    owners = (next((base for base in kind.__mro__ if name in vars(base)), object) for name in names)
    return not all(owner is object or owner.__module__.startswith("torch.nn.") for owner in owners)


class _Carrying(nn.Module):
    """Base class of layers whose pickled state includes further attributes."""

    _kind: type[nn.Module]

    def __reduce_ex__(self, protocol: object) -> Any:
        carried = {name: self.__dict__[name] for name in self.__dict__[_NAMES]}
        return _empty, (self._kind,), (super().__getstate__(), carried)  # type: ignore[no-untyped-call]

    def __setstate__(self, state: Any) -> None:
        own, carried = state
        super().__setstate__(own)  # type: ignore[no-untyped-call]
        self.__dict__.update(carried, **{_NAMES: tuple(carried)})


def _deep_copy(self: Any, memo: dict[int, Any]) -> object:
    made = memo[id(self)] = super(_Carrying, self).__deepcopy__(memo)
    made.__class__ = type(self)
    carried = {name: self.__dict__[name] for name in self.__dict__[_NAMES]}
    made.__dict__.update(copy.deepcopy(carried, memo), **{_NAMES: tuple(carried)})
    return made


@cache
def _carrying(kind: type[nn.Module]) -> Any:
    own: dict[str, Any] = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "_kind": kind}
    if hasattr(kind, "__deepcopy__"):
        own["__deepcopy__"] = _deep_copy
    return type(kind.__name__, (_Carrying, kind), own)


def _empty(kind: type[nn.Module]) -> object:
    carrying = _carrying(kind)  # type: ignore[arg-type]
    return carrying.__new__(carrying)


PRETRAINED = "transformers.modeling_utils.PreTrainedModel"
TORCHVISION = "torchvision.models.vision_transformer.VisionTransformer"


def hugging_face(names: str) -> list[str]:
    """Return the full names of types in transformers, which the user need not have installed."""
    split = [name.split(".") for name in names.split()]
    return [f"transformers.models.{family}.modeling_{family}.{kind}" for family, kind in split]


def type_names(module: nn.Module) -> list[str]:
    """Return the dotted names of a module's type and of its base classes, nearest first."""
    return [f"{base.__module__}.{base.__qualname__}" for base in type(module).__mro__]


def is_packaged(module: nn.Module) -> bool:
    """Check whether a module is a whole transformer model from another package."""
    return not {PRETRAINED, TORCHVISION}.isdisjoint(type_names(module))


Resize = Callable[[Any], None]
"""``resize(layer)``: the layer has its small tensors and the large attributes; set the attributes."""

RESIZES: dict[type[nn.Module] | str, Resize] = {}
"""Function that resizes a layer, by its type, or by the type's dotted name if the package is optional; subclasses inherit it."""

OUTPUTS: dict[type[nn.Module], tuple[str, int]] = {
    nn.Linear: ("weight", 0),
    nn.Embedding: ("weight", 1),
    nn.EmbeddingBag: ("weight", 1),
    nn.Conv1d: ("weight", 0),
    nn.Conv2d: ("weight", 0),
    nn.Conv3d: ("weight", 0),
    nn.ConvTranspose1d: ("weight", 1),
    nn.ConvTranspose2d: ("weight", 1),
    nn.ConvTranspose3d: ("weight", 1),
}
"""Parameter and dimension that determine a layer's number of output features, by type."""


def resizes(*types: type[nn.Module] | str) -> Callable[[Resize], Resize]:
    """Register the decorated function, which adjusts size attributes of layers of these types after they have shrunk."""

    def add(function: Resize) -> Resize:
        RESIZES.update(dict.fromkeys(types, function))
        return function

    return add


def resize(layer: nn.Module) -> None:
    """Adjust the size attributes of a layer, such as ``out_features``, to its current tensors."""
    _compute_anew(layer)
    names = (key for pair in zip(type(layer).__mro__, type_names(layer), strict=True) for key in pair)
    if (found := next((RESIZES[key] for key in names if key in RESIZES), None)) is not None:
        with _looked_at(layer):
            found(layer)


@torch.no_grad()
def _compute_anew(layer: nn.Module) -> None:
    """Let a layer's hooks, such as weight norm, recompute the tensors that they set from the new parameters."""
    for hook in layer._forward_pre_hooks.values():
        name = computed_by(hook)
        if isinstance(hook, SpectralNorm):  # to call this hook would advance its power iteration
            setattr(layer, hook.name, hook.compute_weight(layer, do_power_iteration=False))
        elif name is not None:
            hook(layer, ())


@contextmanager
def _looked_at(layer: nn.Module) -> Iterator[None]:
    """Set a layer's parametrizations to eval mode in the ``with`` block, since reading a weight may change their state."""
    parts = list(layer.parametrizations.modules()) if parametrize.is_parametrized(layer) else []  # type: ignore[union-attr]
    modes = [part.training for part in parts]
    try:
        for part in parts:
            part.training = False
        yield
    finally:
        for part, mode in zip(parts, modes, strict=True):
            part.training = mode


def produces(layer: nn.Module) -> tuple[str, int] | None:
    """Return the parameter and dimension along which a layer's output features lie, such as ``("weight", 0)``; else None."""
    if isinstance(layer, nn.modules.conv._ConvNd) and layer.groups > 1:
        return None  # each output channel of a grouped convolution reads other inputs
    found = next((base for base in type(layer).__mro__ if base in OUTPUTS), None)
    return OUTPUTS[found] if found is not None and type(layer).forward is found.forward else None


def _from(**sizes: tuple[str, int]) -> Resize:
    """Return a function that sets each named attribute of a layer to the size of a dimension of one of the layer's tensors."""

    def set_(layer: object) -> None:
        for attribute, (tensor, dim) in sizes.items():
            setattr(layer, attribute, getattr(layer, tensor).shape[dim])

    return set_


resizes(nn.Linear)(_from(out_features=("weight", 0), in_features=("weight", 1)))
resizes(nn.Embedding, nn.EmbeddingBag)(_from(num_embeddings=("weight", 0), embedding_dim=("weight", 1)))
resizes(nn.PReLU)(_from(num_parameters=("weight", 0)))
resizes(nn.RNNCellBase)(_from(input_size=("weight_ih", 1), hidden_size=("weight_hh", 1)))


@resizes(nn.modules.conv._ConvNd)
def _resize_convolution(layer: nn.modules.conv._ConvNd) -> None:
    out, inner = (1, 0) if layer.transposed else (0, 1)
    if layer.groups > 1:
        channels = layer.in_channels if layer.transposed else layer.out_channels
        layer.groups = layer.groups * layer.weight.shape[0] // channels
    layer.out_channels = layer.weight.shape[out] * (layer.groups if layer.transposed else 1)
    layer.in_channels = layer.weight.shape[inner] * (1 if layer.transposed else layer.groups)


@resizes(nn.modules.batchnorm._NormBase)
def _resize_batch_norm(layer: nn.modules.batchnorm._NormBase) -> None:
    tensor = next((t for t in (layer.weight, layer.running_mean, layer.bias) if t is not None), None)
    layer.num_features = layer.num_features if tensor is None else len(tensor)


@resizes(nn.GroupNorm)
def _resize_group_norm(layer: nn.GroupNorm) -> None:
    if layer.weight is not None:
        per_group = layer.num_channels // layer.num_groups
        layer.num_channels = layer.weight.shape[0]
        layer.num_groups = layer.num_channels // per_group


@resizes(nn.LayerNorm, nn.RMSNorm)
def _resize_layer_norm(layer: nn.LayerNorm | nn.RMSNorm) -> None:
    if layer.weight is not None:
        layer.normalized_shape = tuple(layer.weight.shape)


def adopt(layer: nn.RNNBase) -> None:
    """Refresh a recurrent layer's internal list of weights after its tensors were replaced."""
    layer.__dict__["flatten_parameters"] = _stays  # it would move the weights to other memory, for cuDNN
    layer._init_flat_weights()


def _stays() -> None:
    return None


@resizes(nn.RNNBase)
def _resize_recurrent(layer: Any) -> None:
    layer.input_size = layer.weight_ih_l0.shape[1]
    gates = layer.weight_ih_l0.shape[0] // layer.weight_hh_l0.shape[1] if not layer.proj_size else 4
    layer.hidden_size = layer.weight_ih_l0.shape[0] // gates
    layer.proj_size = layer.weight_hr_l0.shape[0] if layer.proj_size else 0
    adopt(layer)
