"""Outer steps by hand: eta 1/2, beta 1/2, deltas whose sums have exact binary fractions."""

from __future__ import annotations

import pytest
import torch

from raafl.core.types import Update
from raafl.errors import BadInput
from raafl.parts.merge.mean import Staleness
from raafl.parts.merge.nesterov import DelayedNesterov, Nesterov, NesterovMemory
from raafl.submodel import FULL, Spec
from tests.helpers.coordinators import filled, line_state, values_of

TOP, BOTTOM = Spec.select({"hidden": range(0, 2)}), Spec.select({"hidden": range(2, 4)})


def push(merge, state, *updates):
    """Merge (delta, spec, staleness, samples, steps) of one merge, and return the distinct values of the model."""
    for delta, *more in updates:
        spec, staleness, samples, steps = more or (FULL, 0, 1, 1)
        update = Update(1, 1, 0, filled(state, delta, spec), samples, steps)
        assert merge.reject_reason(state, update, spec, staleness) is None
        merge.receive(state, update, spec, staleness)
    merge.apply(state)
    return values_of(state).unique().tolist()


def test_two_rounds_by_hand():
    merge, state = Nesterov(0.5, 0.5), line_state(value=1.0)
    # Delta = (2 + 6) / 2 = 4; m = 4; 1 + 0.5 (4 + 2) = 4
    assert push(merge, state, (2.0,), (6.0,)) == [4.0]
    # Delta = -2; m = 2 - 2 = 0; 4 + 0.5 (-2 + 0) = 3
    assert push(merge, state, (-2.0,)) == [3.0]


def test_the_step_is_that_of_torch_sgd():
    weight = torch.nn.Parameter(torch.tensor([1.0]))
    outer = torch.optim.SGD([weight], lr=0.7, momentum=0.9, nesterov=True)
    merge, state = Nesterov(), line_state(value=1.0)
    for delta in (0.3, -0.2, 0.5):
        weight.grad = torch.tensor([-delta])
        outer.step()
        assert push(merge, state, (delta,)) == pytest.approx([weight.item()], rel=1e-6)


def test_weights_by_samples_and_by_tokens():
    # (1 * 2 + 3 * 6) / 4 = 5, by samples and by steps
    for weights, first, second in (("samples", (1, 9), (3, 2)), ("tokens", (9, 1), (2, 3))):
        merge = Nesterov(1.0, 0.0, weights)
        assert push(merge, line_state(), (2.0, FULL, 0, *first), (6.0, FULL, 0, *second)) == [5.0]


def test_an_update_without_steps_has_no_weight_by_tokens():
    state = line_state()
    update = Update(1, 1, 0, filled(state, 1.0), 5, 0)
    assert Nesterov(weights="tokens").reject_reason(state, update, FULL, 0) == "no-steps"
    assert Nesterov().reject_reason(state, update, FULL, 0) is None


def test_staleness_scales_a_delta():
    merge = Nesterov(1.0, 0.0, staleness=Staleness("polynomial", 1.0))
    assert push(merge, line_state(), (8.0, FULL, 3, 1, 1)) == [2.0]


def test_no_momentum_needs_no_memory():
    state = line_state()
    push(Nesterov(1.0, 0.0), state, (2.0,))
    assert state.memory.of(NesterovMemory).m is None


def test_what_no_update_covers_keeps_its_value_and_its_momentum():
    merge, state = Nesterov(0.5, 0.5), line_state(value=0.0)
    push(merge, state, (4.0,))  # m = 4, theta = 0.5 (4 + 2) = 3 everywhere
    push(merge, state, (2.0, TOP, 0, 1, 1))  # above: m = 2 + 2 = 4, theta = 3 + 0.5 (2 + 2) = 5
    assert state.values["fc1.weight"][:, 0].tolist() == [5.0, 5.0, 3.0, 3.0]
    push(merge, state, (1.0, BOTTOM, 0, 1, 1))  # below, with m = 4 still: m = 1 + 2 = 3, theta = 3 + 0.5 (1 + 1.5)
    assert state.values["fc1.weight"][:, 0].tolist() == [5.0, 5.0, 4.25, 4.25]


def test_delayed_steps_by_hand():
    merge, state = DelayedNesterov(0.5, 0.5, every=2), line_state(value=0.0)
    assert push(merge, state, (4.0,)) == [1.0]  # 0.5 * 4 / 2
    # 1 + 0.5 * 8 / 2 = 3; m = (4 + 8) / 2 = 6; 3 + 0.5 * 0.5 * 6 = 4.5
    assert push(merge, state, (8.0,)) == [4.5]
    assert push(merge, state, (-4.0,)) == [3.5]
    # 3.5 - 0.5 * 2 / 2 = 3; m = 0.5 * 6 - 3 = 0
    assert push(merge, state, (-2.0,)) == [3.0]


def test_n_pushes_from_one_start_end_where_one_round_does():
    deltas, one, other = (1.0, -3.0, 2.0, 8.0), line_state(), line_state()
    rounds, delayed = Nesterov(0.5, 0.5), DelayedNesterov(0.5, 0.5)
    other.num_clients = 4
    for _ in range(2):
        last = push(rounds, one, *((delta,) for delta in deltas))
        for delta in deltas:
            pushed = push(delayed, other, (delta,))
        assert pushed == last


def test_every_push_with_momentum_is_the_naive_form():
    one, other = line_state(), line_state()
    for delta in (0.5, -1.25, 3.0):
        assert push(Nesterov(0.5, 0.5), one, (delta,)) == push(DelayedNesterov(0.5, 0.5, every=1), other, (delta,))


def test_an_element_that_few_hold_moves_as_far_as_one_that_all_hold():
    """N = 2: the upper units come from every second update, the lower ones from the others; shared ones from both."""
    merge, state = DelayedNesterov(1.0, 0.0, every=2), line_state()
    push(merge, state, (4.0, TOP, 0, 1, 1))  # as if one more held it: 4 / 2
    assert state.values["fc1.weight"][:, 0].tolist() == [2.0, 2.0, 0.0, 0.0]
    push(merge, state, (6.0, BOTTOM, 0, 1, 1))  # of the last two updates one covers the lower units
    assert state.values["fc1.weight"][:, 0].tolist() == [2.0, 2.0, 6.0, 6.0]
    assert state.values["fc2.bias"].tolist() == [5.0]  # 4 / 2 + 6 / 2
    push(merge, state, (4.0, TOP, 0, 1, 1))
    assert state.values["fc1.weight"][:, 0].tolist() == [6.0, 6.0, 6.0, 6.0]


def test_delayed_momentum_moves_only_what_was_covered():
    merge, state = DelayedNesterov(1.0, 0.5, every=1), line_state()
    push(merge, state, (4.0,))  # m = 4; 4 + 0.5 * 4
    push(merge, state, (2.0, TOP, 0, 1, 1))  # above: 6 + 2 = 8; m = 2 + 2 = 4; 8 + 2
    assert state.values["fc1.weight"][:, 0].tolist() == [10.0, 10.0, 6.0, 6.0]


@pytest.mark.parametrize("fields", [{"lr": 0.0}, {"beta": 1.0}, {"weights": "tokenz"}])
def test_bad_settings_are_refused(fields):
    with pytest.raises(BadInput):
        Nesterov(**fields)
