"""FedDyn: a client's steps and the server's by hand."""

from __future__ import annotations

import pytest

from raafl.algorithms import fed_dyn
from raafl.core.snapshots import Snapshots
from raafl.errors import BadInput
from raafl.submodel import Spec
from tests.helpers.coordinators import assigned, coordinator_for, join, line_state
from tests.helpers.merges import merge_all, take
from tests.helpers.single_task import Slope, give, task_of, whole


def test_two_steps_of_a_client():
    """alpha 1/2, g_k = 1. Gradient 4 - 1 + 0 = 3, w = 6.5; 2.5 - 1 - 1.5 / 2 = 0.75, w = 6.125."""
    up, _ = task_of(fed_dyn(0.5), Slope(), {"line.weight": whole(8.0), "g_k/line.weight": whole(1.0)}, steps=2)
    assert up["line.weight"].item() == 6.125


def test_a_round_of_the_server():
    """Two of four clients come to 2 and 4 from 0: g = -1 and -2, h = -3 / 4, theta = 3 + 0.75 / 0.5 = 4.5."""
    coordinator = coordinator_for(fed_dyn(0.5, cohort=2), line_state(hidden=2), min_clients=4, num_clients=4)
    tasks = list(assigned(join(coordinator, range(1, 5))).values())
    for task, value in zip(tasks, (2.0, 4.0), strict=True):
        give(coordinator, task, value)
    assert coordinator.state.values["fc1.weight"].unique().tolist() == [4.5]
    for task, own in zip(tasks, (-1.0, -2.0), strict=True):
        _, bundles = coordinator.payload.split(Snapshots(coordinator).cut(task), task.spec, "sent")
        assert bundles["g_k"]["fc2.bias"].tolist() == [own]


def test_what_no_client_of_the_round_covers_stays():
    merge, state = fed_dyn(0.5).merge, line_state(hidden=2)
    coordinator = coordinator_for(fed_dyn(0.5), state)
    (task,) = assigned(join(coordinator, [1])).values()
    give(coordinator, task, 2.0)  # g = -1 everywhere, theta = 2 + 1 / 0.5 = 4
    assert state.values["fc2.weight"].tolist() == [[4.0, 4.0]]
    from raafl.core.types import Update
    from tests.helpers.coordinators import filled

    part = Spec.select({"hidden": [1]})
    take(merge, state, Update(0, 1, 0, filled(state, 4.0, part), 1), part, 0)  # it has not moved: g and h stay
    merge_all(merge, state)
    assert state.values["fc2.weight"].tolist() == [[4.0, 4.0 + 2.0]]


def test_a_negative_alpha_is_refused():
    with pytest.raises(BadInput, match="alpha is -1"):
        fed_dyn(-1)
