"""Name the published methods, one file or package each; a method is imported when it is named.

Its module and its factory have the method's name. All else that lists methods derives from this folder: `ALGORITHMS`,
`raafl.NAME`, `raafl algorithms`, shell completion and the pages of the documentation.
"""

from __future__ import annotations

import json
import pkgutil
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from raafl.algorithm import Algorithm
    from raafl.algorithms.ada_vit import ada_vit as ada_vit
    from raafl.algorithms.ca2fl import ca2fl as ca2fl
    from raafl.algorithms.co_s2p import co_s2p as co_s2p
    from raafl.algorithms.depth_fl import depth_fl as depth_fl
    from raafl.algorithms.diloco import diloco as diloco
    from raafl.algorithms.fadas import fadas as fadas
    from raafl.algorithms.fed_async import fed_async as fed_async
    from raafl.algorithms.fed_avg import fed_avg as fed_avg
    from raafl.algorithms.fed_buff import fed_buff as fed_buff
    from raafl.algorithms.fed_compass import fed_compass as fed_compass
    from raafl.algorithms.fed_dyn import fed_dyn as fed_dyn
    from raafl.algorithms.fed_mezo import fed_mezo as fed_mezo
    from raafl.algorithms.fed_nova import fed_nova as fed_nova
    from raafl.algorithms.fed_opt import fed_opt as fed_opt
    from raafl.algorithms.fed_per import fed_per as fed_per
    from raafl.algorithms.fed_pm import fed_pm as fed_pm
    from raafl.algorithms.fed_prox import fed_prox as fed_prox
    from raafl.algorithms.fed_raa import fed_raa as fed_raa
    from raafl.algorithms.fed_rolex import fed_rolex as fed_rolex
    from raafl.algorithms.fiarse import fiarse as fiarse
    from raafl.algorithms.fjord import fjord as fjord
    from raafl.algorithms.hetero_fl import hetero_fl as hetero_fl
    from raafl.algorithms.ist import ist as ist
    from raafl.algorithms.moon import moon as moon
    from raafl.algorithms.oap import oap as oap
    from raafl.algorithms.platon import platon as platon
    from raafl.algorithms.prune_fl import prune_fl as prune_fl
    from raafl.algorithms.q_vit import q_vit as q_vit
    from raafl.algorithms.ra_fed import ra_fed as ra_fed
    from raafl.algorithms.ram_fed import ram_fed as ram_fed
    from raafl.algorithms.scaffold import scaffold as scaffold
    from raafl.algorithms.scale_fl import scale_fl as scale_fl
    from raafl.algorithms.split_fed import split_fed as split_fed
    from raafl.algorithms.streaming_diloco import streaming_diloco as streaming_diloco
    from raafl.algorithms.timely_fl import timely_fl as timely_fl


class _Methods(Mapping[str, "Callable[..., Algorithm]"]):
    """Mapping from the name of each method to its factory; a look-up imports the method's module."""

    def __init__(self) -> None:
        """Collect the names of this folder's modules, without importing any."""
        self._names = sorted(module.name for module in pkgutil.iter_modules(__path__))

    def __getitem__(self, name: str) -> Callable[..., Algorithm]:
        """Import the method's module and return its factory."""
        if name not in self._names:
            raise KeyError(name)
        factory: Callable[..., Algorithm] = getattr(import_module(f"{__name__}.{name}"), name)
        return factory

    def __contains__(self, name: object) -> bool:
        """Check whether a method has this name, without importing anything."""
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class _Package(ModuleType):
    """Class of this package module; it makes the attribute `raafl.algorithms.fed_avg` the factory, not the submodule."""

    def __setattr__(self, name: str, value: Any) -> None:
        # on import of a submodule Python sets it as the package's attribute, which would replace the factory of that name
        if isinstance(value, ModuleType) and value.__name__ == f"{__name__}.{name}":
            value = getattr(value, name)
        super().__setattr__(name, value)


ALGORITHMS: Mapping[str, Callable[..., Algorithm]] = _Methods()
"""The factory of each method, by its name."""

AUTO: Final = "auto"
"""Name that stands for the method that raafl chooses before a run (`raafl.lab.plan`)."""

DESCRIBED: Final = Path(__file__).with_name("described.json")
"""What `Algorithm.describe` says of each method with its defaults, as `python -m benchmarks.reference` writes it."""


def described() -> list[dict[str, str]]:
    """Return each method's name, paper and parts in words; imports only a method that the file does not have yet."""
    known = {row["name"]: row for row in json.loads(DESCRIBED.read_text(encoding="utf-8"))}
    return [known[name] if name in known else ALGORITHMS[name]().describe() for name in ALGORITHMS]


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Callable[..., Algorithm]:
    """Import a method's module at the first access to its name, and return the method's factory."""
    if name not in ALGORITHMS:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return ALGORITHMS[name]
