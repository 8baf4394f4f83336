"""FedNova: how much a client has done, and the server's mean, by hand."""

from __future__ import annotations

import pytest
import torch

from raafl.algorithms import fed_nova
from raafl.core.types import Update
from raafl.errors import BadInput
from raafl.submodel import FULL, FlatTensors
from tests.helpers.coordinators import assigned, coordinator_for, join, line_state
from tests.helpers.single_task import SkippingSlope, Slope, give, task_of, whole


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


class DampenedSlope(Slope):
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.5, dampening=0.75)


def test_dampening_counts_from_the_second_step():
    """The velocities are 1, 0.5 + 0.25 = 0.75, 0.375 + 0.25 = 0.625."""
    _, update = task_of(fed_nova(), DampenedSlope(), {"line.weight": whole(8.0)}, 3)
    assert update.extra == {"done": 2.375}


class WarmedUpSlope(Slope):
    """`Slope` whose learning rate rises from 0 to 1/2 during the task."""

    def configure_optimizers(self):
        optimizer, num = super().configure_optimizers(), self.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / num)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


@pytest.mark.parametrize(("steps", "rates"), [(2, 0 + 1 / 2), (4, 0 + 1 / 4 + 1 / 2 + 3 / 4)])
@pytest.mark.parametrize("lr_scale", [1.0, 0.5])
def test_work_is_counted_in_steps_at_the_rate_that_all_clients_share(steps, rates, lr_scale):
    """The weights a_i of the gradients are the rates over 1/2: 0, 1/2, or 0, 1/4, 1/2, 3/4; half of that at half of the rate.

    In units of the first step that moves, 1/2 and 1/4 of the rate, they would be 1 and 6: d_i would weigh half as much.
    """
    _, update = task_of(fed_nova(), WarmedUpSlope(), {"line.weight": whole(8.0)}, steps, lr_scale=lr_scale)
    assert update.extra == {"done": pytest.approx(rates * lr_scale)}


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


def test_a_client_that_skipped_all_batches_has_no_weight_and_is_not_refused():
    """d = 6 / 3, p = 1 and tau_eff = 3 of the client that has worked; a round in which none has leaves the model as it is."""
    _, update = task_of(fed_nova(), SkippingSlope(), {"line.weight": whole(8.0)}, 3)
    assert (update.extra, update.num_steps) == ({"done": 0.0}, 0)
    coordinator = coordinator_for(fed_nova(), line_state(hidden=2), min_clients=2, num_clients=2)
    tasks = assigned(join(coordinator, [1, 2]))
    for done in (3.0, 0.0):
        give(coordinator, tasks[1], 6.0 if done else 0.0, 1, {"done": done})
        tasks = give(coordinator, tasks[2], 0.0, 3, {"done": 0.0})
        assert coordinator.state.values["fc1.weight"].unique().tolist() == [6.0]
    assert (coordinator.state.version, coordinator.admission.refused) == (2, {})


@pytest.mark.parametrize("extra", [{}, {"done": 0.0}, {"done": "1"}, {"done": float("nan")}])
def test_what_is_no_amount_of_work_is_refused(extra):
    state = line_state(hidden=2)
    update = Update(1, 1, 0, FlatTensors.empty(state.submodels.layout()), 1, num_steps=2, extra=extra)
    assert fed_nova().merge.reject_reason(state, update, FULL, 0) == "bad-extra"


def test_a_negative_prox_is_refused():
    with pytest.raises(BadInput, match="prox is -1"):
        fed_nova(prox=-1)
