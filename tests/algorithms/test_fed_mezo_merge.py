"""FedMeZO on the server: merges of scalars, what they cost, and whole runs."""

from __future__ import annotations

import math

import pytest
import torch

from model_zoo import CNN, MLP
from raafl.algorithms import fed_mezo, fed_rolex
from raafl.algorithms.fed_mezo.zeroth_order import (
    SCALARS,
    Expected,
    ForwardOnly,
    Rebuilt,
    ZerothOrder,
    pack,
    packed_bytes,
)
from raafl.core.algorithm import SelectContext, Training
from raafl.core.types import Arrived, ClientInfo, Joined, Update, Work
from raafl.errors import BadInput
from raafl.parts.select.rate_select import RateSelect
from raafl.parts.select.submodels import Full
from raafl.submodel import FlatTensors, Spec, Submodels
from tests.algorithms.fed_mezo_noise import NOTHING, noise
from tests.helpers.coordinators import assigned, coordinator_for, join, line_state, values_of
from tests.helpers.small_runs import experiment, finish

# ---- merging ----


def line_delta(seed, scalars, lr, epsilon=1e-3):
    """What two steps change of `Line`, of 4 x 2, 1 x 4 and 1 parameters, in one row: - lr sum g z."""
    total = torch.zeros(13)
    for step, scalar in enumerate(scalars):
        total -= lr * scalar * torch.cat(noise(seed, step, 8, 4, 1))
    return total


def answer(coordinator, task, scalars, num_samples=1, now=0.0):
    tensors = FlatTensors.empty(coordinator.state.submodels.layout(task.spec, "trained"))
    update = Update(task.id, task.client, 0, tensors, num_samples, len(scalars), extra={SCALARS: pack(scalars)})
    return coordinator.handle(Arrived(update), now)


def test_a_round_of_two_clients_by_hand():
    coordinator = coordinator_for(fed_mezo(lr=0.1), line_state(value=0.5), min_clients=2)
    tasks = assigned([*coordinator.handle(Joined(ClientInfo(1, num_samples=2)), 0.0), *join(coordinator, (2,))])
    assert tasks[1].seed != tasks[2].seed and (tasks[1].extra, tasks[2].extra) == ({SCALARS: 2}, {SCALARS: 1})
    answer(coordinator, tasks[1], [0.5, -1.0], num_samples=3)
    assert (values_of(coordinator.state) == 0.5).all()
    answer(coordinator, tasks[2], [2.0], num_samples=1)
    one, two = line_delta(tasks[1].seed, [0.5, -1.0], 0.1), line_delta(tasks[2].seed, [2.0], 0.1)
    torch.testing.assert_close(values_of(coordinator.state), 0.5 + (3 * one + two) / 4)


def test_asynchronous_a_late_update_is_the_same_change_times_its_staleness():
    algorithm = fed_mezo(lr=0.1, trigger="each", server_lr=0.5, staleness="polynomial", staleness_a=1.0)
    coordinator = coordinator_for(algorithm, line_state(value=0.5), min_clients=2)
    tasks = assigned(join(coordinator, (1, 2)))
    answer(coordinator, tasks[2], [2.0])
    answer(coordinator, tasks[1], [1.0])  # one merge late
    one, two = line_delta(tasks[1].seed, [1.0], 0.1), line_delta(tasks[2].seed, [2.0], 0.1)
    assert coordinator.state.version == 2
    torch.testing.assert_close(values_of(coordinator.state), 0.5 + 0.5 * two + 0.5 * 0.5 * one)


def test_clients_of_different_parts_count_where_they_have_something():
    algorithm = fed_mezo(lr=0.1, by_samples=False, submodel=RateSelect("leading", [1.0, 0.5], "width"))
    coordinator = coordinator_for(algorithm, line_state(value=0.5), min_clients=2)
    tasks = assigned(join(coordinator, (1, 2)))
    assert tasks[2].spec == Spec.select({"hidden": range(2)}, trained=())
    answer(coordinator, tasks[1], [1.0])
    answer(coordinator, tasks[2], [1.0], num_samples=9)
    wide = line_delta(tasks[1].seed, [1.0], 0.1)
    fc1, fc2, bias = (-0.1 * z for z in noise(tasks[2].seed, 0, 4, 2, 1))
    expected = 0.5 + wide
    expected[:4] = 0.5 + (wide[:4] + fc1) / 2
    expected[8:10] = 0.5 + (wide[8:10] + fc2) / 2
    expected[12:] = 0.5 + (wide[12:] + bias) / 2
    torch.testing.assert_close(values_of(coordinator.state), expected)


@pytest.mark.parametrize(
    ("extra", "reason"),
    [
        ({}, "bad-scalars"),
        ({SCALARS: [1.0, 2.0]}, "bad-scalars"),
        ({SCALARS: "!!!!"}, "bad-scalars"),
        ({SCALARS: "ü"}, "bad-scalars"),
        ({SCALARS: "AAA="}, "bad-scalars"),  # two bytes
        ({SCALARS: ""}, "missing-scalars"),
        ({SCALARS: pack([1.0])}, "missing-scalars"),  # of two steps
        ({SCALARS: pack([1.0, math.nan])}, "non-finite"),
        ({SCALARS: pack([1.0, math.inf])}, "non-finite"),
        ({SCALARS: pack([1.0, -3.5])}, None),
        ({SCALARS: pack([1.0, -3.5, 4.0, 0.0])}, None),  # two batches to a step
    ],
)
def test_scalars_that_make_no_sense_are_refused(extra, reason):
    state = line_state()
    tensors = FlatTensors.empty(state.submodels.layout(NOTHING, "trained"))
    update = Update(1, 1, 0, tensors, 1, num_steps=2, extra=extra)
    assert Rebuilt().reject_reason(state, update, NOTHING, 0) == reason


def test_more_scalars_than_the_task_has_batches_are_refused():
    """Each one costs the server a draw of the model's size."""
    state = line_state()
    tensors = FlatTensors.empty(state.submodels.layout(NOTHING, "trained"))
    fleet = SelectContext(state, {1: ClientInfo(1, num_samples=21)}, None, Training(num_epochs=1), batch_size=10)
    select = ForwardOnly(Full())
    select(fleet.clients[1], fleet)
    updates = (Update(1, 1, 0, tensors, 21, num_steps=2, extra={SCALARS: pack([1.0] * n)}) for n in (3, 4))
    assert [Rebuilt().reject_reason(state, update, NOTHING, 0) for update in updates] == [None, "surplus-scalars"]
    select.on_loss(fleet.clients[1], fleet)
    assert state.memory.of(Expected).value == {}


def test_a_client_that_diverges_is_refused_and_the_others_go_on(tmp_path):
    class Sick(MLP):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return loss * math.nan if torch.rand(()) < 0.1 else loss

    run = finish(experiment(tmp_path / "r", fed_mezo(), model=lambda: Sick(64, (24,), 10), max_updates=12))
    assert run.summary["updates_refused"].keys() == {"non-finite"}
    assert math.isfinite(run.summary["final"]["loss"])


# ---- what it costs ----


def test_forward_passes_alone_by_hand():
    batch = torch.zeros(2, 8), torch.zeros(2, dtype=torch.long)
    submodels = Submodels(MLP(8, (7, 5), 3, momentum=0.9), batch)
    local, weights, params = ZerothOrder(), 8 * 7 + 7 * 5 + 5 * 3, 8 * 7 + 7 * 5 + 5 * 3 + 15
    cost, plain = local.cost(submodels, Spec(), 4, {SCALARS: 10}), submodels.cost(Spec(), 4)
    assert cost.flops_per_sample == 2 * 2 * weights
    by_formula = local.estimate(submodels, Spec(), 4, {})
    assert by_formula.flops_per_sample == 2 * 2 * weights + 6 * params / 4  # each z is multiplied and added three times
    assert (cost.up_bytes, cost.down_bytes) == (56, plain.down_bytes)
    assert len(pack([0.5] * 10)) == packed_bytes(10) == 56
    assert cost == local.cost(submodels, NOTHING, 4, {SCALARS: 10})
    images = torch.zeros(2, 1, 8, 8), torch.zeros(2, dtype=torch.long)
    convolutions = Submodels(CNN(image_size=8, channels=(4, 4), hidden=(8, 8)), images)
    padding = convolutions.cost(NOTHING, 4).padding_flops_per_sample  # of one forward pass
    assert local.cost(convolutions, Spec(), 4, {}).padding_flops_per_sample == 2 * padding > 0
    assert local.cost(submodels, Spec(), 4, {}).up_bytes == 0


def test_a_client_needs_no_room_for_gradients_and_optimiser():
    submodels = Submodels(MLP(8, (256, 256), 3, momentum=0.9), (torch.zeros(2, 8), torch.zeros(2, dtype=torch.long)))
    layout, plain = submodels.layout(), submodels.cost(Spec(), 4)
    peak = ZerothOrder().cost(submodels, Spec(), 4, {}).peak_bytes
    noise_bytes = 2 * 4 * 2**16  # z and its multiple, a chunk at a time
    assert 2 * layout.num_bytes <= peak - noise_bytes <= 2 * layout.num_bytes + 40_000  # as received, and moved
    assert plain.peak_bytes >= 4 * layout.num_bytes


def test_the_scalars_of_a_task_are_foreseen():
    state = line_state()
    client = ClientInfo(1, num_samples=21)

    def extra(training, inner=None):
        fleet = SelectContext(state, {1: client}, None, training, batch_size=10)
        return ForwardOnly(inner or Full())(client, fleet).extra

    class Inner(Full):
        def __call__(self, client, fleet):
            return Work(Spec.select(trained=["fc2"]), num_epochs=3)

    assert extra(Training(num_epochs=2)) == {SCALARS: 6}
    assert extra(Training(num_epochs=None, num_steps=5)) == {SCALARS: 5}
    assert extra(Training(), Inner()) == {SCALARS: 9, "trained": ["fc2"]}


# ---- runs ----


def test_a_run_counts_the_bytes_of_its_scalars_and_learns(tmp_path):
    training = Training(num_epochs=None, num_steps=20)
    run = finish(experiment(tmp_path / "r", fed_mezo(lr=0.03), train=training, max_updates=40))
    assert {int(row["bytes_up"]) for row in run.rows()} == {packed_bytes(20)} == {108}
    metrics = run.rows("metrics.csv")
    assert float(metrics[-1]["loss"]) < float(metrics[0]["loss"]) - 0.3
    assert run.summary["final"]["accuracy"] > 0.3


@pytest.mark.long("test_a_run_counts_the_bytes_of_its_scalars_and_learns")
def test_asynchronous_and_with_submodels_it_learns_too(tmp_path):
    algorithm = fed_mezo(lr=0.03, trigger="each", server_lr=0.5, submodel=fed_rolex(rates=[1.0, 0.5]).select)
    training = Training(num_epochs=None, num_steps=10)
    run = finish(experiment(tmp_path / "r", algorithm, train=training, max_updates=60))
    metrics = run.rows("metrics.csv")
    assert float(metrics[-1]["loss"]) < float(metrics[0]["loss"]) - 0.2


def test_arguments_that_make_no_sense_are_refused():
    with pytest.raises(BadInput, match=r"trigger is 'every'"):
        fed_mezo(trigger="every")
    with pytest.raises(BadInput, match=r"staleness is 'hinge', but in a round no update is late"):
        fed_mezo(staleness="hinge")
    for name in ("lr", "epsilon", "server_lr"):
        with pytest.raises(BadInput, match=rf"{name} is 0: give a number above 0"):
            fed_mezo(**{name: 0})


def test_in_words():
    words = fed_mezo(trigger="each", server_lr=0.5, staleness="polynomial").describe()
    assert words["local"] == "zeroth-order steps, lr 0.005, epsilon 0.001"
    assert words["merge"] == "mean of what seeds and scalars rebuild, weighted by samples, server lr 0.5 x (s+1)^-0.5"
    assert words["select"] == "full" == str(Full())
