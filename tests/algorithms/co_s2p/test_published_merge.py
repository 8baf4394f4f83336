"""Co-S2P's published merge: one weight a client, absent elements as 0, absent inputs as -theta, by hand."""

from __future__ import annotations

import pytest
import torch

from raafl.algorithms import co_s2p
from raafl.algorithms.co_s2p.published_merge import PublishedMerge
from raafl.core.types import Update, Work
from raafl.errors import BadInput
from raafl.parts.merge.personal import record_work
from raafl.submodel import FULL, Spec
from tests.helpers.coordinators import filled, line_state

FIRST = Spec.select({"hidden": range(2)})


def receive(merge, state, client, value, spec=FULL):
    merge.receive(state, Update(0, client, 0, filled(state, value, spec), 1), spec, 0)


@pytest.mark.parametrize(("absent_inputs", "last"), [(False, 2 + 0.5 / 3), (True, 2 + 0.5 / 3 - 2 * 2 / 3)])
def test_two_clients_by_hand(absent_inputs, last):
    """T values in all, F in the first half. gamma is 0.5 T / 1 for client 1, 1 F / (F / T) = T for client 2: 1/3 and 2/3.

    Where both are: 2 + 0.5 / 3 + 2 / 3. Rows that client 2 lacks move by client 1's third alone; so do columns that it
    lacks, or, with the fault, by a further -2 * 2/3.
    """
    state, merge = line_state(value=2.0), PublishedMerge(absent_inputs)
    receive(merge, state, 1, 0.5)
    receive(merge, state, 2, 1.0, FIRST)
    merge.apply(state)
    both, rows = 2 + 0.5 / 3 + 2 / 3, 2 + 0.5 / 3
    torch.testing.assert_close(state.values["fc2.weight"], torch.tensor([[both, both, last, last]]))
    torch.testing.assert_close(state.values["fc1.weight"], torch.tensor([[both] * 2] * 2 + [[rows] * 2] * 2))
    torch.testing.assert_close(state.values["fc2.bias"], torch.tensor([both]))


def test_a_late_client_weighs_less_by_how_far_the_model_has_moved():
    """Client 2 started at 3 and the model is at 1: of F values that is a drift of 2 F."""
    state, merge = line_state(value=3.0), PublishedMerge(absent_inputs=False)
    record_work(state, 2, Work(FIRST))
    receive(merge, state, 1, -2.0)
    merge.apply(state)
    receive(merge, state, 1, 0.5)
    receive(merge, state, 2, 1.0, FIRST)
    merge.apply(state)
    first = sum(tensor.numel() for _, tensor in filled(state, 0.0, FIRST).items())
    late = 1 / (2 * first + 1)  # in units of T, as is client 1's 0.5
    assert state.values["fc2.bias"].item() == pytest.approx(1 + (0.5 * 0.5 + late) / (0.5 + late), rel=1e-6)


def test_updates_of_nothing_move_nothing():
    state, merge = line_state(value=0.1), PublishedMerge()
    receive(merge, state, 1, 0.0, FIRST)
    merge.apply(state)
    assert torch.equal(state.values["fc1.weight"], torch.full((4, 2), 0.1))


def test_it_is_a_setting_and_has_no_server_step():
    assert co_s2p(merge="published").merge.inner == PublishedMerge()
    with pytest.raises(BadInput, match=r"server_lr is 0\.5"):
        co_s2p(merge="published", server_lr=0.5)
