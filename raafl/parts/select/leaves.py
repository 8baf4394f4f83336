"""How much of a model a rate leaves."""

from __future__ import annotations

from raafl.core.algorithm import Fleet
from raafl.parts.select import leading
from raafl.submodel import FULL

RATES = {"1/2": 1 / 2, "1/4": 1 / 4}


def leaves(fleet: Fleet) -> dict[str, dict[str, float]]:
    """Return by rate, the share kept of every axis, what is left of the parameters and of the FLOPs of a step.

    Empty for a model without axes.
    """
    axes, whole = fleet.state.submodels.axes, fleet.cost(FULL)
    costs = {name: fleet.cost(leading(axes, rate)) for name, rate in RATES.items() if axes}
    return {
        name: {
            "parameters": cost.params / max(whole.params, 1),
            "flops": cost.flops_per_sample / max(whole.flops_per_sample, 1e-9),
        }
        for name, cost in costs.items()
    }


def sentence_of(shares: dict[str, dict[str, float]]) -> str:
    """Say in words what `leaves` found."""
    words = [f"{rate}: {one['parameters']:.2f} and {one['flops']:.2f}" for rate, one in shares.items()]
    return f"of parameters and FLOPs a rate leaves {', '.join(words)}"
