"""MOON: the contrastive term's step by hand, and what is kept as a client's last model."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from raafl.algorithms import moon
from raafl.core.snapshots import Snapshots
from raafl.errors import BadInput
from raafl.parts.local.swap_parameters import InputCapture
from tests.helpers.coordinators import assigned, coordinator_for, join, line_state
from tests.helpers.single_task import Slope, give, task_of


class TwoLayers(Slope):
    """Two features of one input, and a head whose weights are 0: the loss moves no feature."""

    def __init__(self):
        super().__init__()
        self.line = nn.Linear(1, 2, bias=False)
        self.head = nn.Linear(2, 1, bias=False)

    def training_step(self, batch, index):
        return self.head(self.line(batch[0])).mean()


def step(last):
    """The features after one step from (1, 0), where the client's last model has ``last``."""
    sent = {"line.weight": [[1.0], [0.0]], "head.weight": [[0.0, 0.0]]}
    sent |= {"last/line.weight": last, "last/head.weight": [[0.0, 0.0]]}
    up, _ = task_of(moon(mu=2.0, temperature=1.0), TwoLayers(), sent, steps=1)
    return up["line.weight"].flatten().tolist()


def test_a_step_away_from_the_last_model():
    """z = z_glob = (1, 0), z_prev = (0, 1): l = log(1 + exp(s_prev - s_glob)), dl/dz = (0, 1) / (1 + e); eta mu = 1."""
    assert step([[0.0], [1.0]]) == pytest.approx([1.0, -1 / (1 + math.e)])


def test_where_the_last_model_is_the_received_one_nothing_is_contrasted():
    assert step([[1.0], [0.0]]) == pytest.approx([1.0, 0.0])


def last_of(coordinator, task):
    flat = Snapshots(coordinator).cut(task)
    values, bundles = coordinator.payload.split(flat, task.spec, "sent")
    return values["fc1.weight"][0, 0].item(), bundles["last"]["fc1.weight"][0, 0].item()


def test_a_client_gets_its_last_model_and_at_first_the_global_one():
    coordinator = coordinator_for(moon(cohort=2), line_state(2, 1.0), min_clients=3, num_clients=3)
    one, two = assigned(join(coordinator, [1, 2, 3])).values()
    assert last_of(coordinator, one) == (1.0, 1.0)
    give(coordinator, one, 2.0)
    give(coordinator, two, 4.0)
    assert (last_of(coordinator, one), last_of(coordinator, two)) == ((3.0, 2.0), (3.0, 4.0))


class Spare(TwoLayers):
    """The last linear layer belongs to a head that is not used; the used one is called with a keyword."""

    def __init__(self):
        super().__init__()
        self.spare = nn.Linear(2, 4)

    def training_step(self, batch, index):
        return self.head(input=self.line(batch[0])).mean()


def test_a_last_layer_that_the_step_does_not_use_is_refused_with_those_that_it_uses():
    batch = (torch.ones(2, 1), torch.ones(2, 1))
    used = r"but training_step does not use it: give one that it uses, line, head$"
    module, words = Spare(), rf"layer is null, which is the last linear layer, 'spare', {used}"
    with pytest.raises(BadInput, match=words), moon().local.trial(module):
        module.training_step(batch, 0)
    with moon(layer="head").local.trial(module):
        module.training_step(batch, 0)
    assert not any(layer._forward_pre_hooks for layer in module.modules())
    capture = InputCapture(module, "head")
    module.training_step(batch, 0)
    assert torch.equal(capture.seen, module.line(batch[0]))


def test_a_model_without_such_a_layer_and_bad_numbers_are_refused():
    with pytest.raises(BadInput, match="ReLU has no linear layer"):
        moon().local.prepare(torch.nn.ReLU())
    with pytest.raises(BadInput, match="mu is -1"):
        moon(-1)
