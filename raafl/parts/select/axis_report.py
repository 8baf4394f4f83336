"""Report as plain data which axes of a model shrink, how much that leaves, and which dimensions stay whole and why."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from raafl.parts.select.units import leading
from raafl.submodel import FULL, Axis, Cost, Spec, Submodels
from raafl.units import percent

RATES = (1 / 2, 1 / 4)
HALF_AND_QUARTER = {"1/2": 1 / 2, "1/4": 1 / 4}

Shares = dict[str, dict[str, float]]
"""Shares of the "parameters" and of a step's "flops" that remain, by name of a rate."""


def facts(submodels: Submodels, rates: Iterable[float], batch_size: int) -> dict[str, Any]:
    """Report as plain data which dimensions of a model can be cut, how much remains at given rates, and what stays whole.

    Dimensions that are cut together, such as a layer's hidden neurons, are an axis. How much remains is computed with
    all axes cut, except those over which norm layers compute statistics (the width of a transformer).
    """
    spanned = frozenset() if not submodels.axes or submodels.discovered is None else submodels.discovered.spanned
    cut = {name: axis for name, axis in submodels.axes.items() if name not in spanned}
    named = {f"{rate:g}": rate for rate in rates}
    return {
        "axes": axis_rows(submodels),
        "whole": [{"parameter": name, "dim": dim, "reason": why} for (name, dim), why in _whole(submodels).items()],
        "rates": remaining_shares(cut, named, lambda spec: submodels.cost(spec, batch_size)),
    }


def axis_rows(submodels: Submodels) -> list[dict[str, Any]]:
    """Return the axes (dimensions that are cut together) as plain data: name, size, and names of parameters and buffers."""
    return [
        {"name": axis.name, "size": axis.size, "parameters": list(dict.fromkeys(m.name for m in axis.members))}
        for axis in submodels.axes.values()
    ]


def remaining_shares(axes: Mapping[str, Axis], rates: Mapping[str, float], cost: Callable[[Spec], Cost]) -> Shares:
    """Return, for each rate, which shares of the model's parameters and FLOPs remain if its axes are cut to this rate."""
    whole = cost(FULL)
    costs = {name: cost(leading(axes, rate)) for name, rate in rates.items()}
    return {
        name: {
            "parameters": cost_at_rate.params / max(whole.params, 1),
            "flops": cost_at_rate.flops_per_sample / max(whole.flops_per_sample, 1e-9),
        }
        for name, cost_at_rate in costs.items()
    }


def share(value: float) -> str:
    """Format a share with two significant digits, such as 0.50 and 0.0041."""
    return f"{value:#.2g}"


def sentence_of(shares: Shares) -> str:
    """Describe in a sentence what share of the model each rate keeps, given the result of `remaining_shares`."""
    percents = {
        rate: (percent(share_of["parameters"]), percent(share_of["flops"])) for rate, share_of in shares.items()
    }
    (first, (parameters, flops)), *others = percents.items()
    words = [f"rate {first} keeps {parameters} of the parameters and {flops} of the FLOPs"]
    return ", ".join([*words, *(f"{rate} keeps {parameters} and {flops}" for rate, (parameters, flops) in others)])


def _whole(submodels: Submodels) -> dict[tuple[str, int], str]:
    """Map each parameter's dimension that is on no axis, as (name, dimension), to the reason for which it cannot shrink."""
    on_axes = {(m.name, m.dim) for axis in submodels.axes.values() for m in axis.members}
    otherwise = submodels.problem or "the model's declared axes do not include it"
    if submodels.discovered is not None and submodels.problem is None:
        otherwise = "only the ranks of its adapters shrink"
    return {
        (entry.name, dim): submodels.whole_dims.get((entry.name, dim), otherwise)
        for entry in submodels.layout().entries
        if entry.name in submodels.parameter_names
        for dim, size in enumerate(entry.shape)
        if size > 1 and (entry.name, dim) not in on_axes
    }
