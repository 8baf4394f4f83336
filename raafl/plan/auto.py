"""Stand for the method that raafl chooses before a run; see `raafl.plan.choose`, which replaces it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from raafl.algorithms.fed_buff import fed_buff
from raafl.core.algorithm import Algorithm
from raafl.core.select import SelectContext
from raafl.parts.select.submodels import Full

NAME = "auto"


@dataclass(frozen=True, slots=True)
class Unchosen(Full):
    """Select part of a method that is not chosen yet: refuses every run.

    Attributes:
        methods: among which to choose; None = all that the table has.
    """

    methods: tuple[str, ...] | None = None

    def check(self, fleet: SelectContext) -> list[str]:
        """Return the problem that nobody has chosen."""
        return [
            "algorithm is auto, which stands for no method yet: start the run by a command of raafl, or name a method"
        ]

    def __str__(self) -> str:
        return "chosen before the run"


def auto(methods: list[str] | None = None) -> Algorithm:
    """Return the stand-in for a method that is chosen from the fleet, the model and its data, before the run starts.

    Args:
        methods: names of methods among which to choose; None = all that the table of choices has.
    """
    select = Unchosen(None if methods is None else tuple(methods))
    return replace(fed_buff(), name=NAME, paper="none", select=select)
