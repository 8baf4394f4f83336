"""Published methods, one file each; `ALGORITHMS` is the name table."""

from __future__ import annotations

from collections.abc import Callable

from raafl.algorithms.fed_async import fed_async
from raafl.algorithms.fed_avg import fed_avg
from raafl.algorithms.fed_buff import fed_buff
from raafl.algorithms.fed_opt import fed_opt
from raafl.algorithms.fed_prox import fed_prox
from raafl.algorithms.fed_raa import fed_raa
from raafl.core.algorithm import Algorithm

ALGORITHMS: dict[str, Callable[..., Algorithm]] = {
    "fed_async": fed_async,
    "fed_avg": fed_avg,
    "fed_buff": fed_buff,
    "fed_opt": fed_opt,
    "fed_prox": fed_prox,
    "fed_raa": fed_raa,
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
]
