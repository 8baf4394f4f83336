"""Transformers and recurrent nets: heads, feed-forward units and residual width by the type of the block; shared tensors."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from raafl.errors import BadInput
from raafl.submodel import FULL, Member, Spec, SpecError, Submodels, skeleton
from tests.local.bench import filled
from tests.submodel.cut.test_shrink import zeroed
from tests.submodel.models import slow_masks
from tests.submodel.networks import CASES, COVERING, SLOW, WORDS, built, hugging_face, output, words


def test_units_of_a_gated_feed_forward_part_go_from_all_three_layers():
    module, submodels, full = built("llama")
    small = filled(submodels, Spec.select({"model.layers.1.ffn": [1, 2, 6]}), full).module
    mlp, wide = small.model.layers[1].mlp, module.model.layers[1].mlp
    assert torch.equal(mlp.gate_proj.weight, wide.gate_proj.weight[[1, 2, 6]])
    assert torch.equal(mlp.up_proj.weight, wide.up_proj.weight[[1, 2, 6]])
    assert torch.equal(mlp.down_proj.weight, wide.down_proj.weight[:, [1, 2, 6]])
    assert mlp.down_proj.in_features == 3


def test_small_blocks_count_their_own_heads():
    _, submodels, full = built("bert")
    attention = (
        filled(submodels, Spec.select({"bert.encoder.layer.1.heads": [2]}), full).module.bert.encoder.layer[1].attention
    )
    assert (attention.self.query.out_features, attention.output.dense.in_features) == (4, 4)
    _, submodels, full = built("distilbert")
    small = filled(submodels, Spec.select({"distilbert.transformer.layer.0.heads": [0, 1]}), full).module
    attention = small.distilbert.transformer.layer[0].attention
    assert attention.q_lin.out_features == 8
    _, submodels, full = built("vit")
    attention = filled(submodels, Spec.select({"vit.layers.0.heads": [1]}), full).module.vit.layers[0].attention
    assert (attention.head_dim, attention.o_proj.in_features) == (4, 4)
    _, submodels, full = built("encoder")
    attention = (
        filled(submodels, Spec.select({"encoder.layers.0.heads": [1, 2]}), full).module.encoder.layers[0].self_attn
    )
    assert (attention.num_heads, attention.head_dim, attention.embed_dim) == (2, 4, 12)
    assert attention.in_proj_weight.shape == (24, 12)
    _, submodels, full = built("gru")
    rnn = filled(submodels, Spec.select({"conv": [0, 3], "rnn": [0, 1, 4]}), full).module.rnn
    assert (rnn.input_size, rnn.hidden_size, rnn.weight_ih_l1.shape) == (2, 3, (9, 3))


@pytest.mark.quick_cases(*(name for name in COVERING if CASES[name].width is not None))
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.width is not None])
def test_the_residual_width_shrinks_where_that_is_asked_for(name):
    assert CASES[name].width not in built(name)[1].axes
    module, submodels, full = built(name, residual_width=True)
    assert {axis.name: axis.size for axis in submodels.axes.values()} == {**CASES[name].axes, CASES[name].width: 12}
    heads, ffn = (next(axis for axis in CASES[name].axes if axis.endswith(end)) for end in (".heads", ".ffn"))
    spec = Spec.select({CASES[name].width: [0, 1, 4, 5, 8, 11], heads: [0, 2], ffn: range(3)})
    shrunk = filled(submodels, spec, full)
    inputs = CASES[name].inputs()
    answer = output(shrunk.module.train(), inputs)
    assert answer.shape == output(module, inputs).shape
    answer.square().sum().backward()
    for parameter_name, parameter in shrunk.module.named_parameters():
        assert (
            parameter.shape
            == full[parameter_name][slow_masks(submodels, spec)[parameter_name]].view(parameter.shape).shape
        )
    # a norm spans the width, so that it equals no zeroed model; but with all of it kept nothing changes
    whole = filled(submodels, Spec.select({CASES[name].width: range(12)}), full).module.eval()
    assert torch.equal(output(whole, inputs), output(module.eval(), inputs))


def test_the_residual_width_of_hidden_states_that_a_head_of_ones_own_reads():
    _, submodels, _ = built("held", residual_width=True)
    assert Member("head.0.weight", 1) in submodels.axes["inner.backbone.width"].members


def test_a_lightning_module_holds_a_model_anywhere():
    import lightning

    class Task(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.parts = {"not": "a module"}
            self.net = torch.nn.Sequential(CASES["llama_tied"].make())

        def training_step(self, batch, batch_idx):
            return self.net[0](**batch, labels=batch["input_ids"]).loss

    submodels = Submodels(Task(), words())
    assert list(submodels.axes) == [f"net.0.model.layers.{i}.{axis}" for i in range(2) for axis in ("heads", "ffn")]
    spec = Spec.select({"net.0.model.layers.0.heads": [1]})
    small = filled(submodels, spec, submodels.state(Task())).module
    small.training_step(words(), 0).backward()
    assert submodels.cost(spec, 4).flops_per_sample < submodels.cost(FULL, 4).flops_per_sample


def test_dropped_heads_are_made_up_for_by_the_values_and_not_by_the_scores():
    _, submodels, full = built("vit")
    spec = Spec.select({"vit.layers.0.heads": [1], "vit.layers.1.ffn": range(2)})
    small = filled(submodels, spec, full, rescale=True).module
    scaled = {name for name, layer in small.named_modules() if layer._forward_hooks}
    assert scaled == {"vit.layers.0.attention.v_proj", "vit.layers.1.mlp.fc1"}
    _, submodels, full = built("llama")
    small = filled(submodels, Spec.select({"model.layers.0.ffn": range(2)}), full, rescale=True).module
    assert [name for name, layer in small.named_modules() if layer._forward_hooks] == ["model.layers.0.mlp.up_proj"]


def test_the_heads_of_an_encoder_are_scaled_while_training_and_only_then():
    module, submodels, full = built("attention")
    spec = Spec.select({"attention.heads": [1]})
    small = filled(submodels, spec, full, rescale=True).module
    plain = filled(submodels, spec, full).module
    inputs = CASES["attention"].inputs()
    bias = module.attention.out_proj.bias
    torch.testing.assert_close(
        small.train()(**inputs) - bias, 3 * (plain.train()(**inputs) - bias), rtol=1e-4, atol=1e-4
    )
    assert torch.equal(small.eval()(**inputs), plain.eval()(**inputs))


def test_attention_weights_of_the_heads_that_are_left():
    module, submodels, full = built("attention")
    small = filled(submodels, Spec.select({"attention.heads": [0, 2]}), full).module.attention.eval()
    q, k, v = CASES["attention"].inputs().values()
    _, every = module.eval().attention(q, k, v, average_attn_weights=False)
    _, left = small(q, k, v, average_attn_weights=False)
    torch.testing.assert_close(left, every[:, [0, 2]])
    torch.testing.assert_close(small(q, k, v)[1], every[:, [0, 2]].mean(1))
    torch.testing.assert_close(small(q[0], k[0], v[0])[0], small(q, k, v)[0][0])
    with pytest.raises(BadInput, match="give one mask for all heads"):
        small(q, k, v, attn_mask=torch.zeros(6, 4, 3))


@pytest.mark.parametrize("training", [False, True])
def test_masks_of_smaller_attentions(training):
    torch.manual_seed(0)
    full = nn.MultiheadAttention(6, 3)
    submodels = Submodels(full)
    spec = Spec.select({"heads": [0, 1]})
    small = filled(submodels, spec, submodels.state(full)).module.train(training)
    reference = zeroed(full, slow_masks(submodels, spec)).train(training)
    x = torch.randn(4, 2, 6)
    causal, padding = (
        torch.triu(torch.ones(4, 4, dtype=torch.bool), 1),
        torch.tensor([[False] * 4, [False, False, True, True]]),
    )
    for options in (
        {"attn_mask": causal},
        {"attn_mask": causal, "is_causal": True, "need_weights": False},
        {"key_padding_mask": padding, "need_weights": False},
        {"attn_mask": torch.randn(4, 4), "key_padding_mask": torch.where(padding, -9.0, 0.0)},
    ):
        torch.testing.assert_close(small(x, x, x, **options)[0], reference(x, x, x, **options)[0], rtol=1e-4, atol=1e-4)


def test_tied_and_shared_tensors_are_one():
    module, submodels, full = built("llama_tied")
    assert module.lm_head.weight is module.model.embed_tokens.weight
    assert submodels.aliases == {"lm_head.weight": "model.embed_tokens.weight"}
    assert "lm_head.weight" not in full.layout.by_name
    params = sum(p.numel() for p in module.parameters())
    assert submodels.cost(FULL, 1).params == params
    shrunk = filled(submodels, Spec.select({"model.layers.0.heads": [1]}), full)
    assert shrunk.module.lm_head.weight is shrunk.module.model.embed_tokens.weight
    assert shrunk.module.lm_head.weight.data_ptr() == shrunk.trained["model.embed_tokens.weight"].data_ptr()
    trained = submodels.layout(Spec.select(trained=["lm_head"]), "trained")
    assert [entry.name for entry in trained.entries] == ["model.embed_tokens.weight"]

    with skeleton():
        again = CASES["llama_tied"].make()
    assert Submodels(again).layout().fingerprint == full.layout.fingerprint

    # one layer of ALBERT runs four times: its tensors are there once, its work counts four times
    module, submodels, full = built("albert")
    assert sum("query.weight" in entry.name for entry in full.layout.entries) == 1
    one, four = (albert_flops(layers) for layers in (1, 4))
    projections, scores = 9 * (4 * 12 * 12 + 2 * 12 * 7), 2 * 9 * 9 * 12
    assert four - one == 3 * 2 * (3 * projections + 3.5 * scores)  # the backward pass makes half of the scores again


def albert_flops(layers):
    class Task(nn.Module):
        def __init__(self):
            super().__init__()
            options = {**WORDS, **SLOW, "num_hidden_layers": layers, "embedding_size": 5}
            self.model = hugging_face("AlbertForSequenceClassification", "AlbertConfig", **options)

        def training_step(self, batch, batch_idx):
            return self.model(**batch, labels=batch["input_ids"][:, 0] * 0).loss

    return Submodels(Task(), words()).cost(FULL, 2).flops_per_sample


def test_layers_of_different_blocks_that_share_a_tensor_shrink_together():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.TransformerEncoderLayer(6, 3, 5) for _ in range(2))
            for name in ("linear1", "linear2"):
                setattr(self.layers[1], name, getattr(self.layers[0], name))

        def forward(self, x):
            return self.layers[1](self.layers[0](x))

    submodels = Submodels(Twice())
    assert list(submodels.axes) == ["layers.0.heads", "layers.0.ffn", "layers.1.heads"]
    small = submodels.shrink(Spec.select({"layers.0.ffn": [0, 3]})).module
    assert small.layers[1].linear1 is small.layers[0].linear1 and small.layers[1].linear2.in_features == 2


def test_a_subclass_has_its_own_axes():
    from transformers.models.bert.modeling_bert import BertLayer

    class Odd(BertLayer):
        def forward(self, hidden_states, *args, **kwargs):
            return super().forward(hidden_states.flip(-1), *args, **kwargs)

    config = CASES["bert"].make().config
    model = nn.Sequential(Odd(config))
    assert list(Submodels(model, [torch.randn(2, 4, 12)]).axes) == ["0.heads", "0.ffn"]
    assert not Submodels(model).stacks


def test_a_model_that_does_not_run_is_trained_whole():
    import transformers

    model = transformers.BertForSequenceClassification(transformers.BertConfig(**WORDS, **SLOW))
    for layer in model.bert.encoder.layer:
        del layer.intermediate.dense
    submodels = Submodels(model, words())
    assert submodels.axes == {}
    with pytest.raises(SpecError, match=r"were not found: modeling_bert.py:\d+: AttributeError.*dense") as caught:
        submodels.normal(Spec.select({"bert.encoder.layer.0.ffn": [0]}))
    assert "\n" not in str(caught.value)


def test_the_width_of_an_attention_in_a_block_of_ones_own():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.norm, self.head = nn.Embedding(23, 6), nn.LayerNorm(6), nn.Linear(6, 4)
            self.attention = nn.MultiheadAttention(6, 3, batch_first=True)

        def forward(self, tokens):
            x = self.embed(tokens)
            y, _ = self.attention(x, x, x, need_weights=False)
            return self.head(self.norm(x + y))

    assert list(Submodels(Own()).axes) == ["attention.heads"]
    submodels = Submodels(Own(), residual_width=True)
    assert {name: axis.size for name, axis in submodels.axes.items()} == {"embed": 6, "attention.heads": 3}
    small = submodels.shrink(Spec.select({"embed": [0, 2, 5, 4], "attention.heads": [1]})).module
    assert small.attention.in_proj_weight.shape == (6, 4) and small.norm.normalized_shape == (4,)
    assert small(torch.ones(2, 5, dtype=torch.long)).shape == (2, 5, 4)


def test_a_part_may_declare_its_axes_itself():
    class Part(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

        def forward(self, x):
            return self.down(self.up(x)[:, :99])

        def submodel_axes(self):
            return {"units": [("up.weight", 0), ("up.bias", 0), ("down.weight", 1)]}

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.part = nn.Linear(4, 5), nn.Sequential(nn.Linear(5, 6), Part())

        def forward(self, x):
            return self.part(torch.relu(self.first(x)))

    submodels = Submodels(Model())
    assert {name: axis.size for name, axis in submodels.axes.items()} == {"first": 5, "part.0": 6, "part.1.units": 8}
    assert submodels.shrink(Spec.select({"part.1.units": [0, 7]})).module(torch.ones(2, 4)).shape == (2, 6)
