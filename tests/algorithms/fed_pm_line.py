"""A line of weights to be masked, for the tests of FedPM."""

from __future__ import annotations

import torch

from raafl.algorithms.fed_pm.masks import ProbabilisticMaskTraining
from raafl.core.algorithm import Task
from raafl.core.state import GlobalState
from raafl.core.types import Assignment
from raafl.submodel import FlatTensors, Spec, Submodels
from tests.helpers.coordinators import EXAMPLE, Line


def prepared_line(initial=0.5):
    """`Line` of 8 + 4 weights as FedPM has it; its bias is frozen. sigma is 1 of fc1, sqrt(1/2) of fc2."""
    torch.manual_seed(0)
    return ProbabilisticMaskTraining(initial=initial).prepare(Line())


def prepared_state():
    module = prepared_line()
    submodels = Submodels(module, EXAMPLE)
    return GlobalState(submodels, submodels.state(module))


def assignment(spec=None, seed=7):
    return Assignment(1, 1, 0, 0, 0, spec or Spec(), 0, None, None, seed, 0.0)


def training(module, lr=0.1, loss=None, **more):
    """The hook of a task on a prepared module, its submodels, and the optimiser."""
    submodels = Submodels(module)
    scores = [p for p in module.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(scores, lr)

    def update():
        optimizer.step()
        optimizer.zero_grad()

    task = Task(
        assignment(),
        submodels,
        module,
        optimizer,
        FlatTensors.empty(submodels.layout()),
        2,
        torch.Generator(),
        loss=loss or module.training_step,
        backward=lambda loss: loss.backward(),
        update=update,
    )
    return ProbabilisticMaskTraining(**more).hook(task)


def ones(state, spec=None):
    tensors = FlatTensors.empty(state.submodels.layout(spec or Spec(), "trained"))
    for buffer in tensors.buffers.values():
        buffer.fill_(1.0)
    return tensors
