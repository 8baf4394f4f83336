"""FedPer and LG-FedAvg: what is shared, and what each client gets back as its own, by hand."""

from __future__ import annotations

import pytest

from raafl.algorithms import fed_per
from raafl.core.snapshots import Snapshots
from raafl.errors import BadInput
from tests.helpers.coordinators import assigned, coordinator_for, join, line_state
from tests.helpers.single_task import give


def layers(flat):
    return flat["fc1.weight"][0, 0].item(), flat["fc2.weight"][0, 0].item(), flat["fc2.bias"].item()


@pytest.mark.parametrize(
    "algorithm, theirs, new",
    [
        (fed_per(cohort=2), ((3.0, 2.0, 2.0), (3.0, 4.0, 4.0)), (3.0, 1.0, 1.0)),
        (fed_per("body", cohort=2), ((2.0, 3.0, 3.0), (4.0, 3.0, 3.0)), (1.0, 3.0, 3.0)),
        (fed_per(layers=["fc2.bias"], cohort=2), ((3.0, 3.0, 2.0), (3.0, 3.0, 4.0)), (3.0, 3.0, 1.0)),
    ],
    ids=["head", "body", "by name"],
)
def test_after_a_round_of_two_that_come_from_1_to_2_and_4(algorithm, theirs, new):
    coordinator = coordinator_for(algorithm, line_state(2, 1.0), min_clients=3, num_clients=3)
    tasks = list(assigned(join(coordinator, [1, 2, 3])).values())
    for task, value in zip(tasks, (2.0, 4.0), strict=True):
        give(coordinator, task, value)
    assert tuple(layers(Snapshots(coordinator).cut(task)) for task in tasks) == theirs
    assert layers(coordinator.state.values) == new  # what a client that is new begins with


def test_paths_that_are_not_there_and_nothing_shared_are_said():
    state = line_state()
    assert "did you mean" in fed_per(layers=["fc1.weigth"]).merge.check(state)[0]
    assert "no layer is shared" in fed_per(layers=["fc1", "fc2"]).merge.notes(state, 2)[0]
    with pytest.raises(BadInput, match="local is 'tail'"):
        fed_per("tail")
