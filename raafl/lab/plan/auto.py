"""Define `algorithm: auto`, a placeholder for the method that raafl chooses before a run (`raafl.lab.plan.choose`)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from raafl.algorithms import AUTO
from raafl.algorithms.fed_buff import fed_buff
from raafl.core.algorithm import Algorithm
from raafl.core.select import SelectContext
from raafl.parts.select.submodels import Full

NAME = AUTO


@dataclass(frozen=True, slots=True)
class Unchosen(Full):
    """Placeholder for the select part (choice of submodels), until `auto` has chosen a method."""

    # names of the methods among which to choose; None = all that raafl has measurements of
    methods: tuple[str, ...] | None = None

    def check(self, fleet: SelectContext) -> list[str]:
        """Return an error that no method has been chosen, so that no run starts with the placeholder."""
        return [
            "algorithm is auto, but no method has been chosen yet: start the run by a command of raafl, or name a "
            "method"
        ]

    def __str__(self) -> str:
        return "chosen before the run"


def auto(methods: list[str] | None = None) -> Algorithm:
    """Choose the method automatically before the run starts, from the clients' devices, the model and the data.

    Args:
        methods: names of the methods among which to choose; None = all that raafl has measurements of.
    """
    select = Unchosen(None if methods is None else tuple(methods))
    return replace(fed_buff(), name=NAME, paper="none", select=select)
