"""Make the submodels of a run's model as its options ask, without the axes that are not proven."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from raafl.config.submodel_options import SubmodelOptions
from raafl.core.algorithm import Select
from raafl.parts.select.submodels import Full
from raafl.submodel import Submodels
from raafl.submodel.prove.proof import refuted


def submodels_of(options: SubmodelOptions, module: nn.Module, example_batch: Any = None) -> Submodels:
    """Return the submodels of ``module``, as server and clients must have them alike."""
    return Submodels(module, example_batch, residual_width=options.residual_width, batch_norm=options.batch_norm)


def proven_submodels(
    options: SubmodelOptions, module: nn.Module, batch: Any, select: Select,
    plain: Callable[[], nn.Module] | None = None,
) -> Submodels:  # fmt: skip
    """Return the submodels of ``module`` without the axes that a step does not prove: for the server.

    Where ``select`` gives everyone the whole model there is nothing to prove.

    Args:
        options: how the model is cut.
        module: the model as it is trained.
        batch: a real one.
        select: of the run's algorithm.
        plain: makes the model as the user has it, to be proven in the place of ``module``; None = ``module`` is proven.
    """
    submodels = submodels_of(options, module, batch)
    if type(select) is not Full:
        made = module if plain is None else plain()
        found = refuted(submodels if plain is None else submodels_of(options, made, batch), made, batch)
        submodels.keep_whole({name: reason for name, reason in found.items() if name in submodels.axes})
    return submodels
