"""raafl trains one model over many unequal machines: asynchronous aggregation of physically smaller submodels.

>>> import raafl
>>> raafl.fed_raa(fragments=3, alpha=0.6).describe()["trigger"]
'each arrival'
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raafl.algorithms import (
        ada_vit,
        co_s2p,
        fed_async,
        fed_avg,
        fed_buff,
        fed_mezo,
        fed_opt,
        fed_pm,
        fed_prox,
        fed_raa,
        fed_rolex,
        hetero_fl,
        ist,
        oap,
        platon,
        prune_fl,
        q_vit,
        ra_fed,
        ram_fed,
        split_fed,
        timely_fl,
    )
    from raafl.api.callbacks import Callback, EarlyStopping, LambdaCallback, Printing
    from raafl.api.federation import Federation, Result
    from raafl.commands.run import fit, simulate
    from raafl.config.experiment import Experiment
    from raafl.core.algorithm import Algorithm
    from raafl.errors import BadInput

__version__ = "0.1.0"

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
    "ada_vit": "raafl.algorithms",
    "co_s2p": "raafl.algorithms",
    "fed_async": "raafl.algorithms",
    "fed_avg": "raafl.algorithms",
    "fed_buff": "raafl.algorithms",
    "fed_mezo": "raafl.algorithms",
    "fed_opt": "raafl.algorithms",
    "fed_pm": "raafl.algorithms",
    "fed_prox": "raafl.algorithms",
    "fed_raa": "raafl.algorithms",
    "fed_rolex": "raafl.algorithms",
    "fit": "raafl.commands.run",
    "hetero_fl": "raafl.algorithms",
    "ist": "raafl.algorithms",
    "oap": "raafl.algorithms",
    "platon": "raafl.algorithms",
    "prune_fl": "raafl.algorithms",
    "q_vit": "raafl.algorithms",
    "ra_fed": "raafl.algorithms",
    "ram_fed": "raafl.algorithms",
    "simulate": "raafl.commands.run",
    "split_fed": "raafl.algorithms",
    "timely_fl": "raafl.algorithms",
}

__all__ = [
    "Algorithm",
    "BadInput",
    "Callback",
    "EarlyStopping",
    "Experiment",
    "Federation",
    "LambdaCallback",
    "Printing",
    "Result",
    "__version__",
    "ada_vit",
    "co_s2p",
    "fed_async",
    "fed_avg",
    "fed_buff",
    "fed_mezo",
    "fed_opt",
    "fed_pm",
    "fed_prox",
    "fed_raa",
    "fed_rolex",
    "fit",
    "hetero_fl",
    "ist",
    "oap",
    "platon",
    "prune_fl",
    "q_vit",
    "ra_fed",
    "ram_fed",
    "simulate",
    "split_fed",
    "timely_fl",
]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first asked for, so that `import raafl` stays cheap."""
    if name not in _HOME:
        raise AttributeError(f"module 'raafl' has no attribute '{name}'")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
