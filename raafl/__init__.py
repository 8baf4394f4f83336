# mypy: implicit-reexport
# ruff: noqa: F401, F403
"""raafl trains one model over many unequal machines: asynchronous aggregation of physically smaller submodels.

>>> import raafl
>>> raafl.fed_raa(fragments=3, alpha=0.6).describe()["trigger"]
'each arrival'
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

from raafl._version import __version__

if TYPE_CHECKING:
    from raafl.algorithms import *
    from raafl.api.callbacks import Callback, EarlyStopping, LambdaCallback, Printing
    from raafl.api.federation import Federation, Result
    from raafl.config.experiment import Experiment
    from raafl.errors import BadInput, RunFailed
    from raafl.lab.compare.compared import compare, sweep
    from raafl.lab.plan.choose import auto
    from raafl.local.from_trainer import from_trainer
    from raafl.runtime.over_ranks import fit
    from raafl.runtime.run import simulate

_HOME = {
    "Algorithm": "raafl.core.algorithm",
    "BadInput": "raafl.errors",
    "Callback": "raafl.api.callbacks",
    "EarlyStopping": "raafl.api.callbacks",
    "Experiment": "raafl.config.experiment",
    "Federation": "raafl.api.federation",
    "LambdaCallback": "raafl.api.callbacks",
    "Printing": "raafl.api.callbacks",
    "Result": "raafl.api.federation",
    "RunFailed": "raafl.errors",
    "auto": "raafl.lab.plan.choose",
    "compare": "raafl.lab.compare.compared",
    "fit": "raafl.runtime.over_ranks",
    "from_trainer": "raafl.local.from_trainer",
    "simulate": "raafl.runtime.run",
    "sweep": "raafl.lab.compare.compared",
}


def __getattr__(name: str) -> Any:
    """Import a public name's or method's module at its first use, so that `import raafl` stays fast."""
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    lower = name.islower() and not name.startswith("_")  # only methods have lower-case names
    public = lower and importlib.util.find_spec(f"raafl.{name}") is None  # not a submodule, such as raafl.data
    methods = importlib.import_module("raafl.algorithms").ALGORITHMS if public or name == "__all__" else {}
    if name == "__all__":
        return sorted([*_HOME, *methods, "__version__"])
    if name not in methods:
        raise AttributeError(f"module 'raafl' has no attribute '{name}'")
    return methods[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__getattr__("__all__")})
