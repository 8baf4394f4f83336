"""HeLoCo's correction by hand, in two dimensions, and its outer step on a model whose tensors have one value each."""

from __future__ import annotations

import pytest
import torch

from raafl.algorithms import diloco
from raafl.algorithms.diloco.heloco import HeLoCo
from raafl.core.algorithm import Training
from raafl.errors import BadInput
from raafl.parts.merge.nesterov import NesterovMemory
from tests.helpers.coordinators import line_state, values_of
from tests.helpers.small_runs import equal_replay, experiment, finish
from tests.parts.merge.test_nesterov import TOP, push


@pytest.mark.parametrize(
    ("m", "expected"),
    [
        ((0.0, 0.0), (3.0, 4.0)),  # there is no momentum yet
        ((6.0, 8.0), (3.0, 4.0)),  # c = 1
        ((5.0, 0.0), (3.0, 4.0)),  # c = 0.6, above c_ok
        # c = -0.8, conf = 5 / 10, so 0.4 of the part 0.8 x 5 = 4 against m goes: 4 - 1.6
        ((0.0, -5.0), (3.0, 2.4)),
        # the momentum is three times as long: conf = 5 / 20, 0.2 of it goes
        ((0.0, -15.0), (3.0, 3.2)),
    ],
)
def test_a_delta_of_length_5_beside_a_momentum(m, expected):
    found = HeLoCo().corrected(torch.tensor([3.0, 4.0]), torch.tensor(m))
    assert found.tolist() == pytest.approx(expected)


def test_a_delta_at_a_right_angle_is_turned_and_keeps_its_length():
    """c = 0, conf = 1/2, l = 1/4: the direction of (3/4, 1/4)."""
    found = HeLoCo().corrected(torch.tensor([5.0, 0.0]), torch.tensor([0.0, 5.0]))
    assert found.tolist() == pytest.approx([5 * 3 / 10**0.5, 5 / 10**0.5])


def test_steps_by_hand():
    merge, state = HeLoCo(0.5, 0.5), line_state(value=1.0)
    # m = 4 / 2 = 2; 1 + 0.5 (4 + 0.5 x 2) = 3.5
    assert push(merge, state, (2.0,), (6.0,)) == [3.5]
    # c = -1, conf = 1/2: half of -2 stays; m = (2 - 1) / 2 = 0.5; 3.5 + 0.5 (-1 + 0.5 x 0.5) = 3.125
    assert push(merge, state, (-2.0,)) == pytest.approx([3.125])


def test_a_slice_moves_and_measures_only_what_it_covers():
    """A whole update first, so that there is momentum everywhere; then one of half of the units, against it."""
    merge, state = HeLoCo(0.5, 0.5), line_state(value=1.0)
    push(merge, state, (4.0,))
    before = values_of(state).clone()
    push(merge, state, (-2.0, TOP, 0, 1, 1))
    covered = state.submodels.plan(TOP).gather(state.values)
    assert torch.cat([one.flatten() for _, one in covered.items()]).unique().tolist() == pytest.approx([3.125])
    assert 3.5 in before.unique().tolist() and 3.5 in values_of(state).unique().tolist()  # what it does not cover
    assert sorted(state.memory.of(NesterovMemory).m["fc1.weight"].unique().tolist()) == pytest.approx([0.5, 2.0])


def test_an_asynchronous_run_replays_to_the_same_bits(tmp_path):
    def made():
        algorithm = diloco(0.4, trigger="each", steps="speed", least_steps=1, outer="heloco", staleness="polynomial")
        return experiment(tmp_path / "run", algorithm, train=Training(num_epochs=None, num_steps=8))

    run = finish(made())
    assert run.summary["updates_merged"] >= 12 and equal_replay(made(), run)


@pytest.mark.parametrize(
    ("fields", "named"),
    [({"outer_momentum": 0.0}, "outer_momentum is 0"), ({"trigger": "each", "delay": 3}, "delay is 3")],
)
def test_what_does_not_go_with_it_is_refused(fields, named):
    with pytest.raises(BadInput, match=named):
        diloco(outer="heloco", **fields)
