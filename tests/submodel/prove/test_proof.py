"""Axes are admitted by proof: right ones stay, wrong ones are kept whole with a reason, and nothing else is disturbed."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.nn import functional as F

from raafl.algorithms import ALGORITHMS
from raafl.config.experiment import SubmodelOptions
from raafl.errors import BadInput
from raafl.local.prepare import prepare
from raafl.runtime.setup import proven_submodels
from raafl.submodel import FULL, Submodels
from raafl.submodel.prove.proof import _Proof, _separating, refuted
from tests.helpers.small_runs import experiment
from tests.submodel.models import WrongAxes
from tests.submodel.prove.shifts import shift_by_a_unit
from tests.submodel.zoo import COVERING, ZOO

BATCH = [torch.randn(4, 6, generator=torch.Generator().manual_seed(1)), torch.tensor([0, 2, 1, 1])]


class Net(nn.Module):
    """Two layers; what `read` makes of the logits is the output."""

    def __init__(self, read=lambda x: x):
        super().__init__()
        self.fc1, self.fc2, self.read = nn.Linear(6, 5), nn.Linear(5, 3), read

    def forward(self, x):
        return self.read(self.fc2(torch.relu(self.fc1(x))))

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self(batch[0]), batch[1])


class Declared(Net):
    """Says of its classes that they may shrink."""

    def submodel_axes(self):
        return {
            "hidden": [("fc1.weight", 0), ("fc1.bias", 0), ("fc2.weight", 1)],
            "classes": [("fc2.weight", 0), ("fc2.bias", 0)],
        }


class Half(Net):
    """Says of its hidden units that they may shrink, and forgets the bias; the step does not notice."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(5))

    def forward(self, x):
        return self.fc2(torch.relu(self.fc1(x)) * self.gain[: self.fc1.weight.shape[0]])

    def submodel_axes(self):
        return {"hidden": [("fc1.weight", 0), ("fc1.bias", 0), ("fc2.weight", 1), ("gain", 0, 1)]}


READS = {
    "logits": lambda x: x.logits if hasattr(x, "logits") else x,
    "T": lambda x: x.T.T,
    "mT": lambda x: x.mT.mT,
    "H": lambda x: x.H.H,
    "data": lambda x: x + 0 * x.data.sum(),
    "unknown": lambda x: getattr(x, "somewhere", x),
}


@pytest.mark.parametrize("name", READS)
def test_an_attribute_of_a_value_keeps_it_whole(name):
    submodels = Submodels(Net(READS[name]), BATCH)
    assert list(submodels.axes) == ["fc1"]
    assert "fc2" in submodels.kept_whole


@dataclass
class Given:
    """What some models give: not only what the loss sees."""

    logits: torch.Tensor
    embedding: torch.Tensor


class Embeds(Net):
    """Gives what lies before its logits, too, packed as it is told."""

    def __init__(self, packed):
        super().__init__()
        self.packed = packed

    def forward(self, x):
        hidden = torch.relu(self.fc1(x))
        return self.packed(self.fc2(hidden), hidden)

    def training_step(self, batch, batch_idx):
        given = self(batch[0])
        if isinstance(given, dict):
            given = given["all"][0]
        return F.cross_entropy(given.logits, batch[1])


@pytest.mark.parametrize("packed", [Given, lambda *both: {"all": [Given(*both)]}], ids=["alone", "nested"])
def test_what_a_dataclass_gives_is_kept_whole_as_in_a_table(packed):
    submodels = Submodels(Embeds(packed), BATCH)
    assert list(submodels.axes) == [] and submodels.kept_whole["fc1"] == "it is an output of the model"


def test_sizes_may_be_read():
    submodels = Submodels(Net(lambda x: x.view(x.shape[0], x.size(1))), BATCH)
    assert list(submodels.axes) == ["fc1"]


def test_a_class_axis_that_is_declared_is_kept_whole_and_the_other_stays():
    module = Declared()
    submodels = proven_submodels(SubmodelOptions(), module, BATCH, ALGORITHMS["hetero_fl"]().select)
    assert list(submodels.axes) == ["hidden"] and list(submodels.refuted) == ["classes"]
    assert submodels.kept_whole["classes"].startswith("not proven: ")


class Hidden(Net):
    """Says of its hidden units that they may shrink, but reads half of them through a mask of noise."""

    def __init__(self, chance):
        super().__init__()
        self.chance = chance

    def forward(self, x):
        hidden = torch.relu(self.fc1(x))
        kept = (torch.rand_like(hidden[:, :1]) > self.chance).to(x.dtype)
        return self.fc2(hidden) + kept * hidden[:, :2].mean(1, keepdim=True) ** 2 * x[:, :3]

    def submodel_axes(self):
        return {"hidden": [("fc1.weight", 0), ("fc1.bias", 0), ("fc2.weight", 1)]}


@pytest.mark.parametrize("chance", [0.25, 0.75])
def test_what_is_seen_through_a_mask_of_noise_alone_is_compared(chance):
    assert list(refuted(Submodels(Hidden(chance), BATCH), Hidden(chance), BATCH)) == ["hidden"]


def test_noise_that_leaves_nothing_finite_is_not_taken():
    class Rare(Half):
        def forward(self, x):
            kept = (torch.rand_like(x) < 0.8).to(x.dtype)
            return super().forward(x * kept / kept.mean())

    assert refuted(Submodels(Rare(), BATCH), Rare(), BATCH) == {}


def test_a_right_declaration_is_proven():
    assert refuted(Submodels(Half(), BATCH), Half(), BATCH) == {}


def test_a_step_that_does_not_run_keeps_all_whole_with_the_reason():
    class Broken(Net):
        def training_step(self, batch, batch_idx):
            raise ValueError("no such batch")

    found = refuted(Submodels(Broken(), BATCH), Broken(), BATCH)
    assert found == {"fc1": "not proven: its training step does not run on random values: ValueError: no such batch"}


def test_code_that_needs_single_precision_is_tried_in_it():
    class Single(Net):
        def forward(self, x):
            assert x.dtype == torch.float32
            return super().forward(x)

    assert refuted(Submodels(Net(), BATCH), Single(), BATCH) == {}


def test_a_loss_that_is_not_finite_proves_nothing():
    class Infinite(Net):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) / 0.0

    (reason,) = refuted(Submodels(Infinite(), BATCH), Infinite(), BATCH).values()
    assert "numbers that are not finite" in reason


def test_data_that_are_not_finite_are_no_fault_of_an_axis():
    x = BATCH[0].clone()
    x[0, 0], x[1, 1] = float("nan"), float("inf")
    assert refuted(Submodels(Net(), BATCH), Net(), [x, BATCH[1]]) == {}


@pytest.mark.quick_cases(*(name for name in COVERING if name in ZOO))
@pytest.mark.parametrize("name", ZOO)
def test_every_axis_of_the_zoo_is_proven(name):
    module, batch = made(name)
    for wide in (False, True) if ZOO[name].width else (False,):
        assert refuted(Submodels(module, batch, residual_width=wide), module, batch) == {}


@pytest.mark.quick_cases("MLP", "CNN with batch norm", "FastText", "KeywordSpotter")
@pytest.mark.parametrize("name", ZOO)
def test_the_same_axes_are_found_and_proven_three_times_in_one_process(name):
    module, batch = made(name)
    for _ in range(3):
        submodels = Submodels(module, batch)
        assert {axis: one.size for axis, one in submodels.axes.items()} == ZOO[name].axes
        assert refuted(submodels, module, batch) == {}


@pytest.mark.quick_cases("CNN", "ViT")
@pytest.mark.parametrize("name", ["MLP", "CNN", "ViT", "BERT", "LLaMA"])
def test_a_member_whose_units_are_shifted_by_one_is_refused(name, monkeypatch):
    module, batch = made(name)
    axes = Submodels(module, batch).axes
    proof = _Proof(Submodels(module, batch), module, batch, torch.float64)
    assert proof.begin() is None
    for axis in axes.values():
        for member in {m.name: m for m in axis.members}.values():
            if member.name.endswith(("k_proj.bias", "key.bias")):
                continue  # softmax does not see what is added to all scores alike: such a bias does nothing, right or wrong
            shift_by_a_unit(monkeypatch, member, axis)
            assert proof._failing(list(axes)), member


class Chain(nn.Module):
    """Layers one after the other, whose hidden units are all declared; the ones at `soft` may not go, nor those at `pair` both."""

    def __init__(self, num, soft=None, pair=()):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4 if i else 6, 3 if i == num else 4) for i in range(num + 1))
        self.soft, self.pair = soft, pair

    def submodel_axes(self):
        return {
            f"units{i}": [(f"layers.{i}.weight", 0), (f"layers.{i}.bias", 0), (f"layers.{i + 1}.weight", 1)]
            for i in range(len(self.layers) - 1)
        }

    def training_step(self, batch, batch_idx):
        x = batch[0]
        for i, layer in enumerate(self.layers[:-1]):
            x = torch.tanh(layer(x))
            x = x.softmax(-1) if i == self.soft else x
        if self.pair and all(len(self.layers[i].weight) < 4 for i in self.pair):
            x = x + 1
        return F.cross_entropy(self.layers[-1](x), batch[1])


def num_compared(monkeypatch, module):
    """Refute what is wrong of a model; return it, and how many small ones it took."""
    compared = []
    differs = _Proof._differs
    monkeypatch.setattr(
        _Proof, "_differs", lambda proof, spec, noise: compared.append(spec) or differs(proof, spec, noise)
    )
    return refuted(Submodels(module, BATCH), module, BATCH), len(compared)


def test_one_wrong_axis_of_many_is_found_by_halves(monkeypatch):
    found, num = num_compared(monkeypatch, Chain(32, soft=20))
    assert list(found) == ["units20"] and found["units20"].startswith("not proven: ")
    # all, two halves five times, the others to one unit and to a half, and seven subsets of them, of which C(7, 3) > 31:
    # a model that fails is compared once, one that holds twice
    assert num == 1 + 5 * (1 + 2) + 2 + 7


def test_of_two_axes_that_only_fail_together_one_stays(monkeypatch):
    found, num = num_compared(monkeypatch, Chain(8, pair=(1, 6)))
    assert list(found) == ["units6"] and found["units6"].startswith("not proven together with other axes: ")
    # all, two halves that hold, and each of eight alone and beside those before it, of which one fails at once
    assert num == 1 + 2 * 2 + 8 * 2 + 6 * 2 + 1


def test_nothing_is_disturbed():
    module, batch = made("CNN with batch norm")
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    states = torch.get_rng_state(), random.getstate(), str(np.random.get_state())
    refuted(Submodels(module, batch), module, batch)
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1:] == (random.getstate(), str(np.random.get_state()))
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())
    assert module.training and all(p.grad is None for p in module.parameters())


def test_subsets_separate_each_axis_from_each_other():
    names = list("abcde")
    subsets = list(_separating(names))
    assert all(any(a in s and b not in s for s in subsets) for a in names for b in names if a != b)
    assert list(_separating(["a"])) == []


def test_a_name_that_is_no_axis_is_refused():
    with pytest.raises(BadInput, match="axis 'fc9' is not one"):
        Submodels(Net(), BATCH).exclude_axis({"fc9": "because"})


def test_a_run_says_what_a_rate_leaves_and_what_is_not_proven(tmp_path):
    from raafl.runtime.run import simulate

    def wrong():
        return WrongAxes(64, (24,), 10, lr=0.05, momentum=0.5)

    summary, _ = simulate(experiment(tmp_path / "run", "hetero_fl", model=wrong, max_updates=4))
    (warning,) = summary["warnings"]
    assert warning.startswith("axis 'classes' stays whole, not proven: ")
    assert summary["kept_whole"].keys() == {"classes"}
    # 64 x 24 + 24 and 24 x 10 + 10 parameters; half of the units leave 64 x 12 + 12 + 12 x 10 + 10
    assert summary["rates_leave"]["1/2"]["parameters"] == pytest.approx(910 / 1810)
    with pytest.raises(BadInput, match="axis 'classes' stays whole"):
        simulate(experiment(tmp_path / "strict", "hetero_fl", model=wrong, max_updates=4, strict=True))


def made(name):
    """A model of the zoo in single precision, and its batch."""
    model = ZOO[name]
    torch.manual_seed(0)
    free = dict(zip(model.loss.__code__.co_freevars, model.loss.__closure__, strict=True))
    batch = [x.float() if x.is_floating_point() else x for x in free["batch"].cell_contents]
    return model.make().float(), batch


def test_a_module_whose_output_an_axis_crosses_is_not_refuted_for_it():
    class Coder(LightningModule):
        """The step itself calls both halves: what the first gives is cut with the second."""

        def __init__(self):
            super().__init__()
            self.encode = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5))
            self.decode = nn.Linear(5, 3)

        def training_step(self, batch, batch_idx):
            return F.cross_entropy(self.decode(self.encode(batch[0])), batch[1])

    submodels = Submodels(Coder(), BATCH)
    assert [axis.size for axis in submodels.axes.values()] == [8, 5] and refuted(submodels, Coder(), BATCH) == {}


class Attached(LightningModule):
    """Reads its trainer and its optimizer, and changes batches on their way."""

    def __init__(self):
        super().__init__()
        self.net = Net()

    def forward(self, x):
        return self.net(x)

    def on_train_epoch_start(self):
        self.scale = 0.5

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return [2 * batch[0], batch[1]] if self.trainer.training else batch

    def training_step(self, batch):
        lr = self.optimizers().param_groups[0]["lr"]
        return self.scale * lr * (self.trainer.global_step + 1) * F.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1 / self.trainer.estimated_stepping_batches)


def test_a_step_that_reads_its_trainer_is_followed_and_proven():
    module = prepare(Attached())
    submodels = Submodels(module, BATCH)
    assert [axis.size for axis in submodels.axes.values()] == [5]
    assert refuted(submodels, module, BATCH) == {}
    assert not submodels.cost(FULL, 4).guessed


def test_a_step_with_vmap_is_proven():
    class PerSample(LightningModule):
        def __init__(self):
            super().__init__()
            self.inner, self.outer = nn.Linear(6, 8), nn.Linear(8, 3)

        def forward(self, x):
            return self.outer(torch.relu(self.inner(x)))

        def training_step(self, batch, index):
            gradient = torch.func.vmap(torch.func.grad(lambda x: self(x).square().sum()))(batch[0])
            return F.cross_entropy(torch.func.vmap(self)(batch[0]), batch[1]) + gradient.square().mean()

    torch.manual_seed(0)
    module, batch = PerSample(), (torch.randn(4, 6), torch.tensor([0, 1, 2, 0]))
    submodels = Submodels(module, batch)
    assert list(submodels.axes) == ["inner"] and refuted(submodels, module, batch) == {}
