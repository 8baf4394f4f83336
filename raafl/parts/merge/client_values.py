"""Values of its own that the server keeps for a client, as the client has sent them: all that it trains, or some of it."""

from __future__ import annotations

import math

import torch

from raafl.core.state import GlobalState
from raafl.submodel import FlatTensors, Spec
from raafl.submodel.extract import CopyPlan


def store_(
    state: GlobalState, name: str, client: int, spec: Spec, values: FlatTensors, only: frozenset[str] | None = None
) -> None:
    """Keep for a client what it has sent of a submodel; ``only`` the parameters named, None = all that train.

    What it has never trained is NaN.
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
    """Put into ``out`` what is kept for a client; what it has never trained stays as it is."""
    own = state.clients.find(name, client)
    if own is None:
        return
    for key, tensor in _plan(state, spec, only).gather(own).items():
        out[key].copy_(torch.where(tensor.isnan(), out[key], tensor))


def _plan(state: GlobalState, spec: Spec, only: frozenset[str] | None) -> CopyPlan:
    return state.submodels.plan(spec, "trained", "trained", state.submodels.parameter_names if only is None else only)
