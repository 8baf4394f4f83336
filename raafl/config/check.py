"""Holding the parsed tree of a config against types: of the fields of an `Experiment`, and of the arguments of what it names.

What is shared by the two who ask: `raafl.config.trust`, whether somebody else's config is plain values, and
`raafl.config.messages`, what is wrong with the user's own.
"""

from __future__ import annotations

import dataclasses
import inspect
import types
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

from raafl.config.experiment import field_types

_KINDS: Mapping[str, str] = {
    "raafl.core.algorithm.Select": "select",
    "raafl.data.partition.Partition": "partition",
    "raafl.core.algorithm.Algorithm": "algorithm",
}

MADE = ("model", "data", "algorithm", "partition")
"""Fields of a config that do so."""


def kind_of(hint: Any) -> str | None:
    """Return which part a type stands for that a config names by its class_path, inside of other things; None = it is none."""
    return _KINDS.get(f"{getattr(hint, '__module__', '')}.{getattr(hint, '__qualname__', '')}")


class Check(ABC):
    """Holds values against types, and raises for the first that does not fit; what is raised, a subclass says."""

    def __init__(self) -> None:
        """Learn the types of an `Experiment`'s fields."""
        self.hints = field_types()

    @abstractmethod
    def made(self, kind: str, value: Any, where: str) -> None:
        """Check what stands for an object: a class_path, alone or with arguments."""

    @abstractmethod
    def scalar(self, value: Any, hint: Any, rule: str) -> bool:
        """Tell whether a value that is no list is one of a type that is made of no others; ``rule`` names the parameter."""

    @abstractmethod
    def free(self, value: Any, rule: str) -> bool:
        """Tell whether a value may stand where no type is declared."""

    @abstractmethod
    def key(self, key: Any) -> bool:
        """Tell whether a table may have this key."""

    @abstractmethod
    def refuse(self, where: str, value: Any, hint: Any) -> NoReturn:
        """Raise for a value that is none of a type."""

    @abstractmethod
    def refuse_name(self, where: str, name: Any, value: Any, takes: Sequence[str], owner: str) -> NoReturn:
        """Raise for an argument that ``owner`` does not take."""

    def takes(self, factory: Any) -> Mapping[str, Any]:
        """Find the type of each argument of ``factory`` that has one."""
        hints = get_type_hints(factory.__init__ if inspect.isclass(factory) else factory)
        return {name: hints[name] for name in inspect.signature(factory).parameters if name in hints}

    def arguments(self, given: Any, factory: Any, where: str, owner: str) -> None:
        """Check arguments against the signature of what takes them."""
        if given is None:
            return
        if not isinstance(given, dict):
            self.refuse(where, given, factory)
        takes = self.takes(factory)
        for name, value in given.items():
            if not isinstance(name, str) or name not in takes:
                self.refuse_name(where, name, value, list(takes), owner)
            self.value(value, takes[name], f"{where}.{name}", f"{owner}.{name}")

    def value(self, value: Any, hint: Any, where: str, rule: str) -> None:
        """Check a value against a type; ``rule`` names the parameter it is for."""
        if not self.fits(value, hint, where, rule):
            self.refuse(where, value, hint)

    def fits(self, value: Any, hint: Any, where: str, rule: str) -> bool:
        """Tell whether a value is one of a type; what is refused inside it as an argument, or an object, is raised."""
        origin, inner = get_origin(hint), get_args(hint)
        if origin in (Union, types.UnionType):
            return any(self._tried(value, one, where, rule) for one in inner)
        if origin is Literal:
            return any(type(one) is type(value) and one == value for one in inner)
        if (kind := kind_of(hint)) is not None:
            self.made(kind, value, where)
            return True
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            self.arguments(value, hint, where, hint.__name__)
            return True
        if hint is Any or (origin is dict and inner[1] is Any):
            return (hint is Any or isinstance(value, dict)) and self.free(value, rule)
        if origin is dict:
            return isinstance(value, dict) and all(
                self.key(key) and self.fits(item, inner[1], where, rule) for key, item in value.items()
            )
        if isinstance(value, list):
            return self._all_fit(value, origin, inner, where, rule)
        return self.scalar(value, hint, rule)

    def _tried(self, value: Any, hint: Any, where: str, rule: str) -> bool:
        """Tell whether a value fits one of several types; what is refused as an object is told as such."""
        if (kind_of(hint) or dataclasses.is_dataclass(hint)) and not isinstance(value, dict):
            return False
        return self.fits(value, hint, where, rule)

    def _all_fit(self, items: list[Any], origin: Any, inner: tuple[Any, ...], where: str, rule: str) -> bool:
        if origin in (list, Sequence):
            return all(self.fits(item, inner[0], where, rule) for item in items)
        if origin is not tuple:
            return False
        each = [inner[0]] * len(items) if inner[-1] is Ellipsis else list(inner)
        pairs = list(zip(items, each, strict=False))
        return len(items) == len(each) and all(self.fits(item, one, where, rule) for item, one in pairs)
