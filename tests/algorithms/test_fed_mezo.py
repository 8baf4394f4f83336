"""FedMeZO: steps by hand, scalars on the wire, values that the server rebuilds to the last bit, merges, costs and runs."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from model_zoo import CNN, MLP, ResNet, ViT
from raafl.algorithms import fed_mezo, fed_rolex
from raafl.algorithms.fed_mezo import (
    SCALARS,
    ForwardOnly,
    Rebuilt,
    ReceivedTask,
    Steps,
    ZerothOrder,
    add_noise_,
    pack,
    packed_bytes,
    parameters_of,
    unpack,
)
from raafl.compression.plan import Compress, CompressionPlan
from raafl.core.algorithm import Select, SelectContext, Training
from raafl.core.local import SkippedBatch
from raafl.core.options import FabricOptions
from raafl.core.state import GlobalState
from raafl.core.types import Arrived, Assignment, ClientInfo, Joined, Sending, Settled, Update, Work, derive_seed
from raafl.data import Digits, FederatedData, Iid
from raafl.errors import BadInput
from raafl.local.train import LocalTrainer
from raafl.parts.select.rate_select import RateSelect
from raafl.parts.select.submodels import Full
from raafl.submodel import FlatTensors, Spec, Submodels
from raafl.submodel.lora import is_lora
from tests.helpers.coordinators import assigned, coordinator_for, join, line_state, values_of
from tests.helpers.small_runs import digits, experiment, finish, small_mlp
from tests.local.bench import task_in

# ---- Tasks of FedMeZO for its tests ----


NOTHING = Spec.select(trained=())


def assignment(spec=NOTHING, seed=7, extra=None):
    return Assignment(1, 1, 0, 0, 0, spec, 0, None, None, seed, 0.0, extra=extra or {})


def noise(seed, step, *sizes):
    """z of a step, drawn apart: a generator for each step, tensors in order."""
    generator = torch.Generator().manual_seed(derive_seed(seed, "perturbation", step))
    return [torch.randn(size, generator=generator) for size in sizes]


def trained(module, data, spec, extra=None, num_steps=4, seed=11):
    """A task of FedMeZO, run as clients do: its submodels, values received, values at the end, and update."""
    federated = FederatedData(data(), Iid(), 2, 0)
    submodels = Submodels(module, federated.example_batch(2))
    state = GlobalState(submodels, submodels.state(module))
    trainer = LocalTrainer(
        submodels, ZerothOrder(lr=0.01), "values", Training(num_epochs=None, num_steps=num_steps), max_built=1
    )
    received = submodels.plan(spec, "sent").gather(state.values)
    update = trainer.run(assignment(spec, seed, extra), received, federated.client(1))
    return state, received, dict(trainer.built(spec).module.named_parameters()), update


# ---- FedMeZO: steps by hand, scalars on the wire, and values that the server rebuilds to the last bit ----


# ---- steps ----


class Bowl(nn.Module):
    """``(a - 1)^2 + 3 (b + 2)^2``; a central difference of a quadratic is its derivative."""

    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.tensor([4.0]))
        self.b = nn.Parameter(torch.tensor([0.5]))

    def training_step(self, batch, index):
        return ((self.a - 1) ** 2 + 3 * (self.b + 2) ** 2).sum()


def steps(module, lr, epsilon, seed=7, loss=None):
    submodels = Submodels(module)
    received, loss = FlatTensors.empty(submodels.layout(NOTHING)), loss or module.training_step
    task = task_in(module, submodels, assignment(seed=seed), received=received, num_batches=2, loss=loss)
    return Steps(task, lr, epsilon)


def test_two_steps_on_a_quadratic_by_hand():
    module, lr = Bowl(), 0.05
    hook, a, b = steps(module, lr, epsilon=0.01), 4.0, 0.5
    for step in range(2):
        (za,), (zb,) = noise(7, step, 1, 1)
        g = 2 * (a - 1) * za.item() + 6 * (b + 2) * zb.item()
        loss = hook.loss(None, step)
        at = [(a + s * 0.01 * za.item() - 1) ** 2 + 3 * (b + s * 0.01 * zb.item() + 2) ** 2 for s in (1, -1)]
        assert loss.item() == pytest.approx(sum(at) / 2, rel=1e-5)
        assert hook.scalars[step] == pytest.approx(g, rel=1e-3)
        a, b = a - lr * g * za.item(), b - lr * g * zb.item()
        assert (module.a.item(), module.b.item()) == (pytest.approx(a, rel=1e-4), pytest.approx(b, rel=1e-4))
    assert module.a.grad is None
    assert unpack(hook.finish()[SCALARS]) == hook.scalars


@pytest.mark.parametrize("place", [0, 1])
def test_a_batch_that_is_skipped_at_either_place_is_a_step_by_0(place):
    module = Bowl()
    answers = [module.training_step(None, 0), None] if place else [None]

    def loss(batch, index):
        answer = answers.pop(0)
        if answer is None:
            raise SkippedBatch
        return answer

    hook = steps(module, 0.05, epsilon=0.01, loss=loss)
    with pytest.raises(SkippedBatch):
        hook.loss(None, 0)
    by_server, (za,) = torch.tensor([4.0]), noise(7, 0, 1)
    for rate in (0.01, -0.02, 0.01):
        by_server.add_(za, alpha=rate)
    assert hook.scalars == [0.0] and torch.equal(module.a.detach(), by_server)


def test_the_scalar_is_the_derivative_along_the_perturbation():
    torch.manual_seed(0)
    module = MLP(8, (7, 5), 3).double()
    module.log = module.log_dict = lambda *args, **more: None
    batch = torch.randn(20, 8, dtype=torch.float64), torch.arange(20) % 3
    module.training_step(batch, 0).backward()
    along = sum(
        float((p.grad.flatten() * z).sum())
        for p, z in zip(module.parameters(), noise(7, 0, *(p.numel() for p in module.parameters())), strict=True)
    )
    hook = steps(module, 1e-9, 1e-6)
    hook.loss(batch, 0)
    assert hook.scalars[0] == pytest.approx(along, rel=1e-5)


def test_a_perturbation_is_the_same_with_any_number_of_threads_and_in_any_storage():
    sizes, before = ((300, 700), (5,), (70_001,)), torch.get_num_threads()
    results = []
    try:
        for threads, offset in ((1, 0), (2, 3)):
            torch.set_num_threads(threads)
            storage = torch.ones(sum(map(math.prod, sizes)) + offset)[offset:]
            tensors = [
                part.view(size) for part, size in zip(storage.split(list(map(math.prod, sizes))), sizes, strict=True)
            ]
            add_noise_(tensors, 3, 0.1, -0.2, 0.07)
            results.append(storage.clone())
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*results)
    assert results[0].sub(1).std().item() == pytest.approx(0.03, rel=0.02)  # 0.1 - 0.2 + 0.07
    add_noise_(tensors, 4, 0.1)
    assert not torch.equal(storage, results[0])


# ---- the server has the client's bits ----


def pictures(batch_size=16):
    return Digits(batch_size=batch_size)


MODELS = {
    "mlp": (small_mlp, digits),
    "cnn": (lambda: CNN(1, 8, (3, 5), (6, 4), 10), pictures),
    "resnet": (lambda: ResNet(8, 1, channels=4, num_classes=10), pictures),
    "vit": (lambda: ViT("micro", 8, 4, 1), pictures),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_server_rebuilds_the_clients_values_to_the_last_bit(name):
    make, data = MODELS[name]
    torch.manual_seed(1)
    module = make()
    state, received, at_client, update = trained(module, data, NOTHING)
    assert len(update.tensors) == 0 and update.num_steps == 4
    assert len(unpack(update.extra[SCALARS])) == 4
    before = state.submodels.plan().gather(state.values)
    rebuilt = Rebuilt(lr=0.01).rebuilt(state.submodels, Spec(), before, 11, unpack(update.extra[SCALARS]))
    for parameter in parameters_of(state.submodels, Spec()):
        assert torch.equal(rebuilt[parameter], at_client[parameter]), parameter
        assert not torch.equal(rebuilt[parameter], received[parameter]), "nothing was trained"


def test_of_a_submodel_the_same_part_is_perturbed_on_both_sides():
    torch.manual_seed(1)
    spec = Spec.select({"layers.1": [0, 3, 4, 9]}, trained=())
    state, _, at_client, update = trained(MLP(64, (10, 6), 10), digits, spec, {"trained": ["layers.1", "layers.5"]})
    perturbed = Spec.select({"layers.1": [0, 3, 4, 9]}, trained=["layers.1", "layers.5"])
    before = state.submodels.plan(perturbed).gather(state.values)
    rebuilt = Rebuilt(lr=0.01).rebuilt(state.submodels, perturbed, before, 11, unpack(update.extra[SCALARS]))
    assert [name for name, _ in rebuilt.items()] == [
        "layers.1.weight",
        "layers.1.bias",
        "layers.5.weight",
        "layers.5.bias",
    ]
    assert all(torch.equal(tensor, at_client[name]) for name, tensor in rebuilt.items())
    assert rebuilt["layers.1.weight"].shape == (4, 64)


def test_one_client_alone_leaves_its_own_values():
    torch.manual_seed(1)
    state, _, at_client, update = trained(small_mlp(), digits, NOTHING)
    merge = Rebuilt(lr=0.01)
    state.memory.put(ReceivedTask(11))
    merge.receive(state, update, NOTHING, 0)
    merge.apply(state)
    for name, parameter in at_client.items():
        torch.testing.assert_close(state.values[name], parameter, rtol=1e-6, atol=1e-7)


def test_buffers_and_modes_are_left_alone():
    torch.manual_seed(1)
    module = ResNet(8, 1, channels=4, num_classes=10)
    state, _, _, update = trained(module, pictures, NOTHING)
    before = state.values.clone()
    merge = Rebuilt(lr=0.01)
    state.memory.put(ReceivedTask(11))
    merge.receive(state, update, NOTHING, 0)
    merge.apply(state)
    for name, values in state.values.items():
        assert torch.equal(values, before[name]) == (name not in state.submodels.parameter_names)
    notes = ZerothOrder().notes(state.submodels)
    assert notes[1].startswith("batch norm uses its initial running statistics") and len(notes) == 2
    assert len(ZerothOrder().notes(Submodels(small_mlp()))) == 1


def test_there_is_nothing_to_compress_on_the_way_up(tmp_path):
    with pytest.raises(
        BadInput,
        match=r"compress\.up is 'top_k', but this algorithm's updates travel as scalars: leave compress\.up out",
    ):
        experiment(tmp_path / "run", fed_mezo(), compress=Compress("bf16", "top_k")).check()
    submodels = Submodels(small_mlp())
    assert CompressionPlan.of(submodels, Compress(), "values", ZerothOrder()) is None
    assert CompressionPlan.of(submodels, Compress("bf16"), "values", ZerothOrder()).up is None


def test_gradients_that_there_are_none_of_are_not_clipped(tmp_path):
    made = experiment(tmp_path / "run", fed_mezo(), fabric=FabricOptions(gradient_clip_val=0.5))
    with pytest.raises(
        BadInput, match=r"gradient_clip_val is 0\.5, but fed_mezo trains without gradients: leave it out"
    ):
        made.check()
    replace(made, rules=6).check()  # an older run folder replays


def test_what_is_frozen_is_not_perturbed():
    module = small_mlp()
    module.layers[1].weight.requires_grad_(False)
    names = parameters_of(Submodels(module), Spec())
    assert names == ["layers.1.bias", "layers.3.weight", "layers.3.bias"]


def test_of_lora_only_the_adapters_are_perturbed():
    pytest.importorskip("peft")
    from tests.helpers.lora_models import lora_bert

    module = lora_bert()
    names = parameters_of(Submodels(module), Spec())
    adapters = [path for path, layer in module.named_modules() if is_lora(layer)]
    assert names == [name for name, p in module.named_parameters() if p.requires_grad]
    assert (
        adapters and any(name.startswith(adapters[0]) for name in names) and len(names) < len(list(module.parameters()))
    )


# ---- FedMeZO on the server: merges of scalars, what they cost, and whole runs ----


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


def test_an_update_of_a_skipped_task_has_no_scalars():
    state = line_state()
    update = Update(
        1, 1, 0, FlatTensors.empty(state.submodels.layout(NOTHING, "trained")), 1, extra={SCALARS: pack([])}
    )
    assert Rebuilt().reject_reason(state, update, NOTHING, 0) is None


def test_more_scalars_than_the_task_has_batches_are_refused():
    """Each one costs the server a draw of the model's size."""
    state = line_state()
    tensors = FlatTensors.empty(state.submodels.layout(NOTHING, "trained"))
    fleet = SelectContext(state, {1: ClientInfo(1, num_samples=21)}, None, Training(num_epochs=1), batch_size=10)
    work = ForwardOnly(Full())(fleet.clients[1], fleet).extra
    updates = (Update(1, 1, 0, tensors, 21, num_steps=2, extra={SCALARS: pack([1.0] * n)}, work=work) for n in (3, 4))
    assert [Rebuilt().reject_reason(state, update, NOTHING, 0) for update in updates] == [None, "surplus-scalars"]


class FewerSteps(Select):
    """Three steps for the first task, and one less for each after it."""

    def __call__(self, client, fleet):
        fleet.cache["steps"] = fleet.cache.get("steps", 4) - 1
        return Work(num_steps=fleet.cache["steps"])


def test_each_of_two_tasks_in_flight_has_scalars_for_its_own_steps():
    """A client with `overlap` has its next task, of two steps, before the update of the first, of three, is there."""
    coordinator = coordinator_for(fed_mezo(trigger="each", submodel=FewerSteps()))
    first = assigned(join(coordinator, [1]))[1]
    second = assigned(coordinator.handle(Sending(1, 0, first.id), 0.0))[1]
    outcomes = []
    for task, num in ((first, 3), (second, 3)):
        tensors = FlatTensors.empty(coordinator.state.submodels.layout(task.spec, "trained"))
        update = Update(task.id, 1, 0, tensors, 1, num_steps=task.num_steps, extra={SCALARS: pack([1.0] * num)})
        actions = coordinator.handle(Arrived(update), 0.0)
        outcomes += [action.outcome for action in actions if isinstance(action, Settled)]
    assert outcomes == ["merged", "refused:surplus-scalars"]


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
