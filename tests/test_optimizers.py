from __future__ import annotations

import pytest
import torch
from lightning.fabric import Fabric
from torch import nn
from torch.optim import SGD, AdamW, lr_scheduler
from torch.optim.optimizer import register_optimizer_step_pre_hook

from raafl import module_hooks
from raafl.module_hooks import zero_grad

STRATEGY = Fabric(accelerator="cpu", devices=1).strategy


def backward(loss):
    module_hooks.backward(loss, STRATEGY)


def step(optimizer):
    module_hooks.step(optimizer, STRATEGY)


def two(kind, **options):
    torch.manual_seed(0)
    pair = [nn.Linear(3, 2), nn.Linear(3, 2)]
    pair[1].load_state_dict(pair[0].state_dict())
    return [(module, kind(module.parameters(), lr=0.1, **options)) for module in pair]


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (SGD, {}),
        (SGD, {"momentum": 0.5}),
        (SGD, {"momentum": 0.5, "dampening": 0.25, "weight_decay": 0.1}),
        (SGD, {"momentum": 0.5, "nesterov": True, "weight_decay": 1}),
        (SGD, {"weight_decay": 0.1, "maximize": True}),
        (SGD, {"foreach": True}),
        (AdamW, {}),
        (AdamW, {"fused": True}),
    ],
)
def test_steps_have_the_bits_of_torchs_own(kind, options):
    (plain, ours), (other, torchs) = two(kind, **options)
    for _ in range(3):
        batch = torch.randn(4, 3)
        backward(plain(batch).square().sum())
        step(ours), zero_grad(ours)
        other(batch).square().sum().backward()
        torchs.step(), torchs.zero_grad()
        assert torch.equal(plain.weight, other.weight) and plain.weight.grad is None


def test_whoever_watches_or_replaces_a_step_is_called():
    (module, optimizer), _ = two(SGD)
    seen = []

    def backpropagate():
        backward(module(torch.ones(1, 3)).sum())

    backpropagate(), step(optimizer)
    handles = [optimizer.register_step_post_hook(lambda *_: seen.append("own"))]
    step(optimizer)
    handles[0].remove()
    handles.append(register_optimizer_step_pre_hook(lambda *_: seen.append("all")))
    step(optimizer)
    handles[1].remove()
    assert seen == ["own", "all"]
    lr_scheduler.StepLR(optimizer, 1)  # replaces the step of this one optimizer, to count its calls
    step(optimizer)
    assert optimizer._opt_called
    with torch.profiler.profile() as profile:
        step(optimizer), zero_grad(optimizer)
    names = {event.name for event in profile.events()}
    assert {"Optimizer.step#SGD.step", "Optimizer.zero_grad#SGD.zero_grad"} <= names
    optimizer.zero_grad = lambda: seen.append("zero")
    zero_grad(optimizer)
    assert seen[-1] == "zero"


def test_a_loss_that_is_not_one_real_number_gets_torchs_error():
    weight = nn.Parameter(torch.ones(2))
    for loss in (weight * 2, torch.tensor(1.0), (weight.sum() * 1j)):
        with pytest.raises(RuntimeError) as own:
            loss.backward()
        with pytest.raises(RuntimeError) as ours:
            backward(loss)
        assert str(ours.value) == str(own.value)
