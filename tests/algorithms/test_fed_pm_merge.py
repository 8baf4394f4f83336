"""FedPM on the server: Beta counts of masks, what they cost, and whole runs."""

from __future__ import annotations

import math
import re

import pytest
import torch
from torch import nn

from model_zoo import MLP, ResNet
from raafl.algorithms import fed_pm
from raafl.algorithms.fed_pm import masks as masks
from raafl.algorithms.fed_pm.masks import BayesianMasks, ProbabilisticMaskTraining
from raafl.core.algorithm import Task, Training
from raafl.core.state import GlobalState
from raafl.core.types import Arrived, Update
from raafl.data import Digits
from raafl.errors import BadInput
from raafl.parts.select.rate_select import RateSelect
from raafl.submodel import Spec, Submodels
from tests.algorithms.fed_pm_line import assignment, ones, prepared_state
from tests.helpers.coordinators import assigned, coordinator_for, join
from tests.helpers.small_runs import experiment, finish


def masks_of(state, first, second, spec=None):
    """An update: of fc1 the rows as given, of fc2 one for each hidden unit."""
    tensors = ones(state, spec)
    tensors["fc1.weight"].copy_(torch.tensor(first).unsqueeze(1).expand(-1, 2))
    tensors["fc2.weight"].copy_(torch.tensor(second).unsqueeze(0))
    return tensors


def merge(state, part, *updates):
    for spec, tensors in updates:
        part.receive(state, Update(1, 1, 0, tensors, 1), spec, 0)
    part.apply(state)


def probabilities(state):
    fc1, fc2 = state.values["fc1.weight"], state.values["fc2.weight"]
    assert torch.equal(fc1[:, 0].abs(), fc1[:, 1].abs())
    return fc1[:, 0].abs(), fc2[0].abs() / math.sqrt(0.5)


def test_three_clients_by_hand_and_signs_stay():
    state = prepared_state()
    before = state.values.clone()
    updates = [
        (Spec(), masks_of(state, [1.0, 1, 0, 0], [1.0, 0, 0, 0])),
        (Spec(), masks_of(state, [1.0, 1, 1, 0], [1.0, 0, 0, 0])),
        (Spec(), masks_of(state, [1.0, 0, 0, 0], [1.0, 0, 1, 0])),
    ]
    merge(state, BayesianMasks(), *updates)
    fc1, fc2 = probabilities(state)
    torch.testing.assert_close(fc1, torch.tensor([0.99, 2 / 3, 1 / 3, 0.01]))  # never 0 or 1
    torch.testing.assert_close(fc2, torch.tensor([0.99, 0.01, 1 / 3, 0.01]))
    for name in ("fc1.weight", "fc2.weight"):
        assert torch.equal(torch.signbit(state.values[name]), torch.signbit(before[name]))
    assert torch.equal(state.values["fc2.bias"], before["fc2.bias"])
    assert BayesianMasks().report(state)["masks"]["weights"] == 12
    kept = (2 * (0.99 + 1 + 0.01) + 0.99 + 0.02 + 1 / 3) / 12
    assert BayesianMasks().report(state)["masks"]["kept"] == pytest.approx(kept)


def test_a_prior_draws_towards_one_half():
    # lambda_0 = 3: alpha = 3 + 2, beta = 3 + 0, mode (5 - 1) / (8 - 2)
    state = prepared_state()
    update = (Spec(), masks_of(state, [1.0, 1, 0, 0], [1.0, 1, 0, 0]))
    merge(state, BayesianMasks(prior=3.0), update, update)
    torch.testing.assert_close(probabilities(state)[0], torch.tensor([4, 4, 2, 2]) / 6)


def test_counts_add_up_until_they_are_reset():
    state, part = prepared_state(), BayesianMasks(reset=2)
    yes, no = masks_of(state, [1.0, 1, 0, 0], [1.0, 0, 0, 0]), masks_of(state, [1.0, 0, 0, 0], [1.0, 0, 0, 0])
    merge(state, part, (Spec(), yes), (Spec(), no))
    torch.testing.assert_close(probabilities(state)[0], torch.tensor([0.99, 1 / 2, 0.01, 0.01]))
    merge(state, part, (Spec(), no))  # two rounds: 1 of 3
    torch.testing.assert_close(probabilities(state)[0], torch.tensor([0.99, 1 / 3, 0.01, 0.01]))
    merge(state, part, (Spec(), yes))  # anew
    torch.testing.assert_close(probabilities(state)[0], torch.tensor([0.99, 0.99, 0.01, 0.01]))


def test_what_no_client_has_keeps_its_probability_bit_for_bit():
    state, part = prepared_state(), BayesianMasks(prior=2.0)
    spec = Spec.select({"hidden": [1, 3]})
    before = state.values.clone()
    merge(state, part, (spec, masks_of(state, [1.0, 0], [0.0, 1], spec)))
    for row in (0, 2):
        assert torch.equal(state.values["fc1.weight"][row], before["fc1.weight"][row])
        assert torch.equal(state.values["fc2.weight"][:, row], before["fc2.weight"][:, row])
    torch.testing.assert_close(probabilities(state)[0][[1, 3]], torch.tensor([2 / 3, 1 / 3]))


def test_a_submodels_sigma_is_the_whole_models():
    state = prepared_state()
    spec = Spec.select({"hidden": [1, 3]})
    small = state.submodels.shrink(spec)
    small.present.copy_(state.submodels.plan(spec, "present").gather(state.values))
    expected = small.module.fc2.weight.clone()
    task = Task(
        assignment(spec),
        state.submodels,
        small.module,
        torch.optim.SGD(small.module.parameters(), 0.1),
        small.present.clone(),
        1,
        torch.Generator(),
        loss=small.module.training_step,
        backward=lambda x: None,
        update=lambda: None,
    )
    hook = ProbabilisticMaskTraining().hook(task)
    torch.testing.assert_close(small.module.fc2.weight.data, torch.zeros(1, 2))  # p is 1/2, not another share
    hook.finish()
    kept = small.trained["fc2.weight"]
    assert torch.equal(small.module.fc2.weight, 2 * expected * kept)


def test_running_statistics_are_averaged():
    torch.manual_seed(0)
    module = ProbabilisticMaskTraining().prepare(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)))
    submodels = Submodels(module)
    state, part = GlobalState(submodels, submodels.state(module)), BayesianMasks(prior=2.0, reset=5)
    for mean in (1.0, 4.0):
        tensors = ones(state)
        tensors["1.running_mean"].fill_(mean)
        part.receive(state, Update(1, 1, 0, tensors, 1), Spec(), 0)
    part.apply(state)
    assert state.values["1.running_mean"].tolist() == [2.5] * 3
    tensors = ones(state)
    tensors["1.running_mean"].fill_(7.0)
    merge(state, part, (Spec(), tensors))
    assert state.values["1.running_mean"].tolist() == [7.0] * 3  # of this merge alone


@pytest.mark.parametrize("value", [0.5, -1.0, 2.0, math.nan])
def test_anything_but_a_mask_is_refused(value):
    state = prepared_state()
    tensors = ones(state)
    assert BayesianMasks().reject_reason(state, Update(1, 1, 0, tensors, 1), Spec(), 0) is None
    tensors["fc2.weight"][0, 2] = value
    assert BayesianMasks().reject_reason(state, Update(1, 1, 0, tensors, 1), Spec(), 0) == "not-a-mask"


def test_a_round_through_the_coordinator():
    coordinator = coordinator_for(fed_pm(), prepared_state(), min_clients=2)
    tasks = assigned(join(coordinator, (1, 2)))
    for client, bits in ((1, [1.0, 1, 0, 0]), (2, [1.0, 0, 1, 0])):
        task = tasks[client]
        update = Update(task.id, client, 0, masks_of(coordinator.state, bits, bits), 1 + 8 * client, 1)
        coordinator.handle(Arrived(update), 1.0)
    assert coordinator.state.version == 1
    torch.testing.assert_close(probabilities(coordinator.state)[1], torch.tensor([0.99, 0.5, 0.5, 0.01]))


# ---- what it costs, and runs ----


def test_memory_for_signs_and_masked_weights_is_counted():
    module = ProbabilisticMaskTraining().prepare(MLP(8, (256, 256), 3))
    submodels = Submodels(module, (torch.zeros(2, 8), torch.zeros(2, dtype=torch.long)))
    local, plain = ProbabilisticMaskTraining(), submodels.cost(Spec(), 4)
    cost, followed = local.estimate(submodels, Spec(), 4, {}), local.cost(submodels, Spec(), 4, {})
    num = 8 * 256 + 256 * 256 + 256 * 3
    assert cost.peak_bytes - plain.peak_bytes == num * (1 + 4) + 4 * 4 * 256 * 256
    signs, masked, noise = num, 4 * num, 4 * num
    assert followed.peak_bytes - plain.peak_bytes > signs + masked + noise
    assert cost.flops_per_sample > plain.flops_per_sample and cost.down_bytes == plain.down_bytes


def test_a_run_sends_bits_and_learns(tmp_path):
    training = Training(num_epochs=None, num_steps=8)
    run = finish(experiment(tmp_path / "r", fed_pm(), train=training, max_updates=24))
    packed = 64 * 24 // 8 + 24 * 10 // 8
    assert {int(row["bytes_up"]) for row in run.rows()} == {packed}
    assert {int(row["bytes_down"]) for row in run.rows()} == {4 * (64 * 24 + 24 * 10)}
    assert run.summary["final"]["accuracy"] > 0.5
    assert 0.2 < run.summary["masks"]["kept"] < 0.8


@pytest.mark.long("test_a_run_sends_bits_and_learns")
def test_with_submodels_and_batch_norm_it_learns_too(tmp_path):
    def resnet():
        return ResNet(8, 1, channels=4, num_classes=10, lr=0.05)

    algorithm = fed_pm(reset=2, submodel=RateSelect("leading", [1.0, 0.5], "width"))
    training = Training(num_epochs=None, num_steps=8)
    more = {"model": resnet, "data": lambda: Digits(batch_size=32), "train": training, "max_updates": 24}
    run = finish(experiment(tmp_path / "r", algorithm, **more))
    assert run.summary["final"]["accuracy"] > 0.2
    assert len({int(row["bytes_up"]) for row in run.rows()}) == 2


def test_arguments_that_make_no_sense_are_refused():
    for arguments, words in (
        ({"prior": 0.5}, "prior is 0.5: give a number of 1 or more"),
        ({"reset": 0}, "reset is 0: give a number above 0"),
        ({"floor": 0.0}, "floor is 0.0: give a number above 0, below 0.5"),
        ({"initial": 1.0}, "initial is 1.0: give a probability from 0.01 (floor) to 0.99 (1 - floor)"),
        ({"lr_factor": -1.0}, "lr_factor is -1.0: give a number above 0"),
    ):
        with pytest.raises(BadInput, match=re.escape(words)):
            fed_pm(**arguments)


def test_in_words():
    described = fed_pm(prior=2.0, reset=5, lr_factor=50).describe()
    assert described["merge"] == "mode of Beta counts of masks, prior 2, reset every 5 merges"
    assert described["local"] == "SGD on scores of masks over frozen weights, 50 times the learning rate"
