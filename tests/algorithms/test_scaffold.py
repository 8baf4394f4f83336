"""SCAFFOLD: steps and variates by hand, on a line; what is kept for a client, what it is sent, and what that weighs."""

from __future__ import annotations

import pytest
import torch

from raafl.algorithms import scaffold
from raafl.compression.plan import Compress, CompressionPlan
from raafl.compression.streams import DownlinkCodec, UplinkCodec
from raafl.core import restoring, saving
from raafl.core.snapshots import Snapshots
from raafl.core.types import Arrived, Update
from raafl.errors import BadInput
from raafl.parts.merge.variates import _VariatesMemory
from raafl.parts.select.rate_select import RateSelect
from raafl.rules import CURRENT, Rules
from raafl.submodel import FULL, FlatTensors, Spec
from tests.compression.ends import task
from tests.helpers.coordinators import assigned, coordinator_for, filled, join, line_state
from tests.helpers.merges import merge_all, take
from tests.helpers.single_task import SkippingSlope, Slope, give, task_of, whole
from tests.helpers.small_runs import experiment, finish

PART = Spec.select({"hidden": [1]})


def steps(option):
    """What goes up after two steps from w = 8, c = 1 and c_i = 1/2, for y = 4 and with eta 1/2."""
    sent = {"line.weight": whole(8.0), "c/line.weight": whole(1.0), "c_i/line.weight": whole(0.5)}
    up, _ = task_of(scaffold(option), Slope(), sent, 2)
    return up["line.weight"].item(), up["c_i/line.weight"].item()


def test_two_steps_with_option_two():
    """c - c_i = 1/2. g = 8 - 4 = 4, w = 8 - 4.5 / 2 = 5.75; g = 1.75, w = 5.75 - 2.25 / 2 = 4.625; mean g = 2.875.

    By eq. 4: c_i - c + (x - y) / (K eta) = -0.5 + 3.375 / (2 * 0.5) = 2.875, too. What travels is less c_i = 0.5.
    """
    assert steps(2) == (4.625 - 8.0, 2.875 - 0.5)


@pytest.mark.parametrize("option", [1, 2])
def test_a_client_that_made_no_step_keeps_its_variate(option):
    sent = {"line.weight": whole(8.0), "c/line.weight": whole(1.0), "c_i/line.weight": whole(0.5)}
    up, _ = task_of(scaffold(option), SkippingSlope(), sent, 2)
    assert (up["line.weight"].item(), up["c_i/line.weight"].item()) == (0.0, 0.0)


class Tilted(Slope):
    """A loss of 3 w, so that the gradient is 3 everywhere, with momentum."""

    def training_step(self, batch, index):
        return 3 * self.line.weight.sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.9)


def test_with_momentum_a_task_ends_where_a_correction_behind_the_momentum_ends():
    """Flower's niid_bench adds eta (c - c_i) to the parameters behind each step, with variates (x - y) / (K eta) of eq. 4.

    With a gradient of 3 such a variate is 3 A / K, A = sum over steps t and s <= t of 0.9^(t - s), where raafl's is 3.
    """
    steps, c, own = 6, 1.0, 3.0
    reach = sum(0.9 ** (t - s) for t in range(steps) for s in range(t + 1))
    sent = {"line.weight": whole(8.0), "c/line.weight": whole(c), "c_i/line.weight": whole(own)}
    up, _ = task_of(scaffold(), Tilted(), sent, steps)
    w, velocity = 8.0, 0.0
    for _ in range(steps):
        velocity = 0.9 * velocity + 3
        w += -0.5 * velocity - 0.5 * (c - own) * reach / steps
    assert up["line.weight"].item() == pytest.approx(w - 8.0)
    assert up["c_i/line.weight"].item() == pytest.approx(3 - own)


class StillInHalf(Slope):
    """w stays 8 at a learning rate of 0, and its gradient 4."""

    def __init__(self):
        super().__init__()
        self.to(torch.bfloat16)

    def training_step(self, batch, index):
        x, y = (value.to(torch.bfloat16) for value in batch)
        return super().training_step((x, y), index)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


def test_the_mean_of_many_half_precision_gradients_is_taken_in_single_precision():
    """In bfloat16 a sum of fours would stay at 1024 = 4 * 256, so that 600 of them had the mean 1.7."""
    values = {"line.weight": 8.0, "c/line.weight": 0.0, "c_i/line.weight": 0.0}
    sent = {name: torch.full((1, 1), value, dtype=torch.bfloat16) for name, value in values.items()}
    up, _ = task_of(scaffold(), StillInHalf(), sent, 600)
    assert up["c_i/line.weight"].item() == 4.0


def test_two_steps_with_option_one():
    """The same steps; the gradient at x is 4."""
    assert steps(1) == (4.625 - 8.0, 4.0 - 0.5)


def sent(coordinator, assignment):
    """What the client is sent: the first unit's weight of the model, c and c_i; then the second's."""
    flat = Snapshots(coordinator).cut(assignment)
    values, bundles = coordinator.payload.split(flat, assignment.spec, "sent")
    return [flat["fc2.weight"][0].tolist() for flat in (values, bundles["c"], bundles["c_i"])]


def test_the_server_by_hand():
    """N = 4, two clients a round, eta_g = 1/2: x + (2 + 4) / 2 / 2, c + (8 + 4) / 4; c_i of the two that took part."""
    coordinator = coordinator_for(scaffold(cohort=2, server_lr=0.5), line_state(hidden=2), min_clients=4, num_clients=4)
    first = assigned(join(coordinator, range(1, 5)))
    one, two = first.values()
    assert sent(coordinator, one) == [[0, 0]] * 3
    give(coordinator, one, 2.0, c_i=8.0)
    after = give(coordinator, two, 4.0, c_i=4.0)
    assert sent(coordinator, one) == [[1.5, 1.5], [3, 3], [8, 8]]
    assert sent(coordinator, two) == [[1.5, 1.5], [3, 3], [4, 4]]
    assert len(after) == 2
    again = coordinator_for(scaffold(cohort=2, server_lr=0.5), line_state(hidden=2), min_clients=4, num_clients=4)
    again.state.values.copy_(coordinator.state.values)
    restoring.restore(again, saving.save(coordinator))
    assert sent(again, two) == [[1.5, 1.5], [3, 3], [4, 4]]


def test_by_samples_both_means_are_weighted_and_silent_clients_count_as_the_others():
    """N = 3, clients 1 and 2 with 30 and 10 samples: x + (30 * 2 + 10 * 6) / 40, c + (30 * 8 + 10 * 4) / (30 + 10 + 20)."""
    algorithm = scaffold(cohort=2, by_samples=True)
    coordinator = coordinator_for(algorithm, line_state(hidden=2), num_clients=3)
    merge, state = algorithm.merge, coordinator.state
    for client, num_samples, delta, change in ((1, 30, 2.0, 8.0), (2, 10, 6.0, 4.0)):
        bundles = {"c_i": filled(state, change)}
        take(merge, state, Update(0, client, 0, filled(state, delta), num_samples, bundles=bundles), FULL, 0)
    merge_all(merge, state)
    bundles = {name: filled(state, 9.0) for name in ("c", "c_i")}
    merge.personalize(state, 2, FULL, filled(state, 0.0), bundles)
    assert state.values["fc2.weight"][0].tolist() == [3.0, 3.0]
    assert bundles["c"]["fc2.weight"][0].tolist() == pytest.approx([280 / 60] * 2)
    assert bundles["c_i"]["fc2.weight"][0].tolist() == [4.0, 4.0]
    again = coordinator_for(algorithm, line_state(hidden=2), num_clients=3)
    restoring.restore(again, saving.save(coordinator))
    update = Update(0, 2, 0, filled(again.state, 0.0), 20, bundles={"c_i": filled(again.state, 4.0)})
    take(merge, again.state, update, FULL, 0)  # weighs 10 in c, as before
    merge_all(merge, again.state)
    merge.personalize(again.state, 1, FULL, filled(again.state, 0.0), bundles)
    assert bundles["c"]["fc2.weight"][0].tolist() == pytest.approx([320 / 60] * 2)


def test_a_checkpoint_without_weights_goes_on():
    """Its clients had the weight 1, and keep it: c is 8 / 2, and after an update with 30 samples (8 + 4) / 2."""
    algorithm = scaffold(by_samples=True)
    coordinator = coordinator_for(algorithm, line_state(hidden=2), num_clients=2)
    merge, state = algorithm.merge, coordinator.state
    found = []
    for change, num_samples in ((8.0, 1), (4.0, 30)):
        update = Update(0, 1, 0, filled(state, 0.0), num_samples, bundles={"c_i": filled(state, change)})
        take(merge, state, update, FULL, 0)
        merge_all(merge, state)
        state.memory.of(_VariatesMemory, key="variates c_i").weights.clear()
        bundles = {name: filled(state, 9.0) for name in ("c", "c_i")}
        merge.personalize(state, 1, FULL, filled(state, 0.0), bundles)
        found.append(bundles["c"]["fc2.weight"][0].tolist())
    assert found == [[4.0, 4.0], [6.0, 6.0]]


def test_c_stands_still_within_a_round():
    coordinator = coordinator_for(scaffold(concurrency=1), line_state(hidden=2), min_clients=2, num_clients=2)
    (first,) = assigned(join(coordinator, [1, 2])).values()
    (second,) = give(coordinator, first, 1.0, c_i=8.0).values()
    assert sent(coordinator, second) == [[0, 0]] * 3


def test_of_submodels_c_is_a_mean_over_those_that_hold_an_element():
    """Client 1 trains all, client 2 the second unit alone: c is 4 / 1 at the first and (4 + 2) / 2 at the second."""
    algorithm = scaffold(submodel=RateSelect(rates=[1.0]))
    coordinator = coordinator_for(algorithm, line_state(hidden=2), num_clients=2)
    merge, state = algorithm.merge, coordinator.state
    for client, spec, change in ((1, FULL, 4.0), (2, PART, 2.0), (2, PART, 0.0)):
        update = Update(0, client, 0, filled(state, 0.0, spec), 1, bundles={"c_i": filled(state, change, spec)})
        take(merge, state, update, spec, 0)
    merge_all(merge, state)
    part, bundles = filled(state, 0.0, PART), {name: filled(state, 9.0, PART) for name in ("c", "c_i")}
    merge.personalize(state, 2, PART, part, bundles)
    assert (bundles["c"]["fc2.weight"].item(), bundles["c_i"]["fc2.weight"].item()) == (3.0, 2.0)


def test_what_is_not_an_option_is_refused():
    with pytest.raises(BadInput, match="option is 3"):
        scaffold(3)


def test_an_update_without_its_variate_has_the_wrong_layout():
    coordinator = coordinator_for(scaffold(), line_state(hidden=2))
    (task,) = assigned(join(coordinator, [1])).values()
    update = Update(task.id, 1, 0, filled(coordinator.state, 1.0), 1)
    coordinator.handle(Arrived(update), 0.0)
    assert coordinator.admission.refused == {"wrong-layout": 1}


@pytest.mark.parametrize("compress", [Compress(), Compress(down="int8", up="top_k")], ids=["plain", "compressed"])
def test_variates_are_compressed_and_counted_as_the_model_is(tmp_path, compress):
    run = finish(
        experiment(tmp_path / "run", scaffold(submodel=RateSelect(rates=[1.0])), compress=compress, max_updates=8)
    )
    model = 4 * (64 * 24 + 24 + 24 * 10 + 10)
    for row in run.rows():
        down, up = int(row["bytes_down"]) / model, int(row["bytes_up"]) / model
        assert (down, up) == (3, 2) if compress == Compress() else (0.75 < down < 1 and up < 0.5)


@pytest.mark.parametrize(("revision", "second"), [(6, 2.0), (CURRENT, 1.0)])
def test_what_top_k_leaves_out_of_a_variate_is_sent_once(revision, second):
    """One element travels, of g - c_i for g = (2, 1): c_i = (2, 0), then (2, 1).

    By earlier rules the second task adds the 1 that the first has left out to the 1 of g - c_i: c_i = (2, 2).
    """
    submodels = line_state(hidden=2).submodels
    submodels.rules = Rules(revision)
    plan = CompressionPlan.of(submodels, Compress(up="top_k", top_k=1e-9), "delta", scaffold().local)
    client, server, stored = UplinkCodec(plan), UplinkCodec(plan), torch.zeros(2)
    for number in (1, 2):
        update = FlatTensors.zeros(plan.payload.layout(way="trained"))
        update["c_i/fc2.weight"][0] = torch.tensor([2.0, 1.0]) - stored
        wire = client.pack(task(number), update, update)
        stored += server.unpack(task(number), wire, None)["c_i/fc2.weight"][0]
    assert stored.tolist() == [2.0, second]


@pytest.mark.parametrize(("revision", "first", "second"), [(6, 0.0, 4.0), (CURRENT, 2.0, 2.0)])
def test_a_variate_that_top_k_sends_down_is_the_one_to_which_its_change_is_added(revision, first, second):
    """The server has c_i = 2, the gradient is 2; the client, which has 0, is sent the largest element, of the model.

    By earlier rules it goes on from c_i = 0 and sends 2 - 0, which the server adds to its 2.
    """
    submodels = line_state(hidden=2).submodels
    submodels.rules = Rules(revision)
    plan = CompressionPlan.of(submodels, Compress(down="top_k", top_k=1e-9), "delta", scaffold().local)
    server, client = DownlinkCodec(plan), DownlinkCodec(plan)
    sent = FlatTensors.zeros(plan.payload.layout())
    for number in (1, 2):  # the first task brings all values
        wire = server.pack(task(number), sent)
        received = client.unpack(task(number), wire)["c_i/fc2.bias"].item()
        server.unpack(task(number), wire)
        if number == 1:
            sent["fc2.bias"].fill_(9.0)
            sent["c_i/fc2.bias"].fill_(2.0)
    assert (received, 2.0 + (2.0 - received)) == (first, second)
