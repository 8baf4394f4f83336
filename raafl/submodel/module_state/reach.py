"""Find the objects that a module's attributes lead to, each once, with the name of the attribute."""

from __future__ import annotations

import functools
import types
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

ATTACHED = frozenset(
    (
        "log",
        "log_dict",
        "training",
        "_fabric",
        "_trainer",
        "_fabric_optimizers",
        "_flat_weights",
        "_flat_weight_refs",
    )
)
"""Attributes of a module that whoever runs it sets; the last two are a recurrent layer's own view of its parameters."""

INTERNAL = frozenset(name for name, value in vars(nn.Module()).items() if isinstance(value, dict | set))
"""Mappings of `nn.Module`: parameters, buffers, submodules, hooks."""

MOST = 100_000
"""Objects that are followed at most: a module may lead to a whole data set."""

_ATOMS: Any = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    range,
    slice,
    type(...),
    type(NotImplemented),
    type,
    torch.dtype,
    torch.device,
    torch.Size,
    torch.layout,
    torch.memory_format,
    np.dtype,
    np.generic,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.ModuleType,
    types.CodeType,
    types.MappingProxyType,
    weakref.ReferenceType,
)

_COMMON = frozenset((type(None), bool, int, float, str, types.FunctionType))  # found sooner than by `isinstance`

_RUN_BY_OTHERS = (
    "logging",
    "threading",
    "_thread",
    "multiprocessing",
    "concurrent",
    "asyncio",
    "socket",
    "ssl",
    "subprocess",
    "lightning",
    "lightning_fabric",
    "pytorch_lightning",
    "torch.fx",
    "torch.jit",
    "torch.cuda",
    "torch.distributed",
    "raafl.trainer_stand_in",
    "torch.utils.tensorboard",
    "tensorboard",
    "tensorboardX",
    "wandb",
    "mlflow",
)
"""Packages whose objects change by themselves, or belong to the process."""

_LIBRARIES = (
    "torch",
    "lightning",
    "lightning_fabric",
    "pytorch_lightning",
    "torchmetrics",
    "transformers",
    "raafl",
    "builtins",
    "abc",
    "typing",
    "collections",
    "functools",
)


class ClassData:
    """Plain values (numbers, text) among the attributes of a class that the user wrote."""

    def __init__(self, kind: type) -> None:
        """Take the class."""
        self.kind = kind

    def values(self) -> dict[str, Any]:
        """Return the class's attributes that are data, by name; methods, classes and other descriptors are left out."""
        return {
            name: value
            for name, value in vars(self.kind).items()
            if not name.startswith("__") and not isinstance(value, type) and not hasattr(type(value), "__get__")
        }


class Reached(NamedTuple):
    """An object that was found by following the attributes of a module.

    Attributes:
        name: place where it was found: the path of its module or the name of its class, then the attribute.
        thing: object that was found: a module, a `ClassData`, or any object that is not a plain value.
        of_metric: whether it belongs to a torchmetrics metric, or to another object with a method `compute`.
        of_class: whether it was found through an attribute of a class.
        is_part: whether it is the module itself or one of its submodules.
    """

    name: str
    thing: Any
    of_metric: bool = False
    of_class: bool = False
    is_part: bool = False


def reach(module: nn.Module, own: Iterable[Tensor]) -> Iterator[Reached]:
    """Find all objects to which a module's attributes lead, each once, including submodules and the user's classes."""
    seen = {id(tensor) for tensor in own}
    parts = list(module.named_modules())
    seen.update(id(part) for _, part in parts)
    for path, part in parts:
        is_metric = callable(getattr(part, "compute", None))
        yield Reached(path, part, is_metric, is_part=True)
        dot = f"{path}." if path else ""
        stack = [
            Reached(dot + name, value, is_metric)
            for name, value in vars(part).items()
            if type(value) not in _COMMON and name not in ATTACHED and name not in INTERNAL
        ]
        stack += [Reached(dot + name, value, is_metric) for name, value in part._buffers.items()]
        yield from _follow(stack, seen)
    for kind in dict.fromkeys(kind for _, part in parts for kind in type(part).__mro__):
        if not _is_of(kind, _LIBRARIES):
            data = ClassData(kind)
            yield Reached(kind.__name__, data, of_class=True)
            named = [Reached(f"{kind.__name__}.{name}", value, of_class=True) for name, value in data.values().items()]
            yield from _follow(named, seen)


def _follow(stack: list[Reached], seen: set[int]) -> Iterator[Reached]:
    stack.reverse()
    while stack and len(seen) < MOST:
        reached = stack.pop()
        thing = reached.thing
        if (
            type(thing) in _COMMON
            or isinstance(thing, _ATOMS)
            or id(thing) in seen
            or _is_of(type(thing), _RUN_BY_OTHERS)  # type: ignore[arg-type]
        ):
            continue
        seen.add(id(thing))
        is_metric = reached.of_metric or callable(getattr(thing, "compute", None))
        yield reached._replace(of_metric=is_metric)
        stack.extend(reached._replace(thing=child, of_metric=is_metric) for child in _children(thing))


@functools.lru_cache(4096)
def _is_of(kind: type, packages: tuple[str, ...]) -> bool:
    module = kind.__module__ if isinstance(kind.__module__, str) else ""
    return any(module == package or module.startswith(package + ".") for package in packages)


def _children(thing: object) -> Iterator[Any]:
    if isinstance(thing, Tensor | np.ndarray):
        return
    if isinstance(thing, dict):
        yield from dict.values(thing)
    elif isinstance(thing, list | tuple | set | frozenset | deque):
        yield from thing
    elif isinstance(thing, functools.partial):
        yield from (thing.func, thing.args, thing.keywords)
    elif isinstance(thing, types.MethodType):
        yield thing.__self__
    yield from attributes_of(thing).values()
    yield from slots_of(thing).values()


def attributes_of(thing: object) -> dict[str, Any]:
    """Return the attributes of an object as a dictionary that can be changed; empty if it has none."""
    try:
        found = object.__getattribute__(thing, "__dict__")
    except AttributeError:
        return {}
    return found if isinstance(found, dict) else {}


def slots_of(thing: object) -> dict[str, Any]:
    """Return the values of an object's slots by name."""
    found = {}
    for member in _slots_in(type(thing)):  # type: ignore[arg-type]
        try:
            found[member.__name__] = member.__get__(thing)
        except AttributeError:  # not set
            continue
    return found


@functools.lru_cache(4096)
def _slots_in(kind: type) -> list[Any]:
    return [
        member
        for base in kind.__mro__
        if base.__module__ != "builtins" and "__slots__" in vars(base)
        for member in vars(base).values()
        if isinstance(member, types.MemberDescriptorType)
    ]
