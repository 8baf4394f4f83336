"""List the names that a config from another person may use: each names one of raafl's own objects.

A name that is not in these tables stands for code of somebody's choosing. A prefix would be no protection, since raafl's modules
have other modules among their attributes (`raafl.runtime.local.supervisor.subprocess`).
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Final

from raafl import data, parts
from raafl.algorithms import ALGORITHMS

DATA: Final = (
    "AGNews",
    "CIFAR10",
    "CIFAR100",
    "Digits",
    "FPB",
    "FineTuning",
    "GaussianClusters",
    "HuggingFace",
    "HuggingFaceText",
    "MNIST",
    "SST2",
    "Shakespeare",
    "TextFolder",
)
PARTITIONS: Final = ("ByColumn", "ClassesPerClient", "Dirichlet", "Iid", "QuantitySkew")
_STAND_INS: Final = {"model": "Module", "data": "Data", "algorithm": "algorithm", "partition": "partition"}


@dataclass(frozen=True)
class Entry:
    """Module and name of an object of raafl that an untrusted config may name."""

    home: str
    name: str

    def find(self) -> object:
        """Import the object and return it."""
        return getattr(importlib.import_module(self.home), self.name)


@cache
def registry() -> Mapping[str, Mapping[str, Entry]]:
    """Return the objects that an untrusted config may name for model, data, partition, algorithm and select."""
    methods = {name: f"raafl.algorithms.{name}" for name in ALGORITHMS}
    zoo = importlib.import_module("model_zoo")
    return {
        "model": _table(zoo._HOMES, "model_zoo", ("model_zoo",)),
        "data": _table(data._HOME, "raafl.data", ("raafl.data",), DATA),
        "partition": _table(data._HOME, "raafl.data", ("raafl.data",), PARTITIONS),
        "algorithm": _table(methods, "", ("raafl", "raafl.algorithms")),
        "select": _table(parts._HOME, "", ("raafl.parts",)),
    }


@cache
def stand_ins() -> Mapping[str, Mapping[str, Entry]]:
    """Return the placeholders for Python objects in the config of a run that was started from Python."""
    home = "raafl.api.python_objects"
    return {kind: {f"{home}.{name}": Entry(home, name)} for kind, name in _STAND_INS.items()}


def paths() -> list[str]:
    """List all import paths that an untrusted config may name, and the paths of types that jsonargparse needs."""
    named = {path for tables in (registry(), stand_ins()) for table in tables.values() for path in table}
    return sorted(named | {"raafl.devices.Device", "raafl.devices.profiles.Device", "model_zoo.lora.LoRA"})


def _table(
    homes: Mapping[str, str], package: str, also_in: Iterable[str], names: Iterable[str] | None = None
) -> dict[str, Entry]:
    """Build one table: each name at home and in the packages that show it."""
    found: dict[str, Entry] = {}
    for name in homes if names is None else names:
        home = homes[name] if not package or homes[name].startswith(package) else f"{package}.{homes[name]}"
        found |= {f"{place}.{name}": Entry(home, name) for place in (home, *also_in)}
    return found
