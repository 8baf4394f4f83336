"""Published methods, one file each; `ALGORITHMS` is the name table."""

from __future__ import annotations

from collections.abc import Callable

from raafl.algorithms.fed_async import fed_async
from raafl.algorithms.fed_avg import fed_avg
from raafl.algorithms.fed_buff import fed_buff
from raafl.algorithms.fed_opt import fed_opt
from raafl.algorithms.fed_prox import fed_prox
from raafl.algorithms.fed_raa import fed_raa
from raafl.algorithms.fed_rolex import fed_rolex
from raafl.algorithms.hetero_fl import hetero_fl
from raafl.algorithms.ist import ist
from raafl.algorithms.oap import oap
from raafl.algorithms.prune_fl import prune_fl
from raafl.algorithms.ra_fed import ra_fed
from raafl.algorithms.ram_fed import ram_fed
from raafl.algorithms.timely_fl import timely_fl
from raafl.core.algorithm import Algorithm

ALGORITHMS: dict[str, Callable[..., Algorithm]] = {
    "fed_async": fed_async,
    "fed_avg": fed_avg,
    "fed_buff": fed_buff,
    "fed_opt": fed_opt,
    "fed_prox": fed_prox,
    "fed_raa": fed_raa,
    "fed_rolex": fed_rolex,
    "hetero_fl": hetero_fl,
    "ist": ist,
    "oap": oap,
    "prune_fl": prune_fl,
    "ra_fed": ra_fed,
    "ram_fed": ram_fed,
    "timely_fl": timely_fl,
}

__all__ = [
    "ALGORITHMS",
    "Algorithm",
    "fed_async",
    "fed_avg",
    "fed_buff",
    "fed_opt",
    "fed_prox",
    "fed_raa",
    "fed_rolex",
    "hetero_fl",
    "ist",
    "oap",
    "prune_fl",
    "ra_fed",
    "ram_fed",
    "timely_fl",
]
