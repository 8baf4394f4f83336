"""A small module's own code asks for the sizes that the small module has: attributes set, calls corrected."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from raafl.submodel import Spec, Submodels
from raafl.submodel.cut.sizes import Corrected, Extent, put, shallow
from raafl.submodel.prove.proof import refuted
from tests.local.bench import filled
from tests.submodel.architectures import ARCHITECTURES


def test_an_extent_is_a_sum_of_products():
    extent = Extent.of({("heads",): 8, (): 3, ("ffn", "heads"): 2, ("gone",): 0})
    assert extent({"heads": 2, "ffn": 5}) == 8 * 2 + 3 + 2 * 2 * 5
    assert extent.axes == {"heads", "ffn"}
    assert extent == Extent.of({("ffn", "heads"): 2, ("heads",): 8, (): 3})


class Config:
    def __init__(self) -> None:
        self.heads, self.name = 4, "shared"


def test_what_others_share_is_copied_before_it_is_changed():
    module = nn.ModuleList([nn.Identity(), nn.Identity()])
    config, table = Config(), {"units": 8}
    for part in module:
        part.config, part.table, part.size = config, table, (4, 5)
    put(
        dict(module.named_modules()),
        {("0", ("config", "heads")): 2, ("0", ("table", "units")): 3, ("0", ("size", 1)): 1},
    )
    assert (module[0].config.heads, module[0].config.name, module[0].table, module[0].size) == (
        2,
        "shared",
        {"units": 3},
        (4, 1),
    )
    assert (module[1].config.heads, module[1].table, module[1].size) == (4, {"units": 8}, (4, 5))
    assert shallow(config).name == "shared"


def small_of(name, count=1):
    torch.manual_seed(0)
    architecture = ARCHITECTURES[name]
    module, batch = architecture.make(), architecture.batch()
    submodels = Submodels(module, batch)
    spec = Spec.select({axis.name: range(min(count, axis.size - 1)) for axis in submodels.axes.values()})
    shrunk = filled(submodels, spec, submodels.state(module))
    return submodels, shrunk.module.eval(), batch


def test_an_attribute_that_code_hands_on_follows_its_axis():
    _, small, _ = small_of("GPT-2")
    attention = small.model.transformer.h[0].attn
    assert (attention.split_size, attention.c_attn.nf) == (8, 24)  # one head of 8, three of them fused
    assert not any("forward" in part.__dict__ for part in small.modules())  # nothing is to be corrected


def test_sizes_that_code_works_out_are_corrected_where_they_are_handed_on():
    submodels, small, _ = small_of("nanoGPT")
    attention = small.model.blocks[0]["part0"][1]
    assert attention.n_head == 4 and attention.n_embd == 8  # the scale hangs on the number of heads, and stays
    assert isinstance(attention.__dict__["forward"], Corrected)
    assert not any("forward" in part.__dict__ for part in small.model.blocks[0]["part1"].modules())
    assert submodels.discovered.sizes.calls.keys() == {(f"model.blocks.{i}.part0.1", "forward") for i in (0, 1)}


@pytest.mark.parametrize("name", ["nanoGPT", "sizes in the code", "cells by hand", "Phi-3"])
def test_a_corrected_module_runs_after_copying_and_pickling(name):
    _, small, batch = small_of(name, 2)
    x = batch["input_ids"] if isinstance(batch, dict) else batch[0]

    def answer(module):
        given = module(x)
        return given[0] if not isinstance(given, torch.Tensor) else given

    expected = answer(small)
    for other in (copy.deepcopy(small), pickle.loads(pickle.dumps(small))):
        assert torch.equal(answer(other), expected)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.zero_()
        assert torch.equal(answer(small), expected)  # they share nothing


def test_batches_of_another_size_run():
    _, small, _ = small_of("nanoGPT")
    assert small(torch.randint(3, 40, (5, 3))).shape == (5, 3, 40)


class BatchOfHeads(nn.Module):
    """Multiplies the heads into the batch, as BoTNet does: ``view(batch * heads, features of one, positions)``."""

    def __init__(self):
        super().__init__()
        self.num_heads, self.features = 4, 8
        self.qkv, self.out = nn.Conv1d(12, 96, 1), nn.Linear(32, 3)

    def forward(self, x):
        parts = self.qkv(x).split(self.num_heads * self.features, dim=1)
        q, k, v = (part.reshape(len(x) * self.num_heads, self.features, -1) for part in parts)
        mixed = torch.softmax(q.transpose(1, 2) @ k / 3, dim=-1) @ v.transpose(1, 2)
        return self.out(mixed.transpose(1, 2).reshape(len(x), self.num_heads * self.features, -1).mean(2))

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self(batch[0]), batch[1])


def test_heads_that_are_multiplied_into_the_batch_are_cut():
    batch = [torch.randn(2, 12, 5), torch.tensor([0, 2])]
    submodels = Submodels(BatchOfHeads(), batch)
    assert [axis.size for axis in submodels.axes.values()] == [4]
    assert refuted(submodels, BatchOfHeads(), batch) == {}
    small = submodels.shrink(Spec.select({name: [1, 3] for name in submodels.axes})).module
    assert (small.num_heads, small.features, tuple(small.qkv.weight.shape)) == (2, 8, (48, 12, 1))
