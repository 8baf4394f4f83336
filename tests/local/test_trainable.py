"""Learning rates of a task times the run's factor, with and without schedulers of the module's own."""

from __future__ import annotations

import pytest
import torch
from torch.optim import SGD
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    CyclicLR,
    LambdaLR,
    LinearLR,
    OneCycleLR,
    SequentialLR,
    StepLR,
)
from torch.optim.swa_utils import SWALR

from raafl.local.trainable import scale_rates

SCHEDULERS = {
    "none": None,
    "closed form": lambda optimizer: LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "from the one before": lambda optimizer: StepLR(optimizer, 2, 0.5),
    "to zero": lambda optimizer: CosineAnnealingLR(optimizer, 6),
    "to a floor": lambda optimizer: CosineAnnealingLR(optimizer, 4, eta_min=0.02),
    "to a floor and up": lambda optimizer: CosineAnnealingWarmRestarts(optimizer, 3, eta_min=0.02),
    "up and down": lambda optimizer: CyclicLR(optimizer, 0.02, 0.3, step_size_up=2, cycle_momentum=False),
    "rates of its own": lambda optimizer: OneCycleLR(optimizer, 0.4, total_steps=7),
    "to a mean's rate": lambda optimizer: SWALR(optimizer, 0.05, anneal_epochs=4),
    "a sequence": lambda optimizer: SequentialLR(
        optimizer, [LinearLR(optimizer, 0.1, total_iters=2), StepLR(optimizer, 1, 0.5)], [2]
    ),
    "a sequence in a chain": lambda optimizer: ChainedScheduler(
        [SequentialLR(optimizer, [LinearLR(optimizer, 0.1, total_iters=2), CosineAnnealingLR(optimizer, 4, 0.02)], [2])]
    ),
}


def rates(make, factor):
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = SGD([{"params": [parameter]}, {"params": [torch.nn.Parameter(torch.zeros(1))], "lr": 0.03}], lr=0.2)
    scheduler = make(optimizer) if make else None
    if factor != 1.0:
        scale_rates(optimizer, [scheduler] if scheduler else [], factor)
    found = []
    for _ in range(6):
        found.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        if scheduler:
            scheduler.step()
    return torch.tensor(found, dtype=torch.float64)


@pytest.mark.filterwarnings("ignore:The epoch parameter")
@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_rate_of_a_task_is_scaled(name):
    plain, scaled = rates(SCHEDULERS[name], 1.0), rates(SCHEDULERS[name], 0.25)
    assert len(set(plain[:, 0].tolist())) > 1 or name == "none"
    torch.testing.assert_close(scaled, 0.25 * plain, rtol=1e-9, atol=1e-12)
