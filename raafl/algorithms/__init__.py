"""Published methods, one file each; `ALGORITHMS` is the name table."""

from __future__ import annotations

from collections.abc import Callable

from raafl.algorithms.ada_vit import ada_vit
from raafl.algorithms.co_s2p import co_s2p
from raafl.algorithms.fed_async import fed_async
from raafl.algorithms.fed_avg import fed_avg
from raafl.algorithms.fed_buff import fed_buff
from raafl.algorithms.fed_mezo import fed_mezo
from raafl.algorithms.fed_opt import fed_opt
from raafl.algorithms.fed_pm import fed_pm
from raafl.algorithms.fed_prox import fed_prox
from raafl.algorithms.fed_raa import fed_raa
from raafl.algorithms.fed_rolex import fed_rolex
from raafl.algorithms.hetero_fl import hetero_fl
from raafl.algorithms.ist import ist
from raafl.algorithms.oap import oap
from raafl.algorithms.platon import platon
from raafl.algorithms.prune_fl import prune_fl
from raafl.algorithms.q_vit import q_vit
from raafl.algorithms.ra_fed import ra_fed
from raafl.algorithms.ram_fed import ram_fed
from raafl.algorithms.split_fed import split_fed
from raafl.algorithms.timely_fl import timely_fl
from raafl.core.algorithm import Algorithm

ALGORITHMS: dict[str, Callable[..., Algorithm]] = {
    "ada_vit": ada_vit,
    "co_s2p": co_s2p,
    "fed_async": fed_async,
    "fed_avg": fed_avg,
    "fed_buff": fed_buff,
    "fed_mezo": fed_mezo,
    "fed_opt": fed_opt,
    "fed_pm": fed_pm,
    "fed_prox": fed_prox,
    "fed_raa": fed_raa,
    "fed_rolex": fed_rolex,
    "hetero_fl": hetero_fl,
    "ist": ist,
    "oap": oap,
    "platon": platon,
    "prune_fl": prune_fl,
    "q_vit": q_vit,
    "ra_fed": ra_fed,
    "ram_fed": ram_fed,
    "split_fed": split_fed,
    "timely_fl": timely_fl,
}

__all__ = [
    "ALGORITHMS",
    "Algorithm",
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
    "hetero_fl",
    "ist",
    "oap",
    "platon",
    "prune_fl",
    "q_vit",
    "ra_fed",
    "ram_fed",
    "split_fed",
    "timely_fl",
]
