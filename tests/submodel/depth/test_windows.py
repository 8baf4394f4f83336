"""Depth: windows of trained blocks, exits that end the forward early, the last layers only."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from model_zoo import MLP
from raafl.errors import BadInput
from raafl.submodel import (
    FULL,
    EarlyLogits,
    Spec,
    SpecError,
    Submodels,
    add_exits,
    depth_window,
    last_fraction,
    skeleton,
)
from tests.local.bench import filled
from tests.submodel import zoo
from tests.submodel.models import Blocks
from tests.submodel.networks import CASES, Encoder, output, randomise

STACKS = {
    "bert": "bert.encoder.layer",
    "roberta": "roberta.encoder.layer",
    "distilbert": "distilbert.transformer.layer",
    "vit": "vit.layers",
    "deit": "deit.layers",
    "llama": "model.layers",
    "mistral": "model.layers",
    "qwen2": "model.layers",
    "torchvision_vit": "encoder.layers",
}


def made(name):
    torch.manual_seed(0)
    return CASES[name].make().eval()


def with_exits(name):
    """A model with an exit after its first block, no two tensors alike, and what it is made of."""
    module = add_exits(made(name), [1])
    randomise(module)
    submodels = Submodels(module)
    return module, submodels, submodels.state(module)


class Gated(nn.Module):
    """A block of nobody's library."""

    def __init__(self, width, inner=5):
        super().__init__()
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


def stacks_of(module):
    return {name: len(stack) for name, stack in Submodels(module).stacks.items()}


def test_any_list_of_equal_blocks_is_a_stack():
    assert stacks_of(nn.Sequential(*(Gated(4) for _ in range(3)))) == {"blocks": 3}
    assert stacks_of(nn.ModuleDict({"a": nn.ModuleList([Gated(4), Gated(4)]), "b": nn.Linear(4, 2)})) == {"a": 2}
    # one block, layers without parts, and blocks of other shapes
    assert stacks_of(nn.Sequential(Gated(4))) == stacks_of(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))) == {}
    stages = nn.ModuleList([nn.Sequential(Gated(4), Gated(4)), nn.Sequential(Gated(4), Gated(4, 6))])
    assert stacks_of(stages) == {}
    # experts within a block belong to it
    inner = nn.Sequential(*(nn.Sequential(Gated(4), Gated(4)) for _ in range(2)))
    assert stacks_of(inner) == {"blocks": 2}


@pytest.mark.parametrize("name", STACKS)
def test_a_stack_is_found_by_its_equal_blocks(name):
    submodels = Submodels(made(name))
    assert {stack: (len(found), found.path) for stack, found in submodels.stacks.items()} == {
        STACKS[name]: (2, STACKS[name])
    }


@pytest.mark.parametrize("name", STACKS)
def test_blocks_above_are_absent_and_an_exit_ends_the_forward(name):
    module, submodels, full = with_exits(name)
    stack = submodels.stacks[STACKS[name]]
    shrunk = filled(submodels, depth_window(submodels, 0, 1, exit="exit1"), full)
    inputs = CASES[name].inputs()
    # by hand: the second block passes its input on, and the last layers have the exit's values
    reference = copy.deepcopy(module)
    reference.get_submodule(stack.path)._modules[stack.names[1]] = Passes()
    for place, path in zip(submodels.exits["exit1"].instead_of, submodels.exits["exit1"].paths, strict=True):
        reference.get_submodule(place).load_state_dict(reference.get_submodule(path).state_dict())
    assert torch.equal(output(shrunk.module.eval(), inputs), output(reference.eval(), inputs))
    assert not torch.equal(output(shrunk.module, inputs), output(module, inputs))
    output(shrunk.module, inputs).sum().backward()
    names = dict(shrunk.module.named_parameters())
    assert set(names) == set(shrunk.present.layout.by_name)
    assert not [n for n in names if n.startswith(stack.block(1)) or n.startswith(submodels.exits["exit1"].instead_of)]
    assert all(
        names[f"{path}.{n}"].grad is not None
        for path in submodels.exits["exit1"].paths
        for n, _ in module.get_submodule(path).named_parameters()
    )


class Passes(nn.Module):
    attention_type = "full_attention"

    def forward(self, hidden_states, *args, **kwargs):
        return hidden_states


@pytest.mark.parametrize("name", STACKS)
def test_a_window_freezes_what_lies_below_which_runs_without_a_graph(name):
    _, submodels, full = with_exits(name)
    stack = submodels.stacks[STACKS[name]]
    shrunk = filled(submodels, depth_window(submodels, 1, 2), full)
    graphs = []
    for index in range(2):
        block = shrunk.module.get_submodule(stack.block(index))
        block.register_forward_hook(lambda layer, args, answer: graphs.append(answer.requires_grad))
    output(shrunk.module.train(), CASES[name].inputs()).sum().backward()
    assert graphs == [False, True]
    trained = {n for n, p in shrunk.module.named_parameters() if p.requires_grad}
    assert trained == {entry.name for entry in shrunk.trained.layout.entries}
    assert all(n.startswith(stack.block(1)) or not n.startswith(stack.path) for n in trained)
    assert {n for n in full.layout.by_name if n.startswith(stack.block(1))} <= trained
    assert not any(n.startswith("exits") for n in shrunk.present.layout.by_name)
    first = next(iter(submodels.parameters))  # of the embeddings
    assert first not in trained and first in shrunk.present
    assert shrunk.trained.num_bytes < shrunk.present.num_bytes


def test_a_window_from_the_first_block_trains_the_embeddings_as_well():
    _, submodels, _ = with_exits("vit")
    spec = depth_window(submodels, 0, 1, exit="exit1")
    names = {entry.name for entry in submodels.layout(spec, "trained").entries}
    assert "vit.embeddings.cls_token" in names and "exits.exit1.1.weight" in names and "classifier.weight" not in names
    assert str(spec) == "vit.layers[0] trains exits,vit.embeddings,vit.layers.0 exits exit1"
    whole = depth_window(submodels, 0, 2)
    assert submodels.normal(whole).blocks == () and whole.exits == ()


def test_a_window_and_a_width_at_once():
    _, submodels, full = with_exits("llama")
    spec = depth_window(submodels, 0, 1, exit="exit1", kept={"model.layers.0.heads": [1], "model.layers.1.ffn": [0]})
    small = filled(submodels, spec, full).module
    assert small.model.layers[0].self_attn.q_proj.out_features == 4
    assert output(small, CASES["llama"].inputs()).shape == (2, 9, 23)


@pytest.mark.parametrize("name", ["bert", "vit", "llama"])
def test_exits_are_as_wide_as_the_model(name):
    submodels = Submodels(add_exits(made(name), [1]), residual_width=True)
    window = depth_window(submodels, 0, 1, exit="exit1", kept={"width": [0, 1, 2, 5, 7, 8]})
    shrunk = submodels.shrink(window)
    for buffer in shrunk.present.buffers.values():
        buffer.fill_(0.5)
    assert output(shrunk.module, CASES[name].inputs()).shape == output(made(name), CASES[name].inputs()).shape


def test_a_tensor_tied_to_one_below_the_window_is_frozen_with_it():
    submodels = Submodels(made("llama_tied"))
    names = {e.name for e in submodels.layout(depth_window(submodels, 1, 2), "trained").entries}
    assert "model.embed_tokens.weight" not in names and "model.norm.weight" in names
    submodels = Submodels(made("bert_tied"))
    names = {e.name for e in submodels.layout(depth_window(submodels, 1, 2), "trained").entries}
    assert "bert.embeddings.word_embeddings.weight" not in names and "cls.predictions.transform.dense.weight" in names


def test_exits_are_those_of_the_largest_stack():
    model = made("bert")
    model.adapters = nn.ModuleList([Gated(4), Gated(4)])
    add_exits(model, [1])
    assert model.submodel_exits_after == {"exit1": "bert.encoder.layer.0"}


def test_an_exit_of_a_language_model_shares_the_vocabulary():
    _, submodels, _ = with_exits("llama_tied")
    assert [n for n in submodels.parameters if n.startswith("exits")] == ["exits.exit1.0.weight"]


def test_qwen_numbers_the_blocks_that_are_there():
    module = CASES["qwen2"].make()
    module.config.layer_types = ["sliding_attention", "full_attention"]
    submodels = Submodels(module)
    small = filled(submodels, Spec.select(blocks={"model.layers": [1]}), submodels.state(module)).module
    assert small.config.num_hidden_layers == 1 and small.config.layer_types == ["full_attention"]
    assert module.config.num_hidden_layers == 2
    (layer,) = small.model.layers
    assert layer.self_attn.layer_idx == 0 and small.model.layers[0] is layer
    assert output(small, CASES["qwen2"].inputs()).shape == (2, 9, 23)
    generated = small.generate(torch.ones(1, 3, dtype=torch.long), max_new_tokens=2, do_sample=False, use_cache=True)
    assert generated.shape == (1, 5)


def test_exits_are_the_same_under_a_skeleton():
    with skeleton():
        module = add_exits(CASES["bert"].make(), [1])
    assert Submodels(module).layout().fingerprint == with_exits("bert")[1].layout().fingerprint


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: add_exits(made("albert"), [1]),
            "AlbertForSequenceClassification is of no type whose last layers are known",
        ),
        (lambda: add_exits(made("vit"), [2]), "no exit after 2 of 2 blocks: give 1 to 1"),
        (lambda: add_exits(add_exits(made("vit"), [1]), [1]), "has exits already"),
        (lambda: depth_window(Submodels(made("vit")), 1, 3), "window is blocks 1 to 3 of 'vit.layers', which has 2"),
        (lambda: depth_window(Submodels(made("vit")), 1, 1), "window is blocks 1 to 1"),
        (lambda: depth_window(Submodels(made("vit")), 0, 1, exit="exit1"), "it has none"),
        (
            lambda: depth_window(Submodels(made("vit")), 0, 1, stack="layers"),
            "stack is 'layers'.*did you mean 'vit.layers'",
        ),
        (lambda: depth_window(Submodels(MLP(4, (3,), 2)), 0, 1), "has no stack of blocks: declare `submodel_blocks`"),
        (lambda: last_fraction(Submodels(MLP(4, (3,), 2)), 0.0), "share is 0.0"),
    ],
)
def test_mistakes_are_named(call, message):
    with pytest.raises(BadInput, match=message):
        call()


class Declared(Blocks):
    """A model of a user's own with an exit that takes the place of its head."""

    def __init__(self):
        super().__init__()
        self.early = nn.Linear(4, 2)

    def submodel_exits(self):
        return {"early": {"head": "early"}}


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = Declared()

    def forward(self, x):
        return self.net(x)


def test_a_models_own_exit_takes_the_place_of_its_head():
    module = Outer()
    submodels = Submodels(module)
    assert list(submodels.stacks) == ["net.depth"] and list(submodels.exits) == ["net.early"]
    full = submodels.state(module)
    spec = depth_window(submodels, 1, 2, exit="net.early")
    assert spec == Spec.select(blocks={"net.depth": [0, 1]}, trained=["net.early", "net.stack.1"], exits=["net.early"])
    shrunk = filled(submodels, spec, full)
    x = torch.randn(3, 4)
    hidden = x
    for block in module.net.stack[:2]:
        hidden = hidden + block(hidden)
    assert torch.equal(shrunk.module(x), module.net.early(hidden))
    again = copy.deepcopy(shrunk.module)
    assert torch.equal(again(x), shrunk.module(x)) and again.net.head.weight is again.net.early.weight
    assert "net.head.weight" not in shrunk.present and "net.early.weight" in shrunk.trained
    both = filled(submodels, FULL, full).module
    assert torch.equal(both(x), module(x))
    module.net.submodel_exits = {"early": {"head": "nothing"}}
    with pytest.raises(SpecError, match="names 'nothing' for 'early', which is not a module"):
        Submodels(module).exits  # noqa: B018


def test_of_several_exits_the_last_has_the_place():
    class Two(Declared):
        def __init__(self):
            super().__init__()
            self.other = nn.Linear(4, 2)

        def submodel_exits(self):
            return {"early": {"head": "early"}, "other": {"head": "other"}}

    submodels = Submodels(Two())
    shrunk = submodels.shrink(Spec.select(exits=["early", "other"]))
    assert shrunk.module.head.weight is shrunk.module.other.weight
    assert "early.weight" in shrunk.present and "head.weight" not in shrunk.present


@pytest.mark.parametrize("name", STACKS)
def test_logits_of_an_exit_are_those_of_the_model_that_ends_there(name):
    module, submodels, full = with_exits(name)
    inputs = CASES[name].inputs()
    early = EarlyLogits(nn.Sequential(module))
    module(**inputs)
    (logits,) = early.logits().values()
    small = filled(submodels, depth_window(submodels, 0, 1, exit="exit1"), full).module.eval()
    torch.testing.assert_close(logits, output(small, inputs))
    assert EarlyLogits(small).names == []  # what the model itself answers
    logits.sum().backward()
    assert all(p.grad is not None for p in module.exits.parameters())
    with pytest.raises(BadInput, match="no part of Linear has exits"):
        EarlyLogits(nn.Linear(1, 1))


def test_a_block_that_shares_its_tensors_with_one_that_stays_cannot_go_alone():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            block = nn.Linear(3, 3)
            self.stack = nn.ModuleList([block, block, nn.Linear(3, 3)])

        def submodel_blocks(self):
            return {"depth": "stack"}

        def forward(self, x):
            for block in self.stack:
                x = block(x)
            return x

    submodels = Submodels(Shared())
    with pytest.raises(SpecError, match=r"leaves out 'stack.0.weight', which is tied to 'stack.1.weight'"):
        submodels.normal(Spec.select(blocks={"depth": [1]}))
    small = submodels.shrink(Spec.select(blocks={"depth": [0, 2]}))
    assert len(small.module.stack) == 2 and len(small.present) == 4


def test_an_encoder_of_torch_loses_its_first_block():
    torch.manual_seed(0)
    module = Encoder()
    submodels = Submodels(module)
    small = filled(submodels, Spec.select(blocks={"encoder.layers": [1]}), submodels.state(module)).module.eval()
    inputs = CASES["encoder"].inputs()
    x = module.embed(inputs["input_ids"])
    module.eval()
    x = module.encoder.layers[1](x, src_key_padding_mask=inputs["attention_mask"] == 0)
    torch.testing.assert_close(small(**inputs), module.head(module.encoder.norm(x)[:, 0]))


def test_the_last_layers_that_hold_a_share_of_the_parameters_train():
    submodels = Submodels(MLP(8, (7, 5), 3))
    sizes = {"layers.1": 8 * 7 + 7, "layers.3": 7 * 5 + 5, "layers.5": 5 * 3 + 3}
    assert list(submodels.parameters.values()) == [56, 7, 35, 5, 15, 3]
    assert last_fraction(submodels, 0.001) == Spec.select(trained=["layers.5"])
    just = (sizes["layers.3"] + sizes["layers.5"]) / sum(sizes.values())
    assert last_fraction(submodels, just) == Spec.select(trained=["layers.3", "layers.5"])
    assert last_fraction(submodels, just - 0.01) == Spec.select(trained=["layers.5"])
    assert last_fraction(submodels, 1.0) == FULL


def test_a_block_of_a_transformer_is_one_layer():
    submodels = Submodels(made("vit"))
    sizes, total = submodels.parameters, sum(submodels.parameters.values())
    above = sum(n for name, n in sizes.items() if name.startswith(("vit.layernorm", "classifier")))
    block = sum(n for name, n in sizes.items() if name.startswith("vit.layers.1."))
    assert last_fraction(submodels, (above + block) / total).trained == ("classifier", "vit.layernorm", "vit.layers.1")
    assert last_fraction(submodels, (above + block - 1) / total).trained == ("classifier", "vit.layernorm")


SEQUENTIAL = {
    "MLP": [["layers.1"], ["layers.3"], ["layers.5"]],
    "CNN": [["conv1"], ["conv2"], ["fc1"], ["fc2"], ["fc3"]],
    "ViT": [
        ["model.vit.embeddings"],
        *(["model.vit.layers.0"], ["model.vit.layers.1"], ["model.vit.layernorm"], ["model.classifier"]),
    ],
    "KeywordSpotter": [["conv1"], ["conv2"], ["gru"], ["fc1"], ["fc2"]],
}
"""Layers in the order in which they run."""


@pytest.mark.parametrize("share", [0.001, 0.1, 0.3, 0.6, 0.9, 1.0])
@pytest.mark.parametrize("name", SEQUENTIAL)
def test_the_last_fraction_of_the_layers_trains_and_the_others_run_forward_only(name, share):
    _, submodels, full = zoo.built(name)
    sizes = [sum(n for key, n in submodels.parameters.items() if zoo.lies_in(key, paths)) for paths in SEQUENTIAL[name]]
    most = share * sum(sizes)
    # from the end on, as many as fit; the last one always
    num = max(1, max(k for k in range(len(sizes) + 1) if sum(sizes[len(sizes) - k :]) <= most + 1e-6))
    spec = last_fraction(submodels, share)
    trained = [path for paths in SEQUENTIAL[name][-num:] for path in paths]
    shrunk = filled(submodels, spec, full)
    names = {key for key, parameter in shrunk.module.named_parameters() if parameter.requires_grad}
    assert names == {key for key in submodels.parameters if zoo.lies_in(key, trained)}
    assert not any("exits" in key for key in shrunk.present.layout.by_name)
    assert {entry.name for entry in shrunk.trained.layout.entries} == names
    before = shrunk.present.clone()
    zoo.one_step(name, shrunk.module)
    moved = {key for key, value in shrunk.present.items() if not torch.equal(value, before[key])}
    assert moved <= names and {key for key in names if before[key].dim() > 1 and "pooler" not in key} <= moved
