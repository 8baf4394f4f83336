"""Store on the server the values that each client sent, whole or in part, and load them for its next task."""

from __future__ import annotations

import math

import torch

from raafl.core.state import GlobalState
from raafl.submodel import FlatTensors, Spec
from raafl.submodel.extract import CopyPlan


def store_(
    state: GlobalState, name: str, client: int, spec: Spec, values: FlatTensors, only: frozenset[str] | None = None
) -> None:
    """Store the values that a client sent, under a name; elements that it has never trained are NaN.

    `only`: names of the parameters to store; None = all that train.
    """
    plan = _plan(state, spec, only)
    own = state.clients.of(name, client, plan.full_layout, state.values.device, fill=math.nan)
    part = FlatTensors.empty(plan.layout, own.device)
    for key, tensor in part.items():
        tensor.copy_(values[key])
    plan.scatter_(own, part)


def load_(
    state: GlobalState, name: str, client: int, spec: Spec, out: FlatTensors, only: frozenset[str] | None = None
) -> None:
    """Overwrite ``out`` with the values stored for a client; elements that the client has never trained stay unchanged.

    `only`: names of the parameters to load; None = all that train.
    """
    own = state.clients.find(name, client)
    if own is None:
        return
    for key, tensor in _plan(state, spec, only).gather(own).items():
        # NaN marks elements that were never stored: an update with NaN of its own has been refused
        out[key].copy_(torch.where(tensor.isnan(), out[key], tensor))


def _plan(state: GlobalState, spec: Spec, only: frozenset[str] | None) -> CopyPlan:
    return state.submodels.plan(spec, "trained", "trained", state.submodels.parameter_names if only is None else only)
