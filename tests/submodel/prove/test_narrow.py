"""Large models are proven on a narrow copy."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from raafl.algorithms import ALGORITHMS
from raafl.config.experiment import Experiment
from raafl.data import Digits, FederatedData, Iid
from raafl.parts.select.rate_select import RateSelect
from raafl.runtime.setup import proven
from raafl.submodel import Submodels, skeleton
from raafl.submodel.prove import proof
from raafl.submodel.prove.narrow import narrowed, num_values
from tests.submodel.prove.test_proof import BATCH, Declared, Net, made


@pytest.mark.quick_cases("VGG11", "BERT")
@pytest.mark.parametrize("name", ["VGG11", "ViT", "BERT", "LLaMA"])
def test_a_narrow_copy_has_the_axes_of_the_model_and_is_proven_in_its_place(name, monkeypatch):
    module, batch = made(name)
    submodels = Submodels(module, batch)
    narrow, _ = narrowed(submodels, module, batch)
    assert narrow.axes.keys() == submodels.axes.keys()
    assert all(axis.size == max(2, submodels.axes[n].size // 16) for n, axis in narrow.axes.items())
    assert num_values(narrow) < num_values(submodels)
    monkeypatch.setattr(proof, "LARGE", 0)
    monkeypatch.setattr(proof, "MOST_VALUES", num_values(submodels) - 1)
    with skeleton():
        bare = type(module)(**module.hparams) if module.hparams else module
    assert proof.refuted(Submodels(bare, batch), bare, batch) == {}


@pytest.mark.quick_cases("nf4")
@pytest.mark.parametrize("base", ["fp32", "nf4"])
def test_of_a_model_with_adapters_the_frozen_base_is_narrow_and_ranks_stay(base, monkeypatch):
    from model_zoo import HFCausalLM
    from model_zoo.lora import LoRA

    architecture = {
        "model_type": "llama",
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": 50,
    }
    module = HFCausalLM(
        pretrained=False, architecture=architecture, lora=LoRA(rank=4, target_modules="all-linear", base=base)
    )
    tokens = torch.arange(24).reshape(2, 12)
    batch = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens}
    submodels = Submodels(module, batch)
    narrow, _ = narrowed(submodels, module, batch)
    assert {name: axis.size for name, axis in narrow.axes.items()} == dict.fromkeys(submodels.axes, 4)
    shapes = {name.rpartition("model.")[2]: entry.shape for name, entry in narrow.layout().by_name.items()}
    assert shapes["layers.1.mlp.up_proj.base_layer.weight"] == (256 // 16, 128 // 16)
    assert shapes["layers.1.mlp.up_proj.lora_A.default.weight"] == (4, 128 // 16)
    assert shapes["layers.1.self_attn.q_proj.base_layer.weight"] == (
        2 * 2 * 16,
        128 // 16,
    )  # two of four pairs of heads
    monkeypatch.setattr(proof, "LARGE", 0)
    monkeypatch.setattr(proof, "MOST_VALUES", num_values(submodels) - 1)
    assert proof.refuted(submodels, module, batch) == {}


def test_where_a_narrow_copy_does_not_run_the_model_itself_is_tried(monkeypatch):
    monkeypatch.setattr(proof, "LARGE", 0)  # a narrow copy has two of the three classes that the batch names
    assert proof.refuted(Submodels(Declared(), BATCH), Declared(), BATCH).keys() == {"classes"}


def test_a_model_too_large_for_a_copy_is_kept_whole(monkeypatch):
    monkeypatch.setattr(proof, "LARGE", 0)
    monkeypatch.setattr(proof, "MOST_VALUES", 1)
    monkeypatch.setattr(proof, "narrowed", lambda *_: None)
    (reason,) = proof.refuted(Submodels(Net(), BATCH), Net(), BATCH).values()
    assert "more than 1 parameters" in reason


def test_what_q_vit_adds_goes_by_width_and_refutes_no_axis():
    algorithm = ALGORITHMS["q_vit"](submodel=RateSelect("leading", 0.5))
    experiment = Experiment(model=model_of, data=Digits, algorithm=algorithm, clients=2, max_updates=1)
    found = proven(experiment, algorithm.local.prepare(model_of()), FederatedData(Digits(), Iid(), 2, 0))
    assert found.axes and found.refuted == {}


def model_of():
    import model_zoo

    torch.manual_seed(0)
    return model_zoo.MLP(64, (12,), 10, lr=0.1)


class Spectral(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(8, 12),
            nn.ReLU(),
            nn.utils.parametrizations.spectral_norm(nn.Linear(12, 6)),
            nn.ReLU(),
            nn.Linear(6, 3),
        )

    def training_step(self, batch, index):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])


def test_buffers_that_are_computed_from_parameters_have_values_where_those_have_none():
    """A plan makes the model without values; the vectors of a spectral norm, at 0, would divide by 0."""
    batch = (torch.randn(4, 8), torch.zeros(4, dtype=torch.long))
    real = Spectral()
    with skeleton():
        bare = Spectral()
    for module in (real, bare):
        submodels = Submodels(module, batch)
        assert sorted(axis.size for axis in submodels.axes.values()) == [6, 12]
        assert proof.refuted(submodels, module, batch) == {}
