"""FedNova: how much a client has done, and the server's mean, by hand."""

from __future__ import annotations

import pytest

from raafl.algorithms import fed_nova
from raafl.errors import BadInput
from tests.helpers.coordinators import assigned, coordinator_for, join, line_state
from tests.helpers.single_task import Slope, give, task_of, whole


@pytest.mark.parametrize(
    "momentum, prox, steps, done",
    [
        (0.0, 0.0, 3, 3.0),  # tau
        (0.5, 0.0, 2, 2.5),  # (2 - 0.5 (1 - 0.25) / 0.5) / 0.5
        (0.0, 1.0, 2, 1.5),  # (1 - (1 - 0.5)^2) / 0.5
    ],
)
def test_how_much_a_client_has_done(momentum, prox, steps, done):
    _, update = task_of(fed_nova(prox=prox), Slope(momentum), {"line.weight": whole(8.0)}, steps)
    assert update.extra == {"done": done}


def test_a_round_of_the_server():
    """d = 6 / 3 and 2 / 1, p = 1/4 and 3/4, tau_eff = 3/4 + 3/4 = 1.5: 1.5 (2 / 4 + 2 * 3 / 4) = 3. FedAvg would come to 3, too:

    so once more, with d = 6 / 1 and 2 / 3: tau_eff = 1/4 + 9/4 = 2.5, 2.5 (6 / 4 + 2 / 3 * 3 / 4) = 5, where FedAvg adds 3.
    """
    coordinator = coordinator_for(fed_nova(), line_state(hidden=2), min_clients=2, num_clients=2)
    tasks = assigned(join(coordinator, [1, 2]))
    for first, second, theta in ((3.0, 1.0, 3.0), (1.0, 3.0, 8.0)):
        give(coordinator, tasks[1], 6.0, 1, {"done": first})
        tasks = give(coordinator, tasks[2], 2.0, 3, {"done": second})
        assert coordinator.state.values["fc1.weight"].unique().tolist() == pytest.approx([theta])


def test_one_client_that_claims_to_have_done_very_much_does_not_carry_the_others_away():
    """d = 2, 2 and 0, p = 1/3 each; of 1, 1 and 10^8 the last counts as 100: tau_eff = 34, 34 (2 + 2 + 0) / 3."""
    coordinator = coordinator_for(fed_nova(), line_state(hidden=2), min_clients=3, num_clients=3)
    tasks = assigned(join(coordinator, [1, 2, 3]))
    for client, delta, done in ((1, 2.0, 1.0), (2, 2.0, 1.0), (3, 0.0, 1e8)):
        give(coordinator, tasks[client], delta, 1, {"done": done})
    assert coordinator.state.values["fc1.weight"].unique().tolist() == pytest.approx([34 * 4 / 3])


@pytest.mark.parametrize("extra", [{}, {"done": 0.0}, {"done": "1"}, {"done": float("nan")}])
def test_what_is_no_amount_of_work_is_refused(extra):
    coordinator = coordinator_for(fed_nova(), line_state(hidden=2))
    (task,) = assigned(join(coordinator, [1])).values()
    give(coordinator, task, 6.0, extra=extra)
    assert coordinator.admission.refused == {"bad-extra": 1}


def test_a_negative_prox_is_refused():
    with pytest.raises(BadInput, match="prox is -1"):
        fed_nova(prox=-1)
