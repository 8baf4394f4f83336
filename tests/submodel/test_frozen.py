"""Parameters that never train are not sent: each side has their values, and all small modules share them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from model_zoo import MLP
from raafl.errors import BadInput
from raafl.submodel import FULL, Spec, Submodels
from raafl.submodel.frozen import FrozenBase
from tests.local.bench import filled
from tests.local.test_train import Bench, Net, assignment


class Half(nn.Module):
    """Layers of 4, 6, 5 and 2 units: the first two are frozen, and their units are axes all the same."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(4, 6), nn.Linear(6, 5), nn.Linear(5, 2)
        self.first.requires_grad_(False)
        self.second.requires_grad_(False)
        self.register_buffer("scale", torch.full((2,), 3.0))

    def forward(self, x):
        return self.last(self.second(self.first(x).relu()).relu()) * self.scale


@pytest.fixture
def halved():
    torch.manual_seed(0)
    module = Half()
    return module, Submodels(module, torch.zeros(2, 4))


def names(layout):
    return [entry.name for entry in layout.entries]


def test_what_trains_comes_first_and_the_frozen_base_last(halved):
    module, submodels = halved
    last, base = ["last.weight", "last.bias"], ["first.weight", "first.bias", "second.weight", "second.bias"]
    assert list(submodels.frozen) == base
    assert names(submodels.layout(part="present")) == [*last, "scale", *base]
    assert names(submodels.layout(part="sent")) == [*last, "scale", *base]  # nobody holds the base yet
    submodels.attach_base(module)
    spec = Spec.select({}, trained=["last.bias"])
    assert names(submodels.layout(spec, "trained")) == ["last.bias", "scale"]
    assert names(submodels.layout(spec, "sent")) == ["last.bias", "scale", "last.weight"]
    for one, other in (("trained", "sent"), ("sent", "present")):
        assert submodels.layout(spec, one).is_prefix_of(submodels.layout(spec, other))


def test_the_bytes_of_a_task_by_hand(halved):
    module, submodels = halved
    whole, some = FULL, Spec.select({"first": range(2)})
    sent, base = 4 * (2 * 5 + 2 + 2), 4 * (6 * 4 + 6 + 5 * 6 + 5)  # the last layer and the scale; the first two layers
    assert submodels.cost(whole, 2).down_bytes == sent + base
    before = submodels.cost(whole, 2).peak_bytes
    submodels.attach_base(module)
    assert submodels.cost(whole, 2).down_bytes == submodels.cost(some, 2).down_bytes == sent
    assert submodels.cost(whole, 2).up_bytes == sent
    assert submodels.cost(whole, 2).peak_bytes == before - base  # no longer there twice, as received and in the module
    # of the first layer nothing is shared, nor is the weight of the second: these lie beside what is cut from them
    assert submodels.idle_bytes(whole) == 0 and submodels.idle_bytes(some) == base - 4 * 5


def test_a_model_that_trains_whole_is_sent_whole():
    module = MLP(4, (3,), 2)
    submodels = Submodels(module)
    before = submodels.layout()
    submodels.attach_base(module)
    assert submodels.base is None and not submodels.frozen
    assert submodels.layout(part="sent") == submodels.layout() == before


@pytest.mark.parametrize("kept", [{}, {"first": range(2)}, {"first": [0, 3, 5], "second": [1, 4]}])
def test_a_small_module_on_the_base_is_the_one_that_was_sent_everything(halved, kept):
    module, submodels = halved
    spec, full = Spec.select(kept), submodels.state(module)
    everything = filled(submodels, spec, full)
    submodels.attach_base(full)
    small = submodels.shrink(spec, base=submodels.base)
    submodels.plan(spec, "sent").gather(full, out=small.present)
    x = torch.randn(3, 4)
    assert torch.equal(small.module(x), everything.module(x))
    for one in (small, everything):
        one.module(x).square().sum().backward()
    assert small.module.get_parameter("first.weight").grad is None
    for name in ("last.weight", "last.bias"):
        assert torch.equal(small.module.get_parameter(name).grad, everything.module.get_parameter(name).grad)


def test_what_is_kept_whole_lies_in_memory_once(halved):
    module, submodels = halved
    submodels.attach_base(module)
    whole = submodels.shrink(FULL, base=submodels.base).module
    cut = submodels.shrink(Spec.select({"first": range(2)}), base=submodels.base).module
    address = module.get_parameter("second.bias").data_ptr()
    assert whole.get_parameter("second.bias").data_ptr() == cut.get_parameter("second.bias").data_ptr() == address
    assert cut.get_parameter("second.weight").shape == (5, 2)


def test_the_digest_is_that_of_the_values():
    one = {"a": torch.arange(4.0), "b": torch.ones(2, 3, dtype=torch.float16), "c": torch.tensor(1.5)}
    same = {name: one[name].clone() for name in ("c", "a", "b")}
    digest = FrozenBase(one).digest
    assert FrozenBase(same).digest == digest
    for name, changed in {"a": torch.arange(4.0) + 1e-7, "b": torch.ones(3, 2, dtype=torch.float16)}.items():
        assert FrozenBase({**one, name: changed}).digest != digest
    assert FrozenBase({"a": one["a"], "b": one["b"], "d": one["c"]}).digest != digest


class Teacher(Net):
    """Keeps a moving average of what trains in a parameter that does not."""

    def __init__(self) -> None:
        super().__init__()
        self.average = nn.Parameter(self.fc2.bias.detach().clone(), requires_grad=False)

    def configure_optimizers(self):
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)

    def training_step(self, batch, index):
        self.average.data.mul_(0.9)
        return super().training_step(batch, index)


class Setting(Teacher):
    """Gives it other memory, as code for momentum encoders does."""

    def training_step(self, batch, index):
        self.average.data = 0.9 * self.average.data
        return Net.training_step(self, batch, index)


@pytest.mark.parametrize("make", [Teacher, Setting])
def test_training_that_writes_to_a_frozen_parameter_is_refused(make):
    bench = Bench.of(make)
    bench.submodels.attach_base(copy.deepcopy(bench.module))
    with pytest.raises(
        BadInput, match=r"parameter 'average' has requires_grad=False, but training writes to it: make it"
    ):
        bench.trainer.run(assignment(epochs=1), bench.submodels.plan(FULL, "sent").gather(bench.values), bench.data)
