"""Check the values of a config against declared types: of the fields of `Experiment`, and of the arguments of named classes.

Two modules share it: `raafl.config.trust` (is another person's config made of plain values?) and `raafl.config.messages`
(what is wrong with the user's own?).
"""

from __future__ import annotations

import dataclasses
import inspect
import types
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Final, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

from raafl.config.experiment import field_types
from raafl.errors import BadInput, briefly

_KINDS: Mapping[str, str] = {
    "raafl.core.select.Select": "select",
    "raafl.data.partition.Partition": "partition",
    "raafl.core.algorithm.Algorithm": "algorithm",
}

MADE = ("model", "data", "algorithm", "partition")
"""Fields of a config that name a class or function with its arguments."""

OF_TRAINER: Final = "raafl.local.from_trainer."
"""Module of the classes that stand for a Trainer's model and data in a config with ``trainer``."""


def with_class_path(config: Any) -> Any:
    """Replace short forms in a config: an algorithm's name by its import path, and ``trainer`` by the model and data of it.

    ``fed_buff`` becomes ``raafl.fed_buff``.

    Raises:
        BadInput: ``trainer`` names no function, or model or data are given beside it.
    """
    if not isinstance(config, dict):
        return config
    if "trainer" in config:
        config = _of_trainer(config)
    given = config.get("algorithm")
    name = given.get("class_path") if isinstance(given, dict) else given
    if not isinstance(name, str) or not name.isidentifier():
        return config
    path = f"raafl.{name}"
    return {**config, "algorithm": {**given, "class_path": path} if isinstance(given, dict) else path}


def beside_trainer(name: str) -> BadInput:
    """Return the error for a field ``name``, model or data, that is given beside a trainer."""
    return BadInput(f"trainer and {name} are both given: leave {name} out, the Trainer has its own")


def _of_trainer(config: dict[Any, Any]) -> dict[Any, Any]:
    """Replace a config's ``trainer``, the path of a function or a class_path, by ``model`` and ``data`` made from it."""
    given = config["trainer"]
    spec = {"class_path": given} if isinstance(given, str) else given
    path = spec.get("class_path") if isinstance(spec, dict) and set(spec) <= {"class_path", "init_args"} else None
    if not isinstance(path, str) or "." not in path:
        raise BadInput(
            f"trainer is {briefly(given)}: give the path of a function that makes a transformers.Trainer, such as "
            "my_script.make_trainer"
        )
    if also := [name for name in ("model", "data") if name in config]:
        raise beside_trainer(also[0])
    arguments = {"trainer": path, "arguments": spec.get("init_args")}
    made = {name: {"class_path": OF_TRAINER + name.title(), "init_args": dict(arguments)} for name in ("model", "data")}
    return {**{name: value for name, value in config.items() if name != "trainer"}, **made}


def kind_of(hint: object) -> str | None:
    """Return the kind of object (model, data, algorithm, ...) that a type hint stands for; None for plain types."""
    return _KINDS.get(f"{getattr(hint, '__module__', '')}.{getattr(hint, '__qualname__', '')}")


@lru_cache(maxsize=64)  # a list of devices asks for those of `Device` each time
def _declared(factory: Any) -> Mapping[str, Any]:
    hints = get_type_hints(factory.__init__ if inspect.isclass(factory) else factory)
    return {name: hints[name] for name in inspect.signature(factory).parameters if name in hints}


class Check(ABC):
    """Type checker for the values of a config; subclasses decide which error to raise."""

    def __init__(self) -> None:
        """Create a checker with the declared types of all fields of `Experiment`."""
        self.hints = field_types()

    @abstractmethod
    def check_object(self, kind: str, value: object, where: str) -> None:
        """Check a value that names a class or function, alone or with arguments.

        Args:
            kind: kind of object that the field expects, such as model.
            value: value, as in the config.
            where: path of the field, for messages.
        """

    @abstractmethod
    def scalar(self, value: object, hint: object, parameter: str) -> bool:
        """Check whether a single value, not a list or mapping, has the declared type.

        Args:
            value: value, as in the config.
            hint: the declared type.
            parameter: name of the parameter with its class, such as `Device.count`; subclasses find limits of the value
                by this name.
        """

    @abstractmethod
    def free(self, value: object, parameter: str) -> bool:
        """Check whether a value is allowed for a parameter without a declared type.

        Args:
            value: value, as in the config.
            parameter: name of the parameter with its class, such as `Device.count`; subclasses find limits of the value
                by this name.
        """

    @abstractmethod
    def key(self, key: object) -> bool:
        """Check whether ``key`` is allowed as a key of a mapping."""

    @abstractmethod
    def refuse(self, where: str, value: object, hint: object) -> NoReturn:
        """Raise an error for a value of the wrong type.

        Args:
            where: path of the field in the config.
            value: value, as in the config.
            hint: the declared type.
        """

    @abstractmethod
    def refuse_name(self, where: str, name: object, value: object, takes: Sequence[str], owner: str) -> NoReturn:
        """Raise an error for an argument that a class or function does not accept.

        Args:
            where: path of the section in the config.
            name: name of the argument.
            value: value of the argument.
            takes: names of the arguments that it accepts.
            owner: name of the class or function.
        """

    def takes(self, factory: Any) -> Mapping[str, Any]:
        """Return the declared type of each argument of a class or function."""
        return _declared(factory)

    def arguments(self, given: object, factory: object, where: str, owner: str) -> None:
        """Check arguments against the signature of a class or function.

        Args:
            given: values of the arguments, by name; None = no arguments.
            factory: the class or function.
            where: path of the section, for messages.
            owner: name of the class or function, for messages.
        """
        if given is None:
            return
        if not isinstance(given, dict):
            self.refuse(where, given, factory)
        takes = self.takes(factory)
        for name, value in given.items():
            if not isinstance(name, str) or name not in takes:
                self.refuse_name(where, name, value, list(takes), owner)
            self.value(value, takes[name], f"{where}.{name}", f"{owner}.{name}")

    def value(self, value: object, hint: object, where: str, parameter: str) -> None:
        """Check a value against a type; raise an error if it does not fit.

        Args:
            value: value, as in the config.
            hint: the declared type.
            where: path of the field, for messages.
            parameter: name of the parameter with its class, such as `Device.count`; subclasses find limits of the value
                by this name.
        """
        if not self.fits(value, hint, where, parameter):
            self.refuse(where, value, hint)

    def fits(self, value: object, hint: object, where: str, parameter: str) -> bool:
        """Check whether a value fits a type; an error is raised for a wrong argument of a class that the value names.

        Args:
            value: value, as in the config.
            hint: the declared type.
            where: path of the field, for messages.
            parameter: name of the parameter with its class, such as `Device.count`; subclasses find limits of the value
                by this name.
        """
        origin, inner = get_origin(hint), get_args(hint)
        if origin in (Union, types.UnionType):
            return any(self._tried(value, one, where, parameter) for one in inner)
        if origin is Literal:
            return any(type(one) is type(value) and one == value for one in inner)
        if (kind := kind_of(hint)) is not None:
            self.check_object(kind, value, where)
            return True
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            self.arguments(value, hint, where, hint.__name__)
            return True
        if hint is Any or (origin is dict and inner[1] is Any):
            return (hint is Any or isinstance(value, dict)) and self.free(value, parameter)
        if origin is dict:
            return isinstance(value, dict) and all(
                self.key(key) and self.fits(item, inner[1], where, parameter) for key, item in value.items()
            )
        if isinstance(value, list):
            return self._all_fit(value, origin, inner, where, parameter)
        return self.scalar(value, hint, parameter)

    def _tried(self, value: object, hint: object, where: str, parameter: str) -> bool:
        """Check whether a value fits one member of a union type; only a dict can fit a class or a dataclass."""
        if (kind_of(hint) or dataclasses.is_dataclass(hint)) and not isinstance(value, dict):
            return False
        return self.fits(value, hint, where, parameter)

    def _all_fit(self, items: list[Any], origin: object, inner: tuple[Any, ...], where: str, parameter: str) -> bool:
        if origin in (list, Sequence):
            return all(self.fits(item, inner[0], where, parameter) for item in items)
        if origin is not tuple:
            return False
        each = [inner[0]] * len(items) if inner[-1] is Ellipsis else list(inner)
        pairs = list(zip(items, each, strict=False))
        return len(items) == len(each) and all(self.fits(item, one, where, parameter) for item, one in pairs)
