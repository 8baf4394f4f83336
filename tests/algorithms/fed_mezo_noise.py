"""Tasks of FedMeZO for its tests."""

from __future__ import annotations

import torch

from raafl.algorithms.fed_mezo.zeroth_order import (
    ZerothOrder,
)
from raafl.core.algorithm import Training
from raafl.core.state import GlobalState
from raafl.core.types import Assignment, derive_seed
from raafl.data import FederatedData, Iid
from raafl.local.train import LocalTrainer
from raafl.submodel import Spec, Submodels

NOTHING = Spec.select(trained=())


def assignment(spec=NOTHING, seed=7, extra=None):
    return Assignment(1, 1, 0, 0, 0, spec, 0, None, None, seed, 0.0, extra=extra or {})


def noise(seed, step, *sizes):
    """z of a step, drawn apart: a generator for each step, tensors in order."""
    generator = torch.Generator().manual_seed(derive_seed(seed, "perturbation", step))
    return [torch.randn(size, generator=generator) for size in sizes]


def trained(module, data, spec, extra=None, num_steps=4, seed=11):
    """A task of FedMeZO, run as clients do: its submodels, values received, values at the end, and update."""
    federated = FederatedData(data(), Iid(), 2, 0)
    submodels = Submodels(module, federated.example_batch(2))
    state = GlobalState(submodels, submodels.state(module))
    trainer = LocalTrainer(
        submodels, ZerothOrder(lr=0.01), "values", Training(num_epochs=None, num_steps=num_steps), max_built=1
    )
    received = submodels.plan(spec, "sent").gather(state.values)
    update = trainer.run(assignment(spec, seed, extra), received, federated.client(1))
    return state, received, dict(trainer.built(spec).module.named_parameters()), update
