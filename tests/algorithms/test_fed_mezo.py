"""FedMeZO: steps by hand, scalars on the wire, and values that the server rebuilds to the last bit."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from model_zoo import CNN, MLP, ResNet, ViT
from raafl.algorithms import fed_mezo
from raafl.algorithms.fed_mezo.zeroth_order import (
    SCALARS,
    Rebuilt,
    ReceivedTask,
    Steps,
    ZerothOrder,
    add_noise_,
    parameters_of,
    unpack,
)
from raafl.compression.compressors import Compress
from raafl.compression.plan import CompressionPlan
from raafl.core.algorithm import Task
from raafl.core.local import SkippedBatch
from raafl.data import Digits
from raafl.errors import BadInput
from raafl.submodel import FlatTensors, Spec, Submodels
from raafl.submodel.lora import is_lora
from tests.algorithms.fed_mezo_noise import NOTHING, assignment, noise, trained
from tests.helpers.small_runs import digits, experiment, small_mlp

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
    task = Task(
        assignment(seed=seed),
        submodels,
        module,
        torch.optim.SGD([torch.zeros(1)], 0.0),
        FlatTensors.empty(submodels.layout(NOTHING)),
        2,
        torch.Generator(),
        loss=loss or module.training_step,
        backward=lambda loss: None,
        update=lambda: None,
    )
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
