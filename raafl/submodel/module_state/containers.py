"""Record the contents of one container or object, compare them later, and restore them in place.

In place, so that other references to the object (another attribute, a closure, a hook) stay valid.
"""

from __future__ import annotations

import functools
import types
import weakref
from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Iterator
from itertools import chain
from operator import is_
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
"""Attributes of a module that its runner sets; the last two are a recurrent layer's own references to its parameters."""

INTERNAL = frozenset(name for name, value in vars(nn.Module()).items() if isinstance(value, dict | set))
"""Mappings of `nn.Module`: parameters, buffers, submodules, hooks."""

MOST = 100_000
"""Largest number of objects that are followed, since a module may refer to a whole data set."""

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

# exact types, since a look-up is faster than `isinstance`
_COMMON = frozenset((type(None), bool, int, float, str, types.FunctionType))

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
    "raafl.module_hooks",
    "torch.utils.tensorboard",
    "tensorboard",
    "tensorboardX",
    "wandb",
    "mlflow",
)
"""Packages whose objects change by themselves or belong to the process; they are not compared."""

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
        """Wrap a class, so that its attributes are recorded like those of an object."""
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
    for member in slots_in(type(thing)):  # type: ignore[arg-type]
        try:
            found[member.__name__] = member.__get__(thing)
        except AttributeError:  # the slot is empty
            continue
    return found


@functools.lru_cache(4096)
def slots_in(kind: type) -> list[Any]:
    """Return the descriptors of the slots that objects of a type have."""
    return [
        member
        for base in kind.__mro__
        if base.__module__ != "builtins" and "__slots__" in vars(base)
        for member in vars(base).values()
        if isinstance(member, types.MemberDescriptorType)
    ]


_TENSORS = ("_parameters", "_buffers", "_modules")
_HOOKS = tuple(sorted(INTERNAL - {*_TENSORS}))


class Record(ABC):
    """Base class of records of an object's contents, with which changes can be found and undone.

    `name`: name of the attribute through which the object was found.
    `of_metric`: whether the object belongs to a torchmetrics metric.
    `of_class`: whether the object was found through an attribute of a class.
    `can_restore`: whether `restore` can undo changes.
    """

    can_restore = True

    def __init__(self, reached: Reached) -> None:
        """Copy the name and kind of a reached object, for messages."""
        self.name, self.of_metric, self.of_class = reached.name, reached.of_metric, reached.of_class

    @abstractmethod
    def changed(self) -> list[str]:
        """Return the names of all contents of the object that have changed since they were recorded."""

    def restore(self) -> None:
        """Undo all changes: put the recorded contents back into the object."""
        raise NotImplementedError

    def live(self) -> list[Collection[Any]]:
        """Return collections and views of the object as it is now, whose items show each change; [] = none do."""
        return []


class Glance:
    """The items of many live collections, to see in one pass whether all are the same objects as before."""

    def __init__(self, collections: list[Collection[Any]]) -> None:
        """Record the items of ``collections``, to tell quickly later whether any was exchanged."""
        self._collections = collections
        self.take()

    def take(self) -> None:
        """Record the items as they are now."""
        self._items: list[Any] | None = list(chain.from_iterable(self._collections))

    def forget(self) -> None:
        """Make `is_same` return False until items are recorded again."""
        self._items = None

    def is_same(self) -> bool:
        """Check whether no collection has gained, lost or exchanged an item; False may be a false alarm."""
        # compare lengths first: `map` ends with the shorter of two sequences
        if self._items is None or sum(map(len, self._collections)) != len(self._items):
            return False
        return all(map(is_, chain.from_iterable(self._collections), self._items))


class AttributesRecord(Record):
    """Record of an object's attributes; for a module, all except tensors, submodules and hooks."""

    def __init__(self, reached: Reached, ignored: frozenset[str] = frozenset()) -> None:
        super().__init__(reached)
        self._now, self._ignored = attributes_of(reached.thing), ignored
        self._saved = {name: value for name, value in self._now.items() if name not in ignored}
        self._names, self._values = tuple(self._saved), tuple(self._saved.values())
        self._size = len(self._now)

    def is_same(self) -> bool:
        """Check in a few microseconds whether no attribute has changed; False may be a false alarm."""
        return len(self._now) == self._size and all(map(is_, map(self._now.get, self._names), self._values))

    def live(self) -> list[Collection[Any]]:
        """Return live names and values of the attributes."""
        return [self._now.keys(), self._now.values()]

    def changed(self) -> list[str]:
        """Return the names of the object's attributes that have changed since they were recorded."""
        if self.is_same():
            return []
        missing = object()
        names = [name for name, value in self._saved.items() if self._now.get(name, missing) is not value]
        names += [name for name in self._now if name not in self._saved and name not in self._ignored]
        return [f"{self.name}.{name}" if self.name else name for name in names]

    def restore(self) -> None:
        """Put the recorded attributes back into the object."""
        if self.is_same():
            return
        for name in [name for name in self._now if name not in self._saved and name not in self._ignored]:
            del self._now[name]
        self._now.update(self._saved)


class HooksRecord(Record):
    """Record of a module's hooks; `restore` removes hooks that were added since."""

    def __init__(self, reached: Reached) -> None:
        super().__init__(reached)
        self._tables = [found for found in map(vars(reached.thing).get, _HOOKS) if found is not None]
        self._lengths = list(map(len, self._tables))
        self._saved = {place: self._tables[place].copy() for place, length in enumerate(self._lengths) if length}

    def live(self) -> list[Collection[Any]]:
        """Return the live hooks."""
        return [table.values() if isinstance(table, dict) else table for table in self._tables]

    def changed(self) -> list[str]:
        """Return an empty list, since a step may add hooks; `restore` removes these."""
        return []

    def restore(self) -> None:
        """Put the recorded hooks back into the module, without hooks that were added."""
        if list(map(len, self._tables)) == self._lengths:
            return
        for place, table in enumerate(self._tables):
            table.clear()
            table.update(self._saved.get(place, ()))


class TensorsRecord(Record):
    """Record of a module's parameters, buffers and submodules, by name."""

    def __init__(self, reached: Reached) -> None:
        super().__init__(reached)
        tables = (vars(reached.thing)[name] for name in _TENSORS)
        self._tables = [(table, dict(table), tuple(table.values())) for table in tables]

    def live(self) -> list[Collection[Any]]:
        """Return live names and objects of parameters, buffers and submodules."""
        return [view for table, _, _ in self._tables for view in (table.keys(), table.values())]

    def changed(self) -> list[str]:
        """Return the names of tensors and submodules that have changed, except metrics that were created on demand."""
        return [name for name, _, now in self._other() if not callable(getattr(now, "compute", None))]

    def lost(self) -> list[str]:
        """Return the names of parameters, and of submodules with parameters, that a step has replaced or added.

        Their training would be lost.
        """
        return [name for name, before, now in self._other() if _trains(before) or _trains(now)]

    def _other(self) -> list[tuple[str, Any, Any]]:
        """Return the name of each replaced parameter or submodule, with the old and the new object."""
        return [
            (f"{self.name}.{name}" if self.name else name, saved.get(name), table.get(name))
            for table, saved, values in (self._tables[0], self._tables[2])
            if not _are(table.values(), values)
            for name in {**saved, **table}
            if table.get(name) is not saved.get(name)
        ]

    def restore(self) -> None:
        """Put the recorded tensors and submodules back."""
        for table, saved, values in self._tables:
            if not _are(table.values(), values):
                table.clear()
                table.update(saved)


def _trains(thing: object) -> bool:
    """Check whether an object is a parameter, or a module with parameters."""
    return isinstance(thing, nn.Parameter) or (isinstance(thing, nn.Module) and any(True for _ in thing.parameters()))


def _are(found: Collection[Any], values: tuple[Any, ...]) -> bool:
    """Check whether two collections have the same objects in the same order."""
    return len(found) == len(values) and all(map(is_, found, values))


class ListRecord(Record):
    """Record of the elements of a list or deque."""

    def __init__(self, reached: Reached) -> None:
        super().__init__(reached)
        self._now, self._saved = reached.thing, tuple(reached.thing)

    def live(self) -> list[Collection[Any]]:
        """Return the list itself."""
        return [self._now] if type(self._now) in (list, deque) else []

    def changed(self) -> list[str]:
        """Return the recorded list's name, as the only item, if its elements have changed, else an empty list."""
        return [] if _are(self._now, self._saved) else [self.name]

    def restore(self) -> None:
        """Put the recorded elements back into the list."""
        if self.changed():
            kind: Any = list if isinstance(self._now, list) else deque
            kind.clear(self._now)
            kind.extend(self._now, self._saved)


class DictRecord(Record):
    """Record of a dictionary's items.

    A dictionary that all copies of a module share, such as a cache, may gain items without counting as changed.
    """

    def __init__(self, reached: Reached, *, shared: bool) -> None:
        super().__init__(reached)
        self._now, self._saved, self._may_grow = reached.thing, dict(dict.items(reached.thing)), shared

    def live(self) -> list[Collection[Any]]:
        """Return live keys and values."""
        return [dict.keys(self._now), dict.values(self._now)]

    def changed(self) -> list[str]:
        """Return a list with the name of the dictionary if its items have changed, else an empty list."""
        now, saved = self._now, self._saved
        if len(now) != len(saved) and not (self._may_grow and len(now) > len(saved)):
            return [self.name]
        missing = object()
        return [] if all(dict.get(now, key, missing) is value for key, value in saved.items()) else [self.name]

    def restore(self) -> None:
        """Put the recorded items back into the dictionary."""
        if self.changed():
            kind: Any = OrderedDict if isinstance(self._now, OrderedDict) else dict
            kind.clear(self._now)
            kind.update(self._now, self._saved)


class SetRecord(Record):
    """Record of the elements of a set that a module holds, from which the set is restored after a task."""

    def __init__(self, reached: Reached) -> None:
        super().__init__(reached)
        self._now, self._saved = reached.thing, frozenset(reached.thing)

    def changed(self) -> list[str]:
        """Return a list with the name of the set if its elements have changed, else an empty list."""
        return [] if self._now == self._saved else [self.name]

    def restore(self) -> None:
        """Put the recorded elements back into the set."""
        if self.changed():
            self._now.clear()
            self._now.update(self._saved)


class SlotsRecord(Record):
    """Record of the values in an object's slots."""

    def __init__(self, reached: Reached) -> None:
        super().__init__(reached)
        self._thing, self._saved = reached.thing, slots_of(reached.thing)

    def changed(self) -> list[str]:
        """Return a list with the name of the object if a value in its slots has changed, else an empty list."""
        now = slots_of(self._thing)
        same = now.keys() == self._saved.keys() and all(now[name] is value for name, value in self._saved.items())
        return [] if same else [self.name]

    def restore(self) -> None:
        """Put the recorded values back into the slots."""
        for name in slots_of(self._thing).keys() - self._saved.keys():
            object.__delattr__(self._thing, name)
        for name, value in self._saved.items():
            object.__setattr__(self._thing, name, value)


class BytesRecord(Record):
    """Record of the bytes of a bytearray."""

    def __init__(self, reached: Reached) -> None:
        super().__init__(reached)
        self._now, self._saved = reached.thing, bytes(reached.thing)

    def changed(self) -> list[str]:
        """Return a list with the name of the bytearray if its bytes have changed, else an empty list."""
        return [] if self._now == self._saved else [self.name]

    def restore(self) -> None:
        """Put the recorded bytes back into the bytearray."""
        self._now[:] = self._saved


class ClassRecord(Record):
    """Record of a class's plain values, which cannot be restored."""

    can_restore = False

    def __init__(self, reached: Reached) -> None:
        super().__init__(reached)
        self._now: ClassData = reached.thing
        self._saved, self._size = self._now.values(), len(vars(self._now.kind))

    def live(self) -> list[Collection[Any]]:
        """Return live names and values of the class's attributes."""
        found = vars(self._now.kind)
        return [found.keys(), found.values()]

    def changed(self) -> list[str]:
        """Return the names of the class's values that have changed."""
        found, missing = vars(self._now.kind), object()
        same = len(found) == self._size and all(found.get(name) is value for name, value in self._saved.items())
        if same:
            return []
        now = self._now.values()
        names = [
            name for name in {**self._saved, **now} if now.get(name, missing) is not self._saved.get(name, missing)
        ]
        return [f"{self.name}.{name}" for name in names]


class FlagsRecord:
    """Record of the flag ``requires_grad`` of each parameter of a module, and of the mode (train or eval) of each part."""

    def __init__(self, module: nn.Module) -> None:
        """Record the ``requires_grad`` flag of each parameter and the mode of each module."""
        self._parameters = [(parameter, parameter.requires_grad) for parameter in module.parameters()]
        self._parts = [(part, part.training) for part in module.modules()]

    def now(self) -> tuple[bool, ...]:
        """Return the present flags of all parameters, and the modes of all parts."""
        return (*(p.requires_grad for p, _ in self._parameters), *(part.training for part, _ in self._parts))

    def restore(self, *, modes: bool = True) -> None:
        """Set each parameter's ``requires_grad``, and with ``modes`` each part's ``training``, back to its recorded value."""
        for parameter, flag in self._parameters:
            if parameter.requires_grad is not flag:
                parameter.requires_grad_(flag)
        for part, training in self._parts if modes else ():
            if part.training is not training:
                part.training = training
