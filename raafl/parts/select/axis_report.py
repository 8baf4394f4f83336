"""What of a model shrinks, how much that leaves of it, and what stays whole and why: plain data for all who say so."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from raafl.parts.select import leading
from raafl.submodel import FULL, Axis, Cost, Spec, Submodels
from raafl.units import percent

RATES = (1 / 2, 1 / 4)
HALF_AND_QUARTER = {"1/2": 1 / 2, "1/4": 1 / 4}

Shares = dict[str, dict[str, float]]
"""By name of a rate, what is left of the parameters and of the FLOPs of a step."""


def facts(submodels: Submodels, rates: Iterable[float], batch_size: int) -> dict[str, Any]:
    """Collect the axes of a model, what is left of it with these shares of all of them, and what stays whole.

    Axes across which norms take statistics, the residual width, stay whole at every rate.

    ``submodels`` are proven, ``rates`` shares of each axis in (0, 1], ``batch_size`` that of the step whose FLOPs
    count.
    """
    spanned = frozenset() if not submodels.axes or submodels.found is None else submodels.found.spanned
    cut = {name: axis for name, axis in submodels.axes.items() if name not in spanned}
    named = {f"{rate:g}": rate for rate in rates}
    return {
        "axes": axis_rows(submodels),
        "whole": [{"parameter": name, "dim": dim, "reason": why} for (name, dim), why in _whole(submodels).items()],
        "rates": leaves(cut, named, lambda spec: submodels.cost(spec, batch_size)),
    }


def axis_rows(submodels: Submodels) -> list[dict[str, Any]]:
    """List the axes in the model's order, each with the parameters and buffers that lie on it."""
    return [
        {"name": axis.name, "size": axis.size, "parameters": list(dict.fromkeys(m.name for m in axis.members))}
        for axis in submodels.axes.values()
    ]


def leaves(axes: Mapping[str, Axis], rates: Mapping[str, float], cost: Callable[[Spec], Cost]) -> Shares:
    """Measure the part of the whole model that is left with a share of each of ``axes``.

    What of the model has none of ``axes`` is left as it is; ``rates`` are shares by name.
    """
    whole = cost(FULL)
    costs = {name: cost(leading(axes, rate)) for name, rate in rates.items()}
    return {
        name: {
            "parameters": one.params / max(whole.params, 1),
            "flops": one.flops_per_sample / max(whole.flops_per_sample, 1e-9),
        }
        for name, one in costs.items()
    }


def share(value: float) -> str:
    """Return a share with two significant digits, as in 0.50 and 0.0041."""
    return f"{value:#.2g}"


def sentence_of(shares: Shares) -> str:
    """Say in words what `leaves` found."""
    kept = {rate: (percent(one["parameters"]), percent(one["flops"])) for rate, one in shares.items()}
    (first, (parameters, flops)), *others = kept.items()
    words = [f"rate {first} keeps {parameters} of the parameters and {flops} of the FLOPs"]
    return ", ".join([*words, *(f"{rate} keeps {parameters} and {flops}" for rate, (parameters, flops) in others)])


def _whole(submodels: Submodels) -> dict[tuple[str, int], str]:
    """Return for each dimension of a parameter that is on no axis the reason."""
    on_axes = {(m.name, m.dim) for axis in submodels.axes.values() for m in axis.members}
    otherwise = submodels.problem or "the axes that the model declares do not name it"
    if submodels.found is not None and submodels.problem is None:
        otherwise = "only the ranks of its adapters shrink"
    return {
        (entry.name, dim): submodels.whole_dims.get((entry.name, dim), otherwise)
        for entry in submodels.layout().entries if entry.name in submodels.parameter_names
        for dim, size in enumerate(entry.shape) if size > 1 and (entry.name, dim) not in on_axes
    }  # fmt: skip
