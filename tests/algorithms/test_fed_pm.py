"""FedPM: masks over frozen weights, straight-through gradients, bits on the wire, Beta counts by hand, costs and runs."""

from __future__ import annotations

import math
import re
import sys

import pytest
import torch
from torch import nn

from model_zoo import MLP, ResNet
from raafl.algorithms import fed_pm
from raafl.algorithms.fed_pm import BayesianMasks, Masked, ProbabilisticMaskTraining, scale
from raafl.core.algorithm import Training
from raafl.core.state import GlobalState
from raafl.core.types import Arrived, Assignment, Update, derive_seed
from raafl.data import Digits
from raafl.errors import BadInput
from raafl.parts.select.rate_select import RateSelect
from raafl.submodel import FlatTensors, Spec, Submodels, skeleton
from tests.helpers.coordinators import EXAMPLE, Line, assigned, coordinator_for, join
from tests.helpers.small_runs import experiment, finish
from tests.local.bench import filled, task_in

# ---- A line of weights to be masked, for the tests of FedPM ----


def prepared_line(initial=0.5):
    """`Line` of 8 + 4 weights as FedPM has it; its bias is frozen. sigma is 1 of fc1, sqrt(1/2) of fc2."""
    torch.manual_seed(0)
    return ProbabilisticMaskTraining(initial=initial).prepare(Line())


def prepared_state():
    module = prepared_line()
    submodels = Submodels(module, EXAMPLE)
    return GlobalState(submodels, submodels.state(module))


def assignment(spec=None, seed=7):
    return Assignment(1, 1, 0, 0, 0, spec or Spec(), 0, None, None, seed, 0.0)


def training(module, lr=0.1, loss=None, **more):
    """The hook of a task on a prepared module, its submodels, and the optimiser."""
    submodels = Submodels(module)
    scores = [p for p in module.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(scores, lr)

    def update():
        optimizer.step()
        optimizer.zero_grad()

    received, loss = FlatTensors.empty(submodels.layout()), loss or module.training_step
    changes = {"optimizer": optimizer, "received": received, "num_batches": 2, "loss": loss, "update": update}
    task = task_in(module, submodels, assignment(), **changes)
    return ProbabilisticMaskTraining(**more).hook(task)


def ones(state, spec=None):
    tensors = FlatTensors.empty(state.submodels.layout(spec or Spec(), "trained"))
    for buffer in tensors.buffers.values():
        buffer.fill_(1.0)
    return tensors


# ---- FedPM: masks over frozen weights, straight-through gradients, Beta counts by hand, bits on the wire ----


# ---- straight through the draw ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_gradient_is_that_of_a_slow_reference(dtype):
    torch.manual_seed(0)
    score, drawn = torch.randn(6, 5, dtype=dtype), torch.rand(6, 5)
    negative, x, sigma = torch.rand(6, 5) < 0.5, torch.randn(3, 5, dtype=dtype), 0.3
    one, two = score.clone().requires_grad_(), score.clone().requires_grad_()
    fast = Masked.apply(one, drawn, negative, sigma)
    (x @ fast.T).square().sum().backward()
    p = torch.sigmoid(two)
    mask = (drawn < p).to(dtype)
    slow = torch.where(negative, -sigma, sigma).to(dtype) * (p + (mask - p).detach())
    (x @ slow.T).square().sum().backward()
    torch.testing.assert_close(fast, slow)
    torch.testing.assert_close(one.grad, two.grad)
    assert set(fast.abs().unique().tolist()) == {0.0, torch.tensor(sigma, dtype=dtype).item()}


# ---- how a model is prepared ----


def test_weights_become_signed_constants_and_the_rest_is_frozen():
    torch.manual_seed(0)
    plain = Line()
    module = prepared_line(initial=0.25)
    assert module.fc1.weight.abs().unique().tolist() == [0.25]  # sqrt(2 / 2) / 4
    torch.testing.assert_close(module.fc2.weight.abs(), torch.full((1, 4), 0.25 * math.sqrt(2 / 4)))
    assert torch.equal(module.fc1.weight.sign(), plain.fc1.weight.sign())
    assert torch.equal(module.fc2.bias, plain.fc2.bias)
    assert [name for name, p in module.named_parameters() if p.requires_grad] == ["fc1.weight", "fc2.weight"]
    (note,) = ProbabilisticMaskTraining().notes(Submodels(module))
    assert note.startswith("masks over 12 weights in 2 tensors") and "the other 1 parameters" in note


def test_a_weight_of_zero_gets_a_sign_by_the_seed():
    def made(seed):
        module = nn.Linear(50, 40)
        nn.init.zeros_(module.weight)
        torch.manual_seed(seed)
        return ProbabilisticMaskTraining().prepare(module).weight

    assert made(1).abs().unique().numel() == 1 and 0.3 < (made(1) > 0).float().mean() < 0.7
    assert torch.equal(made(1), made(1)) and not torch.equal(made(1), made(2))


def test_a_skeleton_is_frozen_alike():
    with skeleton():
        module = ProbabilisticMaskTraining().prepare(Line())
    assert module.fc1.weight.is_meta and not module.fc2.bias.requires_grad


def test_sigma_is_that_of_kaiming():
    for shape in ((30, 50), (6, 7, 3, 3), (9, 4)):
        torch.manual_seed(0)
        drawn = torch.stack([nn.init.kaiming_normal_(torch.empty(shape)) for _ in range(300)])
        assert scale(shape) == pytest.approx(drawn.std().item(), rel=0.03)


def test_what_has_nothing_to_mask_is_refused_by_name():
    module = nn.Sequential(nn.LayerNorm(3))
    with pytest.raises(
        BadInput, match="Sequential has no weights to mask: fed_pm trains masks for linear, convolution"
    ):
        ProbabilisticMaskTraining().prepare(module)
    frozen = nn.Linear(2, 2).requires_grad_(False)
    with pytest.raises(BadInput, match="no weights to mask"):
        ProbabilisticMaskTraining().prepare(frozen)


def test_a_step_and_the_mask_that_is_sent_by_hand():
    module, lr, factor = prepared_line(), 0.1, 20.0
    batch = torch.tensor([[1.0, -2.0], [0.5, 3.0]]), torch.tensor([1.0, -1.0])
    signs = {f"{n}.weight": module.get_submodule(n).weight.detach().sign() for n in ("fc1", "fc2")}
    bias = module.fc2.bias.clone()
    hook = training(module, lr, lr_factor=factor)
    assert torch.equal(module.fc1.weight, torch.zeros(4, 2))  # scores: p = 1/2

    generator = torch.Generator().manual_seed(derive_seed(7, "masks"))
    first, second = torch.rand(4, 2, generator=generator), torch.rand(1, 4, generator=generator)
    w1, w2 = (first < 0.5) * signs["fc1.weight"], (second < 0.5) * signs["fc2.weight"] * math.sqrt(0.5)
    w1, w2 = w1.requires_grad_(), w2.requires_grad_()
    wanted = ((torch.relu(batch[0] @ w1.T) @ w2.T + bias).squeeze(1) - batch[1]).square().mean()
    wanted.backward()
    loss = hook.loss(batch, 0)
    torch.testing.assert_close(loss, wanted)
    hook.backward(loss)
    hook.update()
    scores = [
        -lr * factor * w.grad * signs[name] * sigma / 4
        for name, w, sigma in (("fc1.weight", w1, 1.0), ("fc2.weight", w2, math.sqrt(0.5)))
    ]
    torch.testing.assert_close(module.fc1.weight.data, scores[0])
    torch.testing.assert_close(module.fc2.weight.data, scores[1])
    assert hook.task.optimizer.param_groups[0]["lr"] == lr

    assert hook.finish() == {}
    sent = [(torch.rand(s.shape, generator=generator) < torch.sigmoid(s)).float() for s in scores]
    assert torch.equal(module.fc1._parameters["weight"], sent[0])
    assert torch.equal(module.fc2._parameters["weight"], sent[1])
    hook.close()
    measured = torch.relu(batch[0] @ (sent[0] * signs["fc1.weight"]).T)
    measured = measured @ (sent[1] * signs["fc2.weight"] * math.sqrt(0.5)).T + bias
    torch.testing.assert_close(module(batch[0]), measured)  # whoever measures what was trained


def test_a_task_that_is_given_up_leaves_the_module_as_it_was():
    module = prepared_line()
    names = {name: set(layer.__dict__) for name, layer in module.named_modules()}
    hook = training(module)
    hook.loss((torch.zeros(1, 2), torch.zeros(1)), 0)
    assert "weight" in module.fc1.__dict__
    hook.close()
    assert {name: set(layer.__dict__) for name, layer in module.named_modules()} == names


def test_the_next_task_starts_from_what_it_receives():
    module = prepared_line()
    before = {name: p.clone() for name, p in module.named_parameters()}
    batch = torch.ones(3, 2), torch.zeros(3)
    results = []
    for _ in range(2):
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                parameter.copy_(before[name])
        hook = training(module)
        hook.backward(loss := hook.loss(batch, 0))
        hook.update()
        hook.finish()
        hook.close()
        results.append((loss.detach(), module.fc1._parameters["weight"].clone()))
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])


class Several(nn.Module):
    """A layer of each kind that finds its weights in a way of its own: attention, an LSTM, a tied embedding."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.lstm = nn.LSTM(8, 6, batch_first=True)
        self.conv = nn.Conv1d(6, 8, 3, padding=1)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x):
        x = self.embedding(x)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x = self.conv(self.lstm(x)[0].transpose(1, 2)).transpose(1, 2)
        return self.head(self.norm(x))

    def training_step(self, batch, index):
        return nn.functional.cross_entropy(self(batch).flatten(0, 1), batch.flatten())


def test_layers_of_every_kind_compute_with_their_masked_weights():
    torch.manual_seed(0)
    module = ProbabilisticMaskTraining().prepare(Several())
    names = {name for name, p in module.named_parameters() if p.requires_grad}
    assert names == {
        "embedding.weight",
        "attention.in_proj_weight",
        "attention.out_proj.weight",
        "lstm.weight_ih_l0",
        "lstm.weight_hh_l0",
        "conv.weight",
    }
    signs = {name: module.get_parameter(name).sign() for name in names}
    batch = torch.randint(11, (4, 5))
    seen = {}
    hook = training(module, loss=lambda batch, index: seen.update(out=module(batch)) or seen["out"].square().sum())
    loss = hook.loss(batch, 0)
    shadows = {
        name: dict(module.get_submodule(name.rpartition(".")[0]).__dict__)[name.rpartition(".")[2]] for name in names
    }
    for name, weight in shadows.items():
        assert set(torch.unique(weight.detach() / signs[name] / scale(weight.shape)).round(decimals=5).tolist()) == {
            0.0,
            1.0,
        }
    hook.backward(loss)
    gradients = {name: p.grad for name, p in module.named_parameters()}
    assert all((gradients[name] is not None) == (name in names) for name in gradients)
    assert all(gradients[name].count_nonzero() for name in names)
    hook.update()
    # the same module with these weights as its parameters
    plain = Several()
    plain.load_state_dict(module.state_dict())
    with torch.no_grad():
        for name, weight in shadows.items():
            plain.get_parameter(name).copy_(weight)
    torch.testing.assert_close(plain(batch), seen["out"])
    hook.finish()
    hook.close()


def test_scores_that_are_not_finite_are_told(tmp_path):
    module = prepared_line()
    hook = training(module)
    with torch.no_grad():
        module.fc1.weight[0, 0] = math.nan
    assert hook.finish() == {sys.modules["raafl.algorithms.fed_pm"].DIVERGED: True}
    state = prepared_state()
    update = Update(1, 1, 0, ones(state), 1, extra={sys.modules["raafl.algorithms.fed_pm"].DIVERGED: True})
    assert BayesianMasks().reject_reason(state, update, Spec(), 0) == "non-finite"


# ---- FedPM on the server: Beta counts of masks, what they cost, and whole runs ----


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
    small = filled(state.submodels, spec, state.values)
    expected = small.module.fc2.weight.clone()
    optimizer = torch.optim.SGD(small.module.parameters(), 0.1)
    given = assignment(spec)
    task = task_in(small.module, state.submodels, given, optimizer=optimizer, received=small.present.clone())
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
