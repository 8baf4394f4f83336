"""The rank of a LoRA layer is an axis; a lower rank is the full model with the others zeroed."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")
pytest.importorskip("peft")

import peft

from model_zoo import HFCausalLM
from model_zoo.lora import LoRA
from raafl.submodel import FULL, Member, Spec, Submodels, depth_window
from tests.helpers.lora_models import LAYERS, lora_bert, trained_bytes
from tests.model_zoo.test_huggingface import LLAMA

BATCH = [
    torch.randint(1, 30, (3, 6), generator=torch.Generator().manual_seed(0)),
    torch.ones(3, 6, dtype=torch.int64),
    torch.tensor([0, 1, 1]),
]


class Own(nn.Module):
    """A user's own model: an embedding, a convolution and a linear layer, adapted by peft itself."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(30, 8)
        self.conv = nn.Conv1d(8, 4, 3, padding=1)
        self.head = nn.Linear(4, 2)
        config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["embed", "conv", "head"])
        peft.inject_adapter_in_model(config, self)

    def forward(self, tokens):
        return self.head(self.conv(self.embed(tokens).transpose(1, 2)).relu().mean(2))


def causal():
    return HFCausalLM(architecture=LLAMA, lora=LoRA(rank=4, alpha=8.0, target_modules="all-linear"))


def made(make, dtype=torch.float32):
    torch.manual_seed(0)
    module = make().to(dtype).eval()
    for name, parameter in module.named_parameters():  # peft starts adapters where they do nothing
        if "lora_" in name:
            nn.init.normal_(parameter, std=0.3)
    submodels = Submodels(module)
    submodels.attach_base(module)
    return module, submodels


def small_of(module, submodels, spec, **options):
    shrunk = submodels.shrink(spec, base=submodels.base, **options)
    submodels.plan(spec, "sent").gather(submodels.state(module), out=shrunk.present)
    return shrunk.module


def zeroed(module, submodels, spec):
    """The slow reference: ranks that are not kept are zero, in A and in B."""
    reference = copy.deepcopy(module)
    with torch.no_grad():
        for name, kept in spec.kept:
            for member in submodels.axes[name].members:
                tensor = reference.get_parameter(member.name).movedim(member.dim, 0)
                tensor[[i for i in range(len(tensor)) if i not in kept]] = 0
    return reference


def test_the_axes_are_the_ranks():
    _, submodels = made(lora_bert)
    assert [(axis.name, axis.size) for axis in submodels.axes.values()] == [(f"{layer}.rank", 8) for layer in LAYERS]
    for layer in LAYERS:
        assert submodels.axes[f"{layer}.rank"].members == (
            Member(f"{layer}.lora_A.default.weight", 0),
            Member(f"{layer}.lora_B.default.weight", 1),
        )
    assert submodels.problem is None and list(submodels.stacks) == ["model.bert.encoder.layer"]


@pytest.mark.parametrize("rank", [8, 4, 2, 1])
def test_only_adapters_and_head_are_sent(rank):
    _, submodels = made(lora_bert)
    spec = Spec.select({name: range(rank) for name in submodels.axes})
    cost = submodels.cost(spec)
    assert cost.down_bytes == cost.up_bytes == trained_bytes(rank)


CASES = {"BERT": (lora_bert, BATCH[:2]), "LLaMA": (causal, BATCH[:1]), "own": (Own, BATCH[:1])}
KEPT = {
    "first half": lambda size: range(size // 2),
    "one": lambda size: [size - 1],
    "every other": lambda size: range(0, size, 2),
}


@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("name", CASES)
def test_a_lower_rank_is_the_full_model_with_the_other_ranks_zeroed(name, kept):
    make, inputs = CASES[name]
    module, submodels = made(make, torch.float64)
    spec = Spec.select({name: list(KEPT[kept](axis.size)) for name, axis in submodels.axes.items()})
    small, reference = small_of(module, submodels, spec).eval(), zeroed(module, submodels, spec)
    output, expected = small(*inputs), reference(*inputs)
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(output, module(*inputs), atol=1e-3)
    for one in (output, expected):
        one.square().sum().backward()
    wanted = dict(reference.named_parameters())
    for axis in submodels.axes.values():
        for member in axis.members:
            indices = torch.tensor(dict(spec.kept)[axis.name])
            gradient = wanted[member.name].grad.index_select(member.dim, indices)
            torch.testing.assert_close(small.get_parameter(member.name).grad, gradient, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_the_whole_spec_gives_the_same_outputs_bit_for_bit(name):
    make, inputs = CASES[name]
    module, submodels = made(make)
    assert torch.equal(small_of(module, submodels, FULL).eval()(*inputs), module(*inputs))


def test_a_small_layer_knows_its_rank_and_keeps_the_scaling():
    module, submodels = made(lora_bert)
    spec = Spec.select({f"{LAYERS[0]}.rank": range(3)})
    small = small_of(module, submodels, spec)
    first, second = (small.get_submodule(layer) for layer in LAYERS[:2])
    assert (first.r, second.r, module.get_submodule(LAYERS[0]).r) == ({"default": 3}, {"default": 8}, {"default": 8})
    assert first.scaling == second.scaling == {"default": 2.0}  # alpha / rank of the full model: 16 / 8
    assert (first.lora_A["default"].out_features, first.lora_B["default"].in_features) == (3, 3)


def test_ranks_that_are_left_are_not_scaled_up():
    module, submodels = made(lora_bert)
    spec = Spec.select({name: range(2) for name in submodels.axes})
    plain, rescaled = (small_of(module, submodels, spec, rescale=value).train() for value in (False, True))
    assert torch.equal(plain(*BATCH[:2]), rescaled(*BATCH[:2]))


def test_a_rank_of_one_is_no_axis():
    _, submodels = made(lambda: lora_bert(lora=LoRA(rank=1)))
    assert submodels.axes == {} and set(submodels.kept_whole.values()) == {"it has one unit"}


def test_depth_goes_with_it():
    module, submodels = made(lora_bert)
    spec = depth_window(submodels, 0, 1, kept={f"{LAYERS[0]}.rank": range(4)})
    small = small_of(module, submodels, spec)
    present = {name for name, _ in small.named_parameters()}
    assert not any(".layer.1." in name for name in present) and f"{LAYERS[0]}.lora_A.default.weight" in present
    assert small(*BATCH[:2]).shape == (3, 2)


def adalora():
    net = nn.Sequential(nn.Linear(5, 6), nn.Unflatten(1, (2, 3)), nn.Conv1d(2, 4, 1), nn.Flatten(), nn.Linear(12, 2))
    config = peft.AdaLoraConfig(init_r=4, target_r=2, total_step=10, lora_alpha=8, target_modules=["0", "4"])
    return peft.get_peft_model(net, config)


def test_adalora_holds_singular_values_beside_its_factors():
    module, submodels = made(adalora)
    first = "base_model.model.0"
    assert submodels.axes[f"{first}.rank"].members == (
        Member(f"{first}.lora_A.default", 0),
        Member(f"{first}.lora_B.default", 1),
        Member(f"{first}.lora_E.default", 0),
    )
    spec = Spec.select({f"{first}.rank": [1, 3], "base_model.model.4.rank": [0]})
    small, x = small_of(module, submodels, spec).eval(), torch.randn(3, 5)
    torch.testing.assert_close(small(x), zeroed(module, submodels, spec)(x))
    assert not torch.equal(small(x), module(x))
    assert small.get_submodule(first).r == {"default": 2}
