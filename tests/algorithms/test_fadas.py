"""FADAS: two merges by hand, against torch's AMSGrad, and the step by delay."""

from __future__ import annotations

import math

import pytest
import torch

from raafl.algorithms import fadas
from raafl.algorithms.fadas import AmsgradMemory, DelayAdaptive
from raafl.core.types import Update
from raafl.errors import BadInput
from raafl.parts.trigger import Buffered
from raafl.submodel import FULL, Spec
from tests.helpers.coordinators import filled, line_state


def merged(merge, state, *updates):
    """Merge deltas (value, staleness, spec), and return the hidden units' output weights."""
    for value, staleness, *spec in updates:
        merge.receive(state, Update(0, 1, 0, filled(state, value, *spec), 1), *(spec or (FULL,)), staleness)
    merge.apply(state)
    state.version += 1
    return state.values["fc2.weight"][0].tolist()


def test_every_argument_reaches_its_part():
    algorithm = fadas(3, 0.1, 0.8, 0.9, 1e-3, "cap", 2)
    assert algorithm.trigger == Buffered(3)
    assert algorithm.merge == DelayAdaptive("adam", 0.1, 0.8, 0.9, 1e-3, by_samples=False, delay="cap", delay_limit=2)
    with pytest.raises(BadInput, match=r"delay is 'late'"):
        fadas(delay="late")
    with pytest.raises(BadInput, match=r"delay_limit is -1: give 0 or more"):
        fadas(delay_limit=-1)


def test_two_merges_by_hand():
    """beta 0.5 and 0.75: the corrections are 1/2 and 3/4 for m, 1/4 and 7/16 for v."""
    merge = DelayAdaptive(server_lr=0.1, beta1=0.5, beta2=0.75, tau=1.0, by_samples=False)
    state = line_state(hidden=1)
    # Delta = (1 + 3) / 2 = 2: m = 1, v = 1, v^ = 1; step 0.1 / (1/2) * 1 / (sqrt(1) / sqrt(1/4) + 1) = 0.2 / 3
    assert merged(merge, state, (1.0, 0), (3.0, 1)) == [pytest.approx(0.2 / 3)]
    # Delta = 0: m = 1/2, v = 3/4, v^ stays 1; latest 2 > 1 halves eta: 0.05 / (3/4) * (1/2) / (1 / sqrt(7/16) + 1)
    second = 0.05 / 0.75 * 0.5 / (1 / math.sqrt(7 / 16) + 1)
    assert merged(merge, state, (0.0, 2)) == [pytest.approx(0.2 / 3 + second)]


def test_without_delays_it_is_torchs_amsgrad():
    """Torch's Adam steps against a gradient, so it is given minus the delta; epsilon is added after both corrections."""
    merge, state = DelayAdaptive(server_lr=0.1, tau=1e-8, by_samples=False), line_state(hidden=1)
    theta = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.Adam([theta], lr=0.1, betas=(0.9, 0.99), eps=1e-8, amsgrad=True)
    for delta in (1.0, -3.0, 0.5, 0.01, 2.0):
        theta.grad = torch.tensor([-delta])
        optimizer.step()
        assert merged(merge, state, (delta, 0)) == [pytest.approx(theta.item(), rel=1e-5)]


def test_the_learning_rate_by_delay():
    rate = {
        name: [DelayAdaptive(server_lr=0.4, delay=name, delay_limit=1).learning_rate(late) for late in (0, 1, 2, 8)]
        for name in ("divide", "cap", "none")
    }
    assert rate == {"divide": [0.4, 0.4, 0.2, 0.05], "cap": [0.4, 0.4, 0.4, 0.125], "none": [0.4] * 4}


def test_what_no_update_covers_keeps_its_moments():
    merge, state = DelayAdaptive(server_lr=0.1, by_samples=False), line_state(hidden=2)
    first = merged(merge, state, (1.0, 0, Spec.select({"hidden": [0]})))
    assert first == [pytest.approx(0.1, rel=1e-2), 0.0]
    memory = state.memory.of(AmsgradMemory)
    assert [float(moment["fc2.weight"][0, 1]) for moment in (memory.m, memory.v, memory.peak)] == [0.0] * 3
