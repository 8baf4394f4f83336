"""Whole runs of models in half precision, which must stand still where nothing is learned, and of complex parameters."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from lightning import LightningModule
from torch import nn
from torch.nn import functional as F

from raafl.algorithms import ALGORITHMS, fed_avg, fed_buff, fed_mezo, fed_opt, fed_raa, hetero_fl, scaffold
from raafl.compression.plan import Compress
from raafl.core.algorithm import Training
from raafl.core.options import Guard
from raafl.data.partition import Dirichlet
from raafl.errors import BadInput
from raafl.parts.protect.privacy import Privacy
from raafl.runfolder import checkpoint_reader
from raafl.runtime.run import simulate
from raafl.runtime.setup import make_model
from raafl.submodel.flat import reals
from tests.helpers.crash import crash
from tests.helpers.methods import each_method, long_except
from tests.helpers.small_runs import equal_replay, experiment, finish

BF16, FP16, CFLOAT = torch.bfloat16, torch.float16, torch.complex64
MEDIAN, TRIMMED = Guard(combine="median"), Guard(combine="trimmed_mean", trim=0.3)


class Half(LightningModule):
    """A hidden layer of 12 units, which submodels cut, between 64 normed inputs and 10 classes; digits are float32."""

    def __init__(self, dtype: torch.dtype = BF16, lr: float = 0.0):
        super().__init__()
        self.lr = lr
        self.norm, self.a, self.b = nn.LayerNorm(64), nn.Linear(64, 12), nn.Linear(12, 10)
        self.to(dtype)

    def forward(self, x):
        return self.b(torch.relu(self.a(self.norm(x.flatten(1).to(self.a.weight.dtype))))).float()

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        return {"loss": F.cross_entropy(self(batch[0]), batch[1])}

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.5)


def fp16() -> LightningModule:
    return Half(FP16)


def learning() -> LightningModule:
    return Half(lr=0.05)


def run(folder, algorithm, model, **fields):
    """The values before and after, of parameters by name."""
    made = experiment(folder / "run", algorithm, model=model, partition=Dirichlet(0.3), **fields)
    before = {name: p.detach().clone() for name, p in make_model(made).named_parameters()}
    finished = finish(made)
    assert finished.summary["updates_merged"] >= 10 and not finished.summary["updates_refused"]
    after = checkpoint_reader.load(finished.folder).state_dict
    return before, {name: after[name] for name in before}


STILL = {
    **{name: (name, {}) for name in ALGORITHMS},
    "fed_mezo": (fed_mezo(lr=1e-12), {}),  # its learning rate is its own
    "fed_opt yogi": (fed_opt("yogi"), {}),
    "fed_buff adam": (fed_buff(3, server_optimizer="adam"), {}),
    "scaffold by arrival": (scaffold(buffer_size=3), {}),
    "median": (fed_avg(), {"guard": MEDIAN}),
    "trimmed mean": (hetero_fl(), {"guard": TRIMMED}),
    "median of deltas": (fed_buff(5), {"guard": MEDIAN}),
    "clipped": (fed_raa(), {"guard": Guard(clip_norm=1e-3, outlier=2.0)}),
    "private": (fed_avg(), {"privacy": Privacy(clip_norm=1.0, noise_multiplier=0.0)}),
    "bf16": (fed_avg(), {"compress": Compress("bf16", "bf16")}),
    "top_k": (fed_avg(), {"compress": Compress("top_k", "top_k")}),
}
del STILL["fed_pm"]  # masks are drawn whatever was learned


def other_runs(cases):
    """Return a parameter for each run that no method of its own names; few are not long."""
    return long_except([name for name in cases if name not in ALGORITHMS], "trimmed mean", "private", "top_k")


@pytest.mark.parametrize("name", [*each_method(but=["fed_pm"], parts=["merge"]), *other_runs(STILL)])
def test_a_half_precision_model_that_learns_nothing_keeps_every_bit(tmp_path, name):
    algorithm, more = STILL[name]
    before, after = run(tmp_path, algorithm, Half, clients=11, max_updates=33, **more)
    for parameter, value in before.items():
        if not parameter.endswith(("_step", "_bits")):  # q_vit's, which begin at what the first batch gives
            assert torch.equal(value, after[parameter]), parameter


@pytest.mark.quick_cases("fed_prox")
@pytest.mark.parametrize("name", ["fed_prox", "hetero_fl"])
def test_half_precision_clients_trained_as_one_batch_give_the_same_bits(tmp_path, name):
    alone, batched = (
        finish(experiment(tmp_path / str(num), name, model=learning, batch_clients=num)).digest for num in (1, 4)
    )
    assert alone == batched


@pytest.mark.quick_cases("fed_buff")
@pytest.mark.parametrize("name", ["fed_avg", "fed_buff", "hetero_fl"])
def test_fifty_clients_in_fp16_keep_every_bit_too(tmp_path, name):
    before, after = run(tmp_path, name, fp16, clients=50, max_updates=50, train=Training(num_epochs=None, num_steps=1))
    assert all(torch.equal(value, after[parameter]) for parameter, value in before.items())


class Large(Half):
    """A parameter of 5000, whose sixteenfold float16 cannot hold."""

    def __init__(self):
        super().__init__(FP16)
        self.large = nn.Parameter(torch.full((3,), 5000.0, dtype=FP16))

    def forward(self, x):
        return super().forward(x) + 0 * self.large.float().sum()


def test_large_weights_in_fp16_are_merged(tmp_path):
    before, after = run(tmp_path, "fed_avg", Large)
    assert torch.equal(before["large"], after["large"])


@pytest.mark.quick_cases("fed_buff")
@pytest.mark.parametrize(
    "algorithm", [fed_buff(buffer_size=5), scaffold(buffer_size=5), fed_opt()], ids=lambda a: a.name
)
def test_what_waits_in_single_precision_survives_a_crash_and_replays(tmp_path, monkeypatch, algorithm):
    fields = {"model": learning, "max_updates": 16, "checkpoint_every": 1, "compress": Compress(up="top_k")}
    whole = finish(experiment(tmp_path / "whole", algorithm, **fields))
    made = experiment(tmp_path / "cut", algorithm, **fields)
    with crash(monkeypatch, 8):
        simulate(made)
    resumed = finish(replace(made, output=None, resume=made.output))
    assert resumed.digest == whole.digest and equal_replay(made, resumed)


# ---- complex parameters are pairs of reals ----


class Waves(LightningModule):
    """A hidden layer of complex weights; the same with pairs of reals, from which each step makes the complex numbers."""

    def __init__(self, is_complex: bool):
        super().__init__()
        shapes = {"w": (12, 64), "v": (12,)}
        for name, shape in shapes.items():
            value = torch.randn(*shape, 2) / 8
            self.register_parameter(name, nn.Parameter(torch.view_as_complex(value) if is_complex else value))
        self.b = nn.Linear(12, 10)

    def forward(self, x):
        w, v = (p if p.is_complex() else torch.view_as_complex(p) for p in (self.w, self.v))
        h = x.flatten(1).to(CFLOAT) @ w.T + v
        return self.b(torch.relu(h.real) + torch.relu(h.imag))

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        return {"loss": self.training_step(batch, batch_idx)}

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.5)

    def submodel_axes(self):
        return {"hidden": [("w", 0), ("v", 0), ("b.weight", 1)]}


def waves() -> LightningModule:
    return Waves(True)


def pairs() -> LightningModule:
    return Waves(False)


BOTH = {
    **{name: (name, {}) for name in ALGORITHMS},
    "fed_opt yogi": (fed_opt("yogi"), {}),
    "median": (fed_avg(), {"guard": MEDIAN}),
    "trimmed mean": (hetero_fl(), {"guard": TRIMMED}),
    "clipped": (fed_buff(), {"guard": Guard(clip_norm=0.05, outlier=3.0)}),
    "private": (fed_avg(), {"privacy": Privacy(clip_norm=0.1, noise_multiplier=0.5)}),
    "private fragments": (fed_raa(trigger="all"), {"privacy": Privacy(clip_norm=0.1, noise_multiplier=0.5)}),
    "batched": (fed_avg(), {"batch_clients": 4}),
    "int8": (fed_avg(), {"compress": Compress("int8", "int8")}),
    "top_k": (scaffold(), {"compress": Compress("top_k", "top_k")}),
}


@pytest.mark.parametrize("name", [*each_method(parts=["merge"]), *other_runs(BOTH)])
def test_complex_parameters_move_as_pairs_of_reals_do(tmp_path, name):
    algorithm, more = BOTH[name]
    before, one = run(tmp_path / "complex", algorithm, waves, **more)
    _, other = run(tmp_path / "pairs", algorithm, pairs, **more)
    for parameter, value in one.items():
        # but for the last digits: the client's product and optimiser round otherwise on complex tensors
        torch.testing.assert_close(reals(value), other[parameter], rtol=0, atol=1e-6)
    if name != "fed_pm":  # which masks the linear layer and freezes all else
        moved = reals(one["w"] - before["w"]).abs().amax((0, 1))
        assert moved.min() > 0


class Layer(Half):
    """Its layers are complex."""

    def __init__(self):
        super().__init__(torch.float32, lr=0.05)
        self.a, self.b = nn.Linear(64, 12, dtype=CFLOAT), nn.Linear(12, 10, dtype=CFLOAT)
        del self.norm

    def forward(self, x):
        return self.b(torch.tanh(self.a(x.flatten(1).to(CFLOAT)))).real

    def submodel_axes(self):
        return {"hidden": [("a.weight", 0), ("a.bias", 0), ("b.weight", 1)]}


def test_the_representation_that_moon_compares_may_be_complex(tmp_path):
    before, after = run(tmp_path, "moon", Layer)
    assert reals(after["a.weight"] - before["a.weight"]).abs().amax((0, 1)).min() > 0


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        ("fed_pm", "parameter 'a.weight' is complex, and fed_pm masks real weights"),
        ("q_vit", "layer 'a' has complex weights, but q_vit quantises only real ones"),
        ("ada_vit", "Linear has complex weights, but ada_vit works with real ones only"),
    ],
)
def test_methods_of_real_weights_refuse_complex_ones_by_name(tmp_path, algorithm, message):
    with pytest.raises(BadInput, match=message):
        finish(experiment(tmp_path / "run", algorithm, model=Layer))
