"""CA2FL: three merges by hand, and what it must equal."""

from __future__ import annotations

import pytest

from raafl.algorithms import ca2fl, fed_buff
from raafl.core.algorithm import Local
from raafl.core.types import Update
from raafl.errors import BadInput
from raafl.parts.merge.remembered import Remembered
from raafl.parts.trigger import Buffered
from raafl.submodel import FULL, Spec
from tests.helpers.coordinators import filled, line_state
from tests.helpers.merges import merge_all, take
from tests.helpers.small_runs import experiment, finish

FIRST = Spec.select({"hidden": [0]})


def merged(merge, state, *updates):
    """Merge deltas (client, value, spec), and return the two hidden units' output weights."""
    for client, value, *spec in updates:
        take(merge, state, Update(0, client, 0, filled(state, value, *spec), 1), *(spec or (FULL,)), 0)
    merge_all(merge, state)
    state.version += 1
    return state.values["fc2.weight"][0].tolist()


def state_of(num_clients):
    state = line_state(hidden=2)
    state.num_clients = num_clients
    return state


def test_every_argument_reaches_its_part():
    algorithm = ca2fl(buffer_size=3, server_lr=0.5, memory="disk", memory_folder="/x")
    assert algorithm.local == Local()
    assert algorithm.trigger == Buffered(3)
    assert algorithm.merge == Remembered(0.5, folder="/x", of_all=True)
    with pytest.raises(BadInput, match=r"server_lr is 2"):
        ca2fl(server_lr=2.0)
    with pytest.raises(BadInput, match=r"memory_folder is '?/x'?, but there are no files if memory is ram"):
        ca2fl(memory_folder="/x")


def test_three_merges_by_hand():
    """Four clients, K = 2; h is the mean over all four, of which one never reports."""
    merge, state = Remembered(of_all=True), state_of(4)
    # h = 0, Delta = (4 - 0) + (2 - 0): v = 0 + 6 / 2 = 3; then h = (4 + 2) / 4 = 1.5
    assert merged(merge, state, (1, 4.0), (2, 2.0)) == [3.0, 3.0]
    # Delta = (8 - 4) + (6 - 0): v = 1.5 + 10 / 2 = 6.5; then h = (8 + 2 + 6) / 4 = 4
    assert merged(merge, state, (1, 8.0), (3, 6.0)) == [9.5, 9.5]
    # client 1 twice: Delta = (2 - 8) + (4 - 2): v = 4 - 4 / 2 = 2
    assert merged(merge, state, (1, 2.0), (1, 4.0)) == [11.5, 11.5]


def test_the_server_step_scales_v():
    merge, state = Remembered(0.5, of_all=True), state_of(2)
    assert merged(merge, state, (1, 4.0)) == [2.0, 2.0]
    # h = 4 / 2, Delta = 2 - 0: v = 2 + 2 = 4
    assert merged(merge, state, (2, 2.0)) == [4.0, 4.0]


def test_an_element_that_no_update_of_the_buffer_covers_moves_by_h():
    merge, state = Remembered(of_all=True), state_of(2)
    # first unit: (4 + 2) / 2; second: client 1 alone
    assert merged(merge, state, (1, 4.0), (2, 2.0, FIRST)) == [3.0, 4.0]
    # h = (4 + 2) / 2 | (4 + 0) / 2. First: 3 + (6 - 2) / 1; second, by nobody: 2
    assert merged(merge, state, (2, 6.0, FIRST)) == [3.0 + 7.0, 4.0 + 2.0]


def test_its_first_merge_is_fed_buffs(tmp_path):
    """h is 0 until then; FedBuff's constant staleness weighs the buffer alike."""
    more = {"max_updates": 3}
    one = finish(experiment(tmp_path / "one", ca2fl(buffer_size=3), **more))
    other = finish(experiment(tmp_path / "other", fed_buff(buffer_size=3, staleness="constant"), **more))
    for key, value in one.summary["final"].items():
        assert value == pytest.approx(other.summary["final"][key], rel=1e-5)
